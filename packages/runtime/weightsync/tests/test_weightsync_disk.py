"""A version on disk is complete or not there; it is read whole and proved, or an error says what is wrong."""

import errno
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from weightsync_peers import Weights, are_equal, give, load, load_into, plan_of, receiving, take

from offbeat_core import DeadlineError, WeightSyncError
from offbeat_testing import DiskRecord
from offbeat_weightsync import BucketPlan, DiskSender, new_address, read_weights, write_weights
from offbeat_weightsync._transports.version_folder import list_versions

FORK = multiprocessing.get_context("fork")


def write(root: Path, weights: Weights, version: int = 1, keep: int = 2, fault: str = "") -> Path:
    return write_weights(root, plan_of(weights), give(weights, fault), version, keep=keep, file_bytes=4000)


def read(root: Path, version: int = 1, fault: str = "") -> Weights:
    with read_weights(root, version, deadline_s=10) as stream:
        return take(stream, fault)


def test_what_is_read_is_what_was_written_and_safetensors_reads_it_too(tmp_path: Path, weights: Weights) -> None:
    folder = write(tmp_path, weights)
    assert are_equal(read(tmp_path), weights)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 3
    theirs = {name: load_file(folder / file)[name] for name, file in index["weight_map"].items()}
    for name, tensor in weights.items():
        assert torch.equal(theirs[name], tensor)
        assert theirs[name].dtype == tensor.dtype


@pytest.mark.parametrize("bucket_bytes", [4096, 1 << 20], ids=["several buckets", "one"])
def test_weights_are_converted_and_loaded_in_place(tmp_path: Path, floats: Weights, bucket_bytes: int) -> None:
    plan = plan_of(floats, "bfloat16", bucket_bytes)
    write_weights(tmp_path, plan, floats.items(), 3)
    held = {spec.name: torch.zeros(spec.shape, dtype=torch.bfloat16) for spec in plan.specs}
    held["wide"] = torch.zeros(3, 1000, dtype=torch.bfloat16).t()  # strided
    with read_weights(tmp_path, 3, deadline_s=10) as stream:
        load_into(stream, held)
    assert are_equal(held, {name: tensor.bfloat16() for name, tensor in floats.items()})


def test_the_newest_versions_are_kept(tmp_path: Path, weights: Weights) -> None:
    for version in range(1, 5):
        write(tmp_path, weights, version, keep=2)
    assert list_versions(tmp_path) == [3, 4]
    with (
        pytest.raises(DeadlineError, match="version-00000001 to be complete"),
        read_weights(tmp_path, 1, deadline_s=0.1),
    ):
        pass


def test_a_run_that_goes_back_keeps_the_versions_it_writes_and_ends_the_abandoned_ones(
    tmp_path: Path, weights: Weights
) -> None:
    for version in (7, 8, 9, 4):
        write(tmp_path, weights, version, keep=2)
    assert list_versions(tmp_path) == [4, 9]
    write(tmp_path, weights, 5, keep=2)
    assert list_versions(tmp_path) == [4, 5]
    assert are_equal(read(tmp_path, 5), weights)


def test_a_version_that_is_removed_while_it_is_read_is_read_to_its_end(tmp_path: Path, weights: Weights) -> None:
    write(tmp_path, weights, 1)
    with read_weights(tmp_path, 1, deadline_s=10) as stream:
        write(tmp_path, weights, 2, keep=1)
        assert are_equal(take(stream), weights)
    assert list_versions(tmp_path) == [2]


def die_in(function: object, *arguments: object) -> None:
    """Run a function in a process that it kills."""
    process = FORK.Process(target=function, args=arguments)  # type: ignore[arg-type]
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL


def test_a_writer_that_dies_between_two_files_leaves_no_version(tmp_path: Path, weights: Weights) -> None:
    write(tmp_path, weights, 1)
    die_in(write, tmp_path, {**weights, "embed": weights["embed"] + 1}, 2, 2, "die")
    assert list_versions(tmp_path) == [1]
    assert are_equal(read(tmp_path, 1), weights)
    write(tmp_path, weights, 2)
    assert are_equal(read(tmp_path, 2), weights)


def test_a_reader_that_dies_disturbs_no_other(tmp_path: Path, weights: Weights) -> None:
    write(tmp_path, weights, 1)
    die_in(read, tmp_path, 1, "die at wide")
    assert len(read(tmp_path, 1)) == 8
    write(tmp_path, weights, 2, keep=1)
    assert list_versions(tmp_path) == [2]


def test_a_version_has_its_name_once_it_is_on_the_disk_and_the_one_before_goes_after_that(
    tmp_path: Path, weights: Weights
) -> None:
    write(tmp_path, weights, 1)
    with DiskRecord(tmp_path) as disk:
        write(tmp_path, weights, 2, keep=1)
    assert not [step for step in disk.steps if step.unsynced]
    named, hidden, removed = disk.steps[-3:]
    assert (named.target, hidden.source, removed.target) == ("version-00000002", "version-00000001", "")
    assert hidden.unsynced_beside == removed.unsynced_beside == ()
    assert disk.unsynced() == []


class AtOnce(Executor):
    """An executor that has done its work before the caller continues, as a thread may have."""

    def __init__(self, *_: object) -> None:
        pass

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        future = Future[Any]()
        try:
            future.set_result(function(*arguments, **options))
        except OSError as error:
            future.set_exception(error)
        return future


class ReportedLate(AtOnce):
    """An executor that has done its work before the caller continues, and does not report so until it is waited for."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        future = super().submit(function, *arguments, **options)
        future.done = lambda: False  # type: ignore[method-assign]
        return future


def test_what_was_written_after_the_disk_had_begun_is_on_it_before_the_version_has_its_name(
    tmp_path: Path, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offbeat_weightsync._transports.version_folder.ThreadPoolExecutor", ReportedLate)
    with DiskRecord(tmp_path) as disk:
        write(tmp_path, weights, 1)
    assert disk.steps
    assert not [step for step in disk.steps if step.unsynced]


def test_a_version_does_not_appear_whichever_of_its_bytes_the_disk_refuses(
    tmp_path: Path, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system reports lost bytes once: a later sync of the same file says that all is well."""
    refused, done = set[int](), list[int]()

    def sync_or_refuse(sync: Callable[[int], None], file: int) -> None:
        done.append(file)
        if len(done) in refused:
            raise OSError(errno.EIO, "Input/output error")
        sync(file)

    monkeypatch.setattr("offbeat_weightsync._transports.version_folder.ThreadPoolExecutor", AtOnce)
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, partial(sync_or_refuse, getattr(os, name)))
    write(tmp_path / "whole", weights)
    num_syncs, root = len(done), tmp_path / "root"
    assert num_syncs >= 10
    for number in range(1, num_syncs):  # the last one is of the version's name
        refused, done = {number}, []
        with pytest.raises(WeightSyncError, match=r"cannot write version 1 to .*root: Input/output error"):
            write(root, weights)
        assert list(root.iterdir()) == []


@pytest.mark.parametrize("keep", [0, -1])
def test_at_least_one_version_is_kept(tmp_path: Path, weights: Weights, keep: int) -> None:
    with pytest.raises(WeightSyncError, match=f"at least one version must be kept: got keep={keep}"):
        write(tmp_path, weights, keep=keep)


def test_a_version_that_exists_is_left_if_equal_and_refused_if_not(tmp_path: Path, weights: Weights) -> None:
    folder = write(tmp_path, weights)
    hidden = folder.rename(tmp_path / "hidden")
    with DiskRecord(tmp_path) as disk:
        hidden.rename(folder)  # as by a writer that has died before the name was on the disk
        assert write(tmp_path, weights) == folder
    assert disk.unsynced() == []
    with pytest.raises(WeightSyncError, match="which exists, holds other bytes than were sent, in bucket 1 of 5"):
        write(tmp_path, {**weights, "wide": weights["wide"] + 1})
    with pytest.raises(WeightSyncError, match="exists with another plan"):
        write(tmp_path, {"embed": weights["embed"]})


def flip_byte(folder: Path) -> None:
    with (folder / "model-00002-of-00003.safetensors").open("r+b") as file:
        file.seek(9000)
        byte = file.read(1)
        file.seek(9000)
        file.write(bytes([byte[0] ^ 1]))


def change_plan(folder: Path) -> None:
    manifest = json.loads((folder / "weights.json").read_text())
    (folder / "weights.json").write_text(json.dumps({**manifest, "bucket_bytes": 2 * manifest["bucket_bytes"]}))


def swap(folder: Path) -> None:
    os.replace(folder / "model-00003-of-00003.safetensors", folder / "model-00001-of-00003.safetensors")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip_byte, "the engine holds other bytes than were sent, in bucket"),
        (
            lambda folder: os.truncate(folder / "model-00002-of-00003.safetensors", 9000),
            "model-00002-of-00003.safetensors is damaged: .* bytes were written, 9000 are there",
        ),
        (
            lambda folder: (folder / "model-00003-of-00003.safetensors").unlink(),
            "model-00003-of-00003.safetensors cannot be read: No such file or directory; write the version again",
        ),
        (swap, "model-00001-of-00003.safetensors is damaged"),
        (change_plan, r"weights\.json: the plan's digest is [0-9a-f]+, the writer had [0-9a-f]+"),
    ],
)
def test_a_damaged_version_is_refused(
    tmp_path: Path, weights: Weights, damage: Callable[[Path], object], words: str
) -> None:
    damage(write(tmp_path, weights))
    with pytest.raises(WeightSyncError, match=words):
        read(tmp_path)


def test_a_version_under_another_name_or_without_its_list_is_refused(tmp_path: Path, weights: Weights) -> None:
    folder = write(tmp_path, weights)
    renamed = folder.rename(folder.with_name("version-00000009"))
    with pytest.raises(WeightSyncError, match=r"version-00000009/weights\.json says version 1 where 9 was due"):
        read(tmp_path, 9)
    for damaged in (b'{"specs": 3}', b'{"digest": "\xff"}'):
        (renamed / "weights.json").write_bytes(damaged)
        with pytest.raises(WeightSyncError, match=r"weights.json cannot be read: .*; write the version again"):
            read(tmp_path, 9)


def test_an_engine_that_does_not_say_what_it_holds_of_a_version_is_an_error(tmp_path: Path, weights: Weights) -> None:
    write(tmp_path, weights)
    with (
        pytest.raises(WeightSyncError, match="the engine read the weights of version 1 but did not confirm them"),
        read_weights(tmp_path, 1, deadline_s=10) as stream,
    ):
        load(stream)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "the engine proved version 2; version 1 was sent"),
        ({"num_tensors": 7}, "the engine proved 7 tensors; 8 were sent"),
        ({"checksums": ("0" * 16,) * 4}, "the engine proved 4 buckets; 5 were sent"),
        ({"checksums": ("0" * 16,) * 5}, "the engine holds other bytes than were sent, in bucket 0 of 5"),
    ],
)
def test_a_proof_of_something_else_than_a_version_on_disk_is_refused(
    tmp_path: Path, weights: Weights, change: dict[str, Any], words: str
) -> None:
    write(tmp_path, weights)
    with read_weights(tmp_path, 1, deadline_s=10) as stream:
        proof = stream.prove(load(stream).__getitem__)
        with pytest.raises(WeightSyncError, match=words):
            stream.confirm(replace(proof, **change))
        stream.confirm(proof)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path, weights: Weights) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightSyncError, match=r"cannot write version 1 to .*/file: Not a directory"):
        write(tmp_path / "file", weights)


def test_a_disk_that_hangs_is_named_at_the_deadline(
    tmp_path: Path, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, weights)
    overlaps = threading.Event()

    def hang(*_: object) -> int:
        overlaps.wait(60)
        return 0

    monkeypatch.setattr(os, "preadv", hang)
    try:
        with (
            pytest.raises(DeadlineError, match=r"waited 0.5 s for the disk to read bucket 0"),
            read_weights(tmp_path, 1, deadline_s=0.5) as stream,
        ):
            load(stream)
    finally:
        overlaps.set()


def open_sender(root: Path, weights: Weights, plan: BucketPlan | None = None) -> DiskSender:
    return DiskSender(new_address("127.0.0.1"), plan or plan_of(weights), root, deadline_s=30)


def test_a_sender_keeps_the_version_sent_last_and_sends_it_again(tmp_path: Path, weights: Weights) -> None:
    with open_sender(tmp_path, weights) as sender:
        for version in (1, 2, 2):  # the second time to an engine that has joined
            with receiving(sender.address, version) as held:
                sender.send(weights.items(), version, 1)
            assert are_equal(held[0], weights)
    assert list_versions(tmp_path) == [2]


def test_a_part_of_the_weights_stays_no_longer_than_it_is_sent(tmp_path: Path, weights: Weights) -> None:
    part = {name: weights[name] for name in ("embed", "norm")}
    with open_sender(tmp_path, weights) as sender, receiving(sender.address) as held:
        sender.send(part.items(), 1, 1, plan=plan_of(part))
    assert are_equal(held[0], part)
    assert [path.name for path in tmp_path.iterdir()] == [".writer"]


def test_a_trainer_that_went_back_writes_its_own_versions(tmp_path: Path, weights: Weights) -> None:
    """Resumed from an older checkpoint, it comes by the same numbers with other weights."""
    die_in(write, tmp_path, weights, 8, 2, "die")
    write(tmp_path, weights, 7)
    others = {**weights, "embed": weights["embed"] + 1}
    others["head"] = others["embed"]
    with open_sender(tmp_path, others) as sender, receiving(sender.address, 7) as held:
        sender.send(others.items(), 7, 1)
    assert are_equal(held[0], others)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".writer", "version-00000007"]


def test_a_forked_child_does_not_keep_the_folder_of_a_dead_trainer_locked(tmp_path: Path, weights: Weights) -> None:
    sender = open_sender(tmp_path, weights)
    child = os.fork()
    if not child:
        signal.pause()
        os._exit(0)
    try:
        wait_for_no_copy(child, tmp_path / ".writer")
        sender.close()
        open_sender(tmp_path, weights).close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def wait_for_no_copy(pid: int, path: Path) -> None:
    """Return when a process has no descriptor of a file."""
    deadline_s = time.monotonic() + 10
    while path in {each.resolve() for each in Path(f"/proc/{pid}/fd").iterdir()}:
        assert time.monotonic() < deadline_s, f"process {pid} still holds {path}"
        time.sleep(0.01)


def test_two_trainers_do_not_write_to_one_folder(tmp_path: Path, weights: Weights) -> None:
    with open_sender(tmp_path, weights), pytest.raises(WeightSyncError, match="another trainer writes to"):
        open_sender(tmp_path, weights)
    open_sender(tmp_path, weights).close()


def test_a_folder_that_an_engine_does_not_see_is_named_by_both_sides(
    tmp_path: Path, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offbeat_weightsync._transports.disk.SEEN_S", 0.1)
    with open_sender(tmp_path / "here", weights) as sender, receiving(sender.address) as held:
        (tmp_path / "here").rename(tmp_path / "elsewhere")
        with pytest.raises(WeightSyncError, match=r"rollout-0 gave up: .*/here of trainer-0 is not on"):
            sender.send(weights.items(), 1, 1)
    assert "give it under a path that both see" in str(held[0])


def test_a_folder_with_other_tensors_than_were_announced_is_refused(
    tmp_path: Path, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_otherwise(root: Path, plan: BucketPlan, source: object, version: int, check: object) -> None:
        write_weights(root, plan_of(weights, None, 128), weights.items(), version)

    with open_sender(tmp_path, weights) as sender:
        monkeypatch.setattr(sender._folder, "write", write_otherwise)
        words = "holds other tensors than trainer-0 has announced"
        with receiving(sender.address) as held, pytest.raises(WeightSyncError, match=words):
            sender.send(weights.items(), 1, 1)
    assert words in str(held[0])


def test_a_full_disk_is_reported_to_all(tmp_path: Path, weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with (
        open_sender(tmp_path, weights) as sender,
        receiving(sender.address) as held,
        pytest.raises(WeightSyncError, match="cannot write version 1 to"),
    ):
        sender.send(weights.items(), 1, 1)
    assert "trainer-0 gave up: cannot write version 1" in str(held[0])
    assert [path.name for path in tmp_path.iterdir()] == [".writer"]

"""A version on disk is complete or not there; it is read whole and proved, or an error says what is wrong."""

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from weightsync_peers import load, spoil

from offbeat_types import DeadlineError, WeightSyncError
from offbeat_weightsync import (
    BucketPlan,
    describe_tensors,
    list_versions,
    read_weights,
    wait_for_proofs,
    write_weights,
)

FORK = multiprocessing.get_context("fork")


def plan_of(weights: dict[str, Tensor], dtype: str | None = None) -> BucketPlan:
    return BucketPlan.build(describe_tensors(weights.items(), dtype), 4096)


def write(root: Path, weights: dict[str, Tensor], version: int = 1, keep: int = 2) -> Path:
    return write_weights(root, plan_of(weights), weights.items(), version, keep=keep, file_bytes=4000)


def take(root: Path, version: int = 1, fault: str = "", name: str = "rollout-0") -> dict[str, Tensor]:
    with read_weights(root, version, deadline_s=10, name=name) as stream:
        held = load(stream, fault)
        spoil(held, fault)
        if fault != "forget":
            stream.confirm(stream.prove(held.__getitem__))
    return held


def test_what_is_read_is_what_was_written_and_safetensors_reads_it_too(
    tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    folder = write(tmp_path, weights)
    held = take(tmp_path)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 3
    theirs = {name: load_file(folder / file)[name] for name, file in index["weight_map"].items()}
    for name, tensor in weights.items():
        assert torch.equal(held[name], tensor)
        assert torch.equal(theirs[name], tensor)
        assert theirs[name].dtype == tensor.dtype
    assert wait_for_proofs(tmp_path, 1, 1, deadline_s=5)[0].num_tensors == 8


def test_weights_are_converted_and_loaded_in_place(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    floats = {name: tensor for name, tensor in weights.items() if tensor.is_floating_point()}
    plan = plan_of(floats, "bfloat16")
    write_weights(tmp_path, plan, floats.items(), 3)
    held = {spec.name: torch.zeros(spec.shape, dtype=torch.bfloat16) for spec in plan.specs}
    held["wide"] = torch.zeros(3, 1000, dtype=torch.bfloat16).t()  # strided
    with read_weights(tmp_path, 3, deadline_s=10) as stream:
        stream.load(held.__getitem__)
        stream.confirm(stream.prove(held.__getitem__))
    assert all(torch.equal(held[name], floats[name].bfloat16()) for name in floats)


def test_the_newest_versions_are_kept(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    for version in range(1, 5):
        write(tmp_path, weights, version, keep=2)
    assert list_versions(tmp_path) == [3, 4]
    with (
        pytest.raises(DeadlineError, match="version-00000001 to be complete"),
        read_weights(tmp_path, 1, deadline_s=0.1),
    ):
        pass


def test_a_run_that_goes_back_keeps_the_versions_it_writes_and_ends_the_abandoned_ones(
    tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    for version in (7, 8, 9, 4):
        write(tmp_path, weights, version, keep=2)
    assert list_versions(tmp_path) == [4, 9]
    write(tmp_path, weights, 5, keep=2)
    assert list_versions(tmp_path) == [4, 5]
    assert all(torch.equal(tensor, weights[name]) for name, tensor in take(tmp_path, 5).items())


def test_a_version_that_is_removed_while_it_is_read_is_read_to_its_end(
    tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    write(tmp_path, weights, 1)
    with read_weights(tmp_path, 1, deadline_s=10) as stream:
        write(tmp_path, weights, 2, keep=1)
        held = {name: tensor.clone() for name, tensor in stream}
        stream.confirm(stream.prove(held.__getitem__))
    assert list_versions(tmp_path) == [2]


def die_in(function: str, *arguments: object) -> None:
    """Run one of the functions below in a process that it kills."""
    process = FORK.Process(target=globals()[function], args=arguments)
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL


def write_and_die(root: Path, weights: dict[str, Tensor], at: str) -> None:
    def give() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights.items():
            if name == at:
                os.kill(os.getpid(), signal.SIGKILL)
            yield name, tensor

    write_weights(root, plan_of(weights), give(), 2, file_bytes=4000)


def read_and_die(root: Path) -> None:
    take(root, 1, "die at wide")


def test_a_writer_that_dies_between_two_files_leaves_no_version_and_is_taken_up(
    tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    write(tmp_path, weights, 1)
    die_in("write_and_die", tmp_path, weights, "head")
    assert list_versions(tmp_path) == [1]
    assert all(torch.equal(tensor, weights[name]) for name, tensor in take(tmp_path, 1).items())
    first = tmp_path / ".version-00000002.partial" / "model-00001-of-00003.safetensors"
    before = first.stat().st_mtime_ns
    final = write(tmp_path, weights, 2)
    assert (final / first.name).stat().st_mtime_ns == before  # not written again
    assert all(torch.equal(tensor, weights[name]) for name, tensor in take(tmp_path, 2).items())


def test_a_writer_that_died_with_other_weights_leaves_nothing_of_them(
    tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    die_in("write_and_die", tmp_path, {**weights, "embed": weights["embed"] + 1, "wide": weights["wide"] * 2}, "head")
    write(tmp_path, weights, 2)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in take(tmp_path, 2).items())


def test_a_reader_that_dies_disturbs_nobody(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    write(tmp_path, weights, 1)
    die_in("read_and_die", tmp_path)
    assert len(take(tmp_path, 1, name="rollout-1")) == 8
    with pytest.raises(DeadlineError, match=r"1 of 2 readers to prove \(here: rollout-1\)"):
        wait_for_proofs(tmp_path, 1, 2, deadline_s=0.2)
    write(tmp_path, weights, 2, keep=1)
    assert list_versions(tmp_path) == [2]


def test_a_version_that_exists_is_left_if_equal_and_refused_if_not(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    assert write(tmp_path, weights) == write(tmp_path, weights)
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


def truncate(folder: Path) -> None:
    os.truncate(folder / "model-00002-of-00003.safetensors", 9000)


def lose(folder: Path) -> None:
    (folder / "model-00003-of-00003.safetensors").unlink()


def swap(folder: Path) -> None:
    os.replace(folder / "model-00003-of-00003.safetensors", folder / "model-00001-of-00003.safetensors")


def rename(folder: Path) -> None:
    os.replace(folder, folder.with_name("version-00000009"))


def scribble(folder: Path) -> None:
    (folder / "weights.json").write_text('{"specs": 3}')


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip_byte, "the engine holds other bytes than were sent, in bucket"),
        (truncate, "model-00002-of-00003.safetensors is damaged: .* bytes were written, 9000 are there"),
        (lose, "model-00003-of-00003.safetensors cannot be read: No such file or directory; write the version again"),
        (swap, "model-00001-of-00003.safetensors is damaged"),
        (rename, "version-00000009/weights.json says version 1 where 9 was due"),
        (scribble, "weights.json cannot be read: .*; write the version again"),
    ],
)
def test_a_damaged_version_is_refused_on_both_sides(
    tmp_path: Path, weights: dict[str, Tensor], damage: object, words: str
) -> None:
    folder = write(tmp_path, weights)
    damage(folder)  # type: ignore[operator]
    with pytest.raises(WeightSyncError, match=words):
        take(tmp_path, 9 if damage is rename else 1)
    if damage not in (rename, scribble):
        with pytest.raises(WeightSyncError, match=f"rollout-0 gave up: .*{words}"):
            wait_for_proofs(tmp_path, 1, 1, deadline_s=5)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("flip wide", "the engine holds other bytes than were sent, in bucket 3 of 5"),
        ("lose norm", "norm: was sent, but the engine holds no tensor of that name"),
        ("reshape wide", r"wide: planned with shape \(1000, 3\), the engine has \(3000,\)"),
        ("forget", "rollout-0 read the weights of version 1 but did not confirm them"),
        ("refuse wide", "no room for wide"),
    ],
)
def test_a_reader_that_does_not_hold_what_was_written_says_so_to_the_writer(
    tmp_path: Path, weights: dict[str, Tensor], fault: str, words: str
) -> None:
    write(tmp_path, weights)
    with pytest.raises((WeightSyncError, ValueError), match=words):
        take(tmp_path, 1, fault)
    with pytest.raises(WeightSyncError, match=f"rollout-0 gave up: .*{words}"):
        wait_for_proofs(tmp_path, 1, 1, deadline_s=5)


@pytest.mark.parametrize("fault", ["lost", "twice"])
def test_tensors_that_differ_from_the_plan_make_no_version(
    tmp_path: Path, weights: dict[str, Tensor], fault: str
) -> None:
    pairs = list(weights.items())
    given = pairs[:-1] if fault == "lost" else [*pairs, pairs[0]]
    with pytest.raises(WeightSyncError):
        write_weights(tmp_path, plan_of(weights), given, 1)
    assert list_versions(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightSyncError, match=r"cannot write version 1 to .*/file: Not a directory"):
        write(tmp_path / "file", weights)


def test_a_version_of_one_bucket_is_read(tmp_path: Path) -> None:
    weights = {"only": torch.arange(10.0)}
    held = {"only": torch.zeros(10)}
    write_weights(tmp_path, BucketPlan.build(describe_tensors(weights.items())), weights.items(), 3)
    with read_weights(tmp_path, 3, deadline_s=20) as stream:
        stream.load(held.__getitem__)
        stream.confirm(stream.prove(held.__getitem__))
    assert torch.equal(held["only"], weights["only"])


def test_a_disk_that_hangs_is_named_at_the_deadline(
    tmp_path: Path, weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, weights)
    goes_on = threading.Event()

    def hang(*_: object) -> int:
        goes_on.wait(60)
        return 0

    monkeypatch.setattr(os, "preadv", hang)
    try:
        with (
            pytest.raises(DeadlineError, match=r"waited 0.5 s for the disk to read bucket 0"),
            read_weights(tmp_path, 1, deadline_s=0.5) as stream,
        ):
            load(stream, "")
    finally:
        goes_on.set()

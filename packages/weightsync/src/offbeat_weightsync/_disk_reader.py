"""The rollout engine's side of the transport over a folder."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from offbeat_types import OffbeatError, WeightProof, WeightSyncError, tensor_file_header
from offbeat_weightsync._arrivals import ArrivingStream
from offbeat_weightsync._connections import Deadline
from offbeat_weightsync._courier import NUM_BUFFERS, Courier, Handover
from offbeat_weightsync._folders import (
    MANIFEST,
    file_name,
    read_manifest,
    version_folder,
    write_synced,
)
from offbeat_weightsync._plan import BucketPlan
from offbeat_weightsync._proofs import compare_proofs, proof_from_data, proof_to_data
from offbeat_weightsync._windows import WINDOW_BYTES, Window, cut_windows

LOOK_S: Final = 0.05
"""How often a folder is looked at for what is awaited."""


@contextmanager
def read_weights(
    root: str | Path, version: int, *, deadline_s: float = 300.0, name: str = "rollout-0"
) -> Iterator["DiskStream"]:
    """Wait for a version to be complete, and yield its stream. Blocking: use a thread.

        with read_weights(folder, version) as stream:
            stream.confirm(engine.update_weights(stream, version))

    All files are opened at once, so a version that is removed meanwhile is still read to its end. What became of it
    is written beside the version, for `wait_for_proofs`.

    Args:
        root: folder of versions.
        version: policy version wanted; no other will do.
        deadline_s: for the version to be there, and then for it to be read and proved.
        name: this side, unique among the readers, for the writer's errors.

    Raises:
        WeightSyncError: the folder is damaged, or the engine does not hold what was written.
        DeadlineError: the version does not appear.
    """
    folder = version_folder(Path(root), version)
    deadline = Deadline(f"weight sync of version {version} at {name}", deadline_s)
    with deadline.declared("trainer"):
        while not (folder / MANIFEST).exists():
            if not deadline.left_s():
                raise deadline.missed(f"{folder} to be complete")
            time.sleep(LOOK_S)
    try:
        plan, layout, sent = read_manifest(folder, version)
        with _OpenFiles(folder, plan, layout) as files:
            windows = cut_windows(plan, WINDOW_BYTES)
            handover = Handover(_buffers(windows), deadline)
            with Courier(lambda: _read_ahead(windows, files, handover), handover) as courier:
                stream = DiskStream(plan, version, windows, sent, handover)
                yield stream
                _report(folder, name, {"held": proof_to_data(stream.confirmed_proof(name))})
                courier.result()
    except BaseException as error:
        text = str(error) if isinstance(error, OffbeatError) else f"{type(error).__name__}: {error}"
        _report(folder, name, {"error": text})
        raise


class DiskStream(ArrivingStream):
    """A `WeightStream` from a folder. Made by `read_weights`."""

    def __init__(
        self, plan: BucketPlan, version: int, windows: Sequence[Window], sent: WeightProof, handover: Handover
    ) -> None:
        super().__init__(plan, version, windows)
        self._written, self._handover = sent, handover
        self._proof: WeightProof | None = None

    def confirm(self, proof: WeightProof) -> None:
        """Say that the engine has proved these weights, and serves them.

        Raises:
            WeightSyncError: the proof is not of what was written.
        """
        compare_proofs(self.plan, self._written, proof, "the engine")
        self._proof = proof

    def confirmed_proof(self, name: str) -> WeightProof:
        """What was confirmed; WeightSyncError if nothing was."""
        if self._proof is None:
            raise WeightSyncError(f"{name} read the weights of version {self.version} but did not confirm them")
        return self._proof

    def _arrivals(self) -> Iterator[Tensor]:
        for window in self._windows:
            buffer = self._handover.take_full(f"the disk to read bucket {window.bucket} of {len(self.plan.buckets)}")
            yield buffer
            self._handover.give_empty(buffer)

    def _end(self) -> WeightProof:
        return self._written


def wait_for_proofs(
    root: str | Path, version: int, num_receivers: int, *, deadline_s: float = 300.0
) -> list[WeightProof]:
    """Wait until so many readers have proved a version; the writer calls this.

    Raises:
        WeightSyncError: a reader failed, or holds other bytes.
        DeadlineError: not all came.
    """
    folder = version_folder(Path(root), version)
    plan, _, sent = read_manifest(folder, version)
    deadline = Deadline(f"weight sync of version {version}", deadline_s)
    while True:
        reports = {path.stem.removeprefix("proof-"): json.loads(path.read_bytes()) for path in _reports(folder)}
        for name, said in reports.items():
            if "error" in said:
                raise WeightSyncError(f"{name} gave up: {said['error']}")
            compare_proofs(plan, sent, proof_from_data(said["held"]), name)
        if len(reports) >= num_receivers:
            return [proof_from_data(said["held"]) for said in reports.values()]
        if not deadline.left_s():
            here = f" (here: {', '.join(reports)})" if reports else ""
            raise deadline.missed(f"{num_receivers - len(reports)} of {num_receivers} readers to prove{here}")
        time.sleep(LOOK_S)


def _reports(folder: Path) -> list[Path]:
    return sorted(folder.glob("proof-*.json"))


def _report(folder: Path, name: str, said: object) -> None:
    if folder.is_dir():  # else it was removed as too old, and nobody waits for this
        write_synced(folder / f"proof-{name}.json", json.dumps(said).encode())


def _buffers(windows: Sequence[Window]) -> list[Tensor]:
    longest = max(window.num_bytes for window in windows)
    return [torch.empty(longest, dtype=torch.uint8) for _ in range(min(NUM_BUFFERS, len(windows)))]


def _read_ahead(windows: Sequence[Window], files: "_OpenFiles", handover: Handover) -> list[WeightProof]:
    """Read window after window, while the engine loads the one before."""
    for index, window in enumerate(windows):
        buffer, failure = handover.wait_empty(
            f"the engine to load bucket {windows[max(0, index - NUM_BUFFERS)].bucket}"
        )
        if failure is not None:
            return []
        memory = memoryview(buffer.numpy())
        for piece in window.pieces:
            target = memory[piece.bucket_offset : piece.bucket_offset + piece.num_bytes]
            files.read(piece.tensor, piece.tensor_offset, target)
        handover.give_full(buffer)
    return []


class _OpenFiles:
    """The safetensors files of a version."""

    def __init__(self, folder: Path, plan: BucketPlan, layout: list[tuple[int, int]]) -> None:
        self._plan = plan
        self._fds: list[int] = []
        self._places: dict[int, tuple[int, Path, int]] = {}
        try:
            for index, (first, last) in enumerate(layout):
                self._open(folder / file_name(index, len(layout)), first, last)
        except BaseException:
            self.__exit__()
            raise

    def _open(self, path: Path, first: int, last: int) -> None:
        specs = self._plan.specs[first:last]
        header = tensor_file_header(specs)
        try:
            self._fds.append(os.open(path, os.O_RDONLY))
            found, size = os.pread(self._fds[-1], len(header), 0), os.fstat(self._fds[-1]).st_size
        except OSError as error:
            raise WeightSyncError(f"{path} cannot be read: {error.strerror}; write the version again") from error
        expected = len(header) + sum(spec.num_bytes for spec in specs)
        if found != header or size != expected:
            raise WeightSyncError(f"{path} is damaged: {expected} bytes were written, {size} are there, or others")
        offset = len(header)
        for index, spec in enumerate(specs, first):
            self._places[index] = self._fds[-1], path, offset
            offset += spec.num_bytes

    def __enter__(self) -> "_OpenFiles":
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def read(self, tensor: int, offset: int, target: memoryview) -> None:
        """Read a run of bytes of a tensor."""
        fd, path, start = self._places[tensor]
        done = 0
        while done < len(target):
            num_bytes = os.preadv(fd, [target[done:]], start + offset + done)
            if not num_bytes:
                raise WeightSyncError(f"{path} ended within {self._plan.specs[tensor].name}; write the version again")
            done += num_bytes

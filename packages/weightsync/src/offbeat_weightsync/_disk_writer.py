"""The trainer's side of the transport over a folder."""

import os
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from offbeat_types import WeightProof, WeightSyncError, sync_path, tensor_file_header
from offbeat_weightsync._filling import PlannedTensors
from offbeat_weightsync._folders import (
    file_layout,
    file_name,
    partial_folder,
    read_manifest,
    remove_old_versions,
    version_folder,
    write_manifest,
)
from offbeat_weightsync._plan import BucketPlan
from offbeat_weightsync._proofs import compare_proofs
from offbeat_weightsync._tensors import Bytes
from offbeat_weightsync._windows import WINDOW_BYTES, Window, cut_windows

FILE_BYTES: Final = 1 << 30


def write_weights(
    root: str | Path,
    plan: BucketPlan,
    tensors: Iterable[tuple[str, Tensor]],
    version: int,
    *,
    keep: int = 2,
    file_bytes: int = FILE_BYTES,
) -> Path:
    """Write a version, and return its folder when all of it is on disk. One writer at a time.

    A writer that died is taken up: what it wrote, and what is the same now, is not written again. A version that is
    complete already is compared with the tensors and left as it is.

    Args:
        root: folder of versions; made if it is not there.
        plan: the tensors, in the order in which they come, and the dtypes in which they are held.
        tensors: (name, tensor) as planned; converted on the way.
        version: policy version, at least 0.
        keep: complete versions to keep: this one, and those written last before it.
        file_bytes: about as long is a file; a longer tensor has one of its own.

    Raises:
        WeightSyncError: tensors differ from the plan, the disk is full, or the version exists with other bytes.
    """
    root = Path(root)
    partial, final = partial_folder(root, version), version_folder(root, version)
    layout = file_layout(plan, file_bytes)
    try:
        if final.exists():
            _check_same(final, plan, tensors, version)
            return final
        partial.mkdir(parents=True, exist_ok=True)
        with _Files(partial, plan, layout) as files:
            checksums = _write_tensors(plan, tensors, files)
        proof = WeightProof(version=version, num_tensors=len(plan.specs), checksums=checksums)
        write_manifest(partial, plan, layout, proof)
        os.replace(partial, final)
        sync_path(root)
        remove_old_versions(root, keep)
    except OSError as error:
        raise WeightSyncError(f"cannot write version {version} to {root}: {error.strerror or error}") from error
    return final


def remove_partial_versions(root: str | Path) -> None:
    """Remove what writers that died have left and nobody will take up."""
    for path in [*Path(root).glob(".version-*.partial"), *Path(root).glob(".version-*.removed")]:
        shutil.rmtree(path)


def _write_tensors(plan: BucketPlan, tensors: Iterable[tuple[str, Tensor]], files: "_Files") -> tuple[str, ...]:
    source, windows = PlannedTensors(plan, tensors), cut_windows(plan, WINDOW_BYTES)
    memory = _memory_for(windows)
    written = memory.numpy()
    for window in windows:
        source.fill(window, memory)
        for piece in window.pieces:
            end = piece.bucket_offset + piece.num_bytes
            files.write(piece.tensor, piece.tensor_offset, written[piece.bucket_offset : end])
        if window.is_last:
            files.start_sync()
    return source.finish()


def _check_same(final: Path, plan: BucketPlan, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
    """Raise WeightSyncError unless a version that exists is the one that would be written."""
    there, _, proof = read_manifest(final, version)
    if there.digest != plan.digest:
        raise WeightSyncError(f"{final} exists with another plan, {there.digest}; {plan.digest} was to be written")
    source, windows = PlannedTensors(plan, tensors), cut_windows(plan, WINDOW_BYTES)
    memory = _memory_for(windows)
    for window in windows:
        source.fill(window, memory)
    ours = WeightProof(version=version, num_tensors=len(plan.specs), checksums=source.finish())
    compare_proofs(plan, ours, proof, f"{final}, which exists,")


def _memory_for(windows: Sequence[Window]) -> Tensor:
    return torch.empty(max(window.num_bytes for window in windows), dtype=torch.uint8)


class _Files:
    """The safetensors files of one version, open for writing one after the other.

    Bytes that are in a file already, left by a writer that died, are compared and not written again.
    """

    def __init__(self, folder: Path, plan: BucketPlan, layout: list[tuple[int, int]]) -> None:
        self._folder, self._plan, self._layout = folder, plan, layout
        self._offsets: dict[int, int] = {}
        self._index, self._fd, self._old_bytes = -1, -1, 0
        self._syncer = ThreadPoolExecutor(1, "offbeat-weight-sync-to-disk")
        self._syncing: Future[None] | None = None

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._close(synced=kind is None)
        finally:
            self._syncer.shutdown()

    def write(self, tensor: int, offset: int, data: Bytes) -> None:
        """Put a run of bytes of a tensor where it belongs."""
        if tensor not in self._offsets:
            self._close(synced=True)
            self._open(self._index + 1)
        self._put(data, self._offsets[tensor] + offset)

    def start_sync(self) -> None:
        """Let the disk begin with what was written so far, while the next bucket is filled."""
        if self._syncing is None or self._syncing.done():
            self._syncing = self._syncer.submit(os.fdatasync, self._fd)

    def _open(self, index: int) -> None:
        first, last = self._layout[index]
        specs = self._plan.specs[first:last]
        header = tensor_file_header(specs)
        ends = np.cumsum([len(header), *(spec.num_bytes for spec in specs)]).tolist()
        self._index, self._offsets = index, dict(zip(range(first, last), ends, strict=False))
        self._fd = os.open(self._folder / file_name(index, len(self._layout)), os.O_RDWR | os.O_CREAT, 0o644)
        if os.fstat(self._fd).st_size > ends[-1]:
            os.ftruncate(self._fd, ends[-1])
        self._old_bytes = os.fstat(self._fd).st_size
        self._put(np.frombuffer(header, dtype=np.uint8), 0)

    def _put(self, data: Bytes, offset: int) -> None:
        if offset + len(data) <= self._old_bytes and os.pread(self._fd, len(data), offset) == data.tobytes():
            return
        done = 0
        while done < len(data):
            done += os.pwrite(self._fd, data[done:].data, offset + done)

    def _close(self, *, synced: bool) -> None:
        if self._fd < 0:
            return
        try:
            if self._syncing is not None:
                self._syncing.result()
            if synced:
                os.fsync(self._fd)
        finally:
            os.close(self._fd)
            self._fd, self._syncing = -1, None

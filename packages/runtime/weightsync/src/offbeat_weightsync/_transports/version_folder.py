"""Weights on disk: one folder for each version, complete or not there, in safetensors files.

    weights/
      version-00000007/                          appears in one step, when all of it is on disk
        model-00001-of-00002.safetensors         whole tensors in order, as transformers and others load them
        model-00002-of-00002.safetensors
        model.safetensors.index.json             which tensor lies in which file
        weights.json                             version, plan, a checksum for each bucket, the files' sizes
      .version-00000008.partial/                 being written, or left by a writer that died
      plan-0123456789abcdef/                     of a part of the tensors, such as an adapter, while it is sent
      .writer                                    locked by the sender that writes here

Source: the format of safetensors, https://github.com/huggingface/safetensors (8 bytes with the header's length, a
JSON header, the data); the index file of transformers' sharded checkpoints.
"""

import fcntl
import os
import queue
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import ClassVar, Final
from weakref import WeakSet

import msgspec
import numpy as np
from torch import Tensor

from offbeat_core import (
    MODEL_INDEX_FILE,
    TensorSpec,
    WeightProof,
    WeightSyncError,
    new_future,
    settle,
    sync_path,
    tensor_file_header,
    tensor_file_index,
)
from offbeat_weightsync._connection import Deadline
from offbeat_weightsync._plan import BucketPlan, Piece
from offbeat_weightsync._stream import MAX_RUN_BYTES, ArrivingStream, Room, Runs, read_runs
from offbeat_weightsync._tensors import PlannedTensors, compare_proofs

MANIFEST: Final = "weights.json"
PREFIX: Final = "version-"
FILE_BYTES: Final = 1 << 30

_OURS: Final = re.compile(r"\.?version-\d{8}(\.partial|\.removed)?|plan-[0-9a-f]{16}")

LOOK_S: Final = 0.05
"""Time between two polls of a folder."""

Layout = list[tuple[int, int]]
"""Tensors that share a file: [first, last) of each."""


class _Manifest(msgspec.Struct):
    specs: list[tuple[str, str, tuple[int, ...]]]
    bucket_bytes: int
    digest: str
    layout: Layout
    proof: WeightProof
    format: int = 1


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

    A version that is complete already is compared with the tensors and left as it is.

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
    return _write_version(Path(root), plan, PlannedTensors(plan, tensors), version, keep, file_bytes)


def _write_version(
    root: Path,
    plan: BucketPlan,
    source: PlannedTensors,
    version: int,
    keep: int,
    file_bytes: int = FILE_BYTES,
    check: Callable[[], object] = lambda: None,
) -> Path:
    """Do the same as `write_weights`; `check` is called before each bucket, and raises to end it."""
    partial, final = root / f".{PREFIX}{version:08d}.partial", _version_folder(root, version)
    layout = _file_layout(plan, file_bytes)
    try:
        if final.exists():
            _check_same(final, plan, source, version)
            sync_path(root)  # its writer may have died between the rename and this
            return final
        shutil.rmtree(partial, ignore_errors=True)  # of a writer that died
        partial.mkdir(parents=True)
        try:
            with _FileWriter(partial, plan, layout) as files:
                for bucket in plan.buckets:
                    check()
                    for run, data in source.runs(bucket):
                        files.write(run, data)
                    files.start_sync()
                proof = WeightProof(version=version, num_tensors=len(plan.specs), checksums=source.finish())
            _write_manifest(partial, plan, layout, proof)
            os.replace(partial, final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        sync_path(root)
        remove_old_versions(root, keep)
    except OSError as error:
        raise WeightSyncError(f"cannot write version {version} to {root}: {error.strerror or error}") from error
    return final


class VersionFolder:
    """A folder of versions that one sender writes; what a former one has left is removed.

    A forked child does not hold its lock: it would otherwise keep the folder of a killed sender locked.

    Raises:
        WeightSyncError: it cannot be written, or another sender writes to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / ".writer", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise WeightSyncError(f"cannot write weights to {path}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise WeightSyncError(f"another trainer writes to {path}: give each a folder of its own") from error
        _folders.add(self)
        for left in path.iterdir():
            if _OURS.fullmatch(left.name):
                shutil.rmtree(left)

    def write(
        self,
        root: Path,
        plan: BucketPlan,
        source: PlannedTensors,
        version: int,
        check: Callable[[], object],
    ) -> None:
        """Write a version whole, and remove the one before it. See `write_weights`."""
        _write_version(root, plan, source, version, 1, check=check)

    def close(self) -> None:
        """Let another sender write here."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


_folders: WeakSet[VersionFolder] = WeakSet()


def _close_in_child() -> None:
    for folder in list(_folders):
        folder.close()  # closing a copy of the descriptor leaves the parent's lock in place


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def read_weights(root: str | Path, version: int, *, deadline_s: float = 300.0) -> Iterator["DiskStream"]:
    """Wait for a version to be complete, and yield its stream. Blocking: use a thread.

        with read_weights(folder, version) as stream:
            stream.confirm(engine.update_weights(stream, version))

    Needs no sender that lives. All files are opened at once, so a version that is removed meanwhile is read to its end.

    Args:
        root: folder of versions.
        version: policy version wanted; no other will do.
        deadline_s: for the version to be there, and then for it to be read.

    Raises:
        WeightSyncError: the folder is damaged, or the engine does not hold what was written.
        DeadlineError: the version does not appear.
    """
    deadline = Deadline(f"weight sync of version {version}", deadline_s)
    plan, written, opened = open_version(Path(root), version, deadline)
    with opened as files:
        stream = DiskStream(plan, version, written, files)
        yield stream
        stream.check_confirmed("the engine")


def open_version(root: Path, version: int, deadline: Deadline) -> "tuple[BucketPlan, WeightProof, FileReader]":
    """Wait for a version to be complete, and open its files: what was written, its checksums, and the files."""
    folder = _version_folder(root, version)
    await_path(folder / MANIFEST, f"{folder} to be complete", deadline)
    plan, layout, written = _read_manifest(folder, version)
    return plan, written, FileReader(folder, plan, layout, deadline)


def await_path(path: Path, what: str, deadline: Deadline) -> None:
    """Return when it can be seen, which over a network may be later than it was written."""
    if path.exists():
        return
    with deadline.declared("trainer"):
        while not path.exists():
            if not deadline.left_s():
                raise deadline.missed(what)
            time.sleep(LOOK_S)


def list_versions(root: str | Path) -> list[int]:
    """Return the complete versions, oldest first."""
    folders = [path for path in Path(root).glob(f"{PREFIX}*") if (path / MANIFEST).is_file()]
    return sorted(int(path.name.removeprefix(PREFIX)) for path in folders)


def remove_old_versions(root: str | Path, keep: int) -> None:
    """Remove all complete versions but the `keep` written last, which need not be the highest: a run may go back.

    A process that reads one already keeps reading: it has the files open.

    Raises:
        WeightSyncError: `keep` is below 1.
    """
    if keep < 1:
        raise WeightSyncError(f"at least one version must be kept: got keep={keep}")
    written = {
        version: (_version_folder(Path(root), version) / MANIFEST).stat().st_mtime_ns for version in list_versions(root)
    }
    for version in sorted(written, key=lambda version: (written[version], version))[:-keep]:
        doomed = _version_folder(Path(root), version)
        hidden = doomed.with_name(f".{doomed.name}.removed")  # first, so that it is never seen half gone
        os.replace(doomed, hidden)
        shutil.rmtree(hidden)


class DiskStream(ArrivingStream):
    """A `WeightStream` from a folder. Made by `read_weights`."""

    _did: ClassVar = "read"

    def __init__(self, plan: BucketPlan, version: int, written: WeightProof, files: "FileReader") -> None:
        super().__init__(plan, version)
        self._written, self._files = written, files

    def _arrive(self, room: Room) -> Runs:
        return read_runs(self.plan, MAX_RUN_BYTES, self._files.read, room)

    def _end(self) -> WeightProof:
        return self._written

    def _notify(self, proof: WeightProof) -> None:
        compare_proofs(self.plan, self._written, proof, "the engine")


class _FileWriter:
    """The safetensors files of one version, open for writing one after the other."""

    def __init__(self, folder: Path, plan: BucketPlan, layout: Layout) -> None:
        self._folder, self._plan, self._layout = folder, plan, layout
        self._offsets: dict[int, int] = {}
        self._index, self._fd = -1, -1
        self._syncer = ThreadPoolExecutor(1, "offbeat-weight-sync-to-disk")
        self._syncing: Future[None] | None = None

    def __enter__(self) -> "_FileWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._close(synced=kind is None)
        finally:
            self._syncer.shutdown()

    def write(self, run: Piece, data: memoryview) -> None:
        if run.tensor not in self._offsets:
            self._close(synced=True)
            self._open(self._index + 1)
        self._put(data, self._offsets[run.tensor] + run.tensor_offset)

    def start_sync(self) -> None:
        """Let the disk begin with what was written so far, while the next bucket is filled."""
        if self._syncing is not None:
            if not self._syncing.done():
                return
            self._syncing.result()  # the system reports an error of the disk once: the next sync would not
        self._syncing = self._syncer.submit(os.fdatasync, self._fd)

    def _open(self, index: int) -> None:
        first, last = self._layout[index]
        specs = self._plan.specs[first:last]
        header = tensor_file_header(specs)
        ends = np.cumsum([len(header), *(spec.num_bytes for spec in specs)]).tolist()
        self._index, self._offsets = index, dict(zip(range(first, last), ends, strict=False))
        self._fd = os.open(_file_path(self._folder, index, self._layout), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._put(memoryview(header), 0)

    def _put(self, data: memoryview, offset: int) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._fd, data[done:], offset + done)

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


class FileReader(ExitStack):
    """The safetensors files of a version, all open."""

    def __init__(self, folder: Path, plan: BucketPlan, layout: Layout, deadline: Deadline) -> None:
        super().__init__()
        self._plan, self._deadline = plan, deadline
        self._offsets: dict[int, tuple[int, Path, int]] = {}
        # A file system that hangs blocks this thread, which no other waits for.
        self._jobs: queue.SimpleQueue[tuple[Future[None], Piece, memoryview] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="offbeat-weights-from-disk", daemon=True).start()
        self.callback(self._jobs.put, None)
        with ExitStack() as opened:
            for index, (first, last) in enumerate(layout):
                self._open(opened, _file_path(folder, index, layout), first, last)
            self.push(opened.pop_all())

    def _open(self, opened: ExitStack, path: Path, first: int, last: int) -> None:
        specs = self._plan.specs[first:last]
        header = tensor_file_header(specs)
        try:
            fd = os.open(path, os.O_RDONLY)
            opened.callback(os.close, fd)
            found, size = os.pread(fd, len(header), 0), os.fstat(fd).st_size
        except OSError as error:
            raise WeightSyncError(f"{path} cannot be read: {error.strerror}; write the version again") from error
        expected = len(header) + sum(spec.num_bytes for spec in specs)
        if found != header or size != expected:
            raise WeightSyncError(f"{path} is damaged: {expected} bytes were written, {size} are there, or others")
        offset = len(header)
        for index, spec in enumerate(specs, first):
            self._offsets[index] = fd, path, offset
            offset += spec.num_bytes

    def read(self, run: Piece, bucket: int, target: memoryview) -> None:
        job = new_future()
        self._jobs.put((job, run, target))
        try:
            job.result(self._deadline.left_s())
        except TimeoutError:
            if job.done():  # the file system itself has given up
                raise
            raise self._deadline.missed(f"the disk to read bucket {bucket} of {len(self._plan.buckets)}") from None

    def _work(self) -> None:
        while (asked := self._jobs.get()) is not None:
            job, run, target = asked
            settle(job, partial(self._fill, run, target))

    def _fill(self, run: Piece, target: memoryview) -> None:
        fd, path, start = self._offsets[run.tensor]
        done = 0
        while done < len(target):
            num_bytes = os.preadv(fd, [target[done:]], start + run.tensor_offset + done)
            if not num_bytes:
                raise WeightSyncError(
                    f"{path} ended within {self._plan.specs[run.tensor].name}; write the version again"
                )
            done += num_bytes


def _check_same(final: Path, plan: BucketPlan, source: PlannedTensors, version: int) -> None:
    """Raise WeightSyncError unless a version that exists is the one that would be written."""
    there, _, proof = _read_manifest(final, version)
    if there.digest != plan.digest:
        raise WeightSyncError(f"{final} exists with another plan, {there.digest}; {plan.digest} was to be written")
    for bucket in plan.buckets:
        deque(source.runs(bucket), maxlen=0)
    ours = WeightProof(version=version, num_tensors=len(plan.specs), checksums=source.finish())
    compare_proofs(plan, ours, proof, f"{final}, which exists,")


def _version_folder(root: Path, version: int) -> Path:
    return root / f"{PREFIX}{version:08d}"


def _file_path(folder: Path, index: int, layout: Layout) -> Path:
    """Return the path of a file, as transformers names it."""
    return folder / f"model-{index + 1:05d}-of-{len(layout):05d}.safetensors"


def _file_layout(plan: BucketPlan, file_bytes: int) -> Layout:
    """Return which tensors share a file, so that a file has about `file_bytes`."""
    layout, first, used = [], 0, 0
    for index, spec in enumerate(plan.specs):
        if used and used + spec.num_bytes > file_bytes:
            layout.append((first, index))
            first, used = index, 0
        used += spec.num_bytes
    return [*layout, (first, len(plan.specs))]


def _write_manifest(folder: Path, plan: BucketPlan, layout: Layout, proof: WeightProof) -> None:
    files = {
        _file_path(folder, index, layout).name: plan.specs[first:last] for index, (first, last) in enumerate(layout)
    }
    _write_synced(folder / MODEL_INDEX_FILE, tensor_file_index(files).encode())
    specs = [(spec.name, spec.dtype, spec.shape) for spec in plan.specs]
    manifest = _Manifest(specs, plan.bucket_bytes, plan.digest, layout, proof)
    _write_synced(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1))


def _read_manifest(folder: Path, version: int) -> tuple[BucketPlan, Layout, WeightProof]:
    path = folder / MANIFEST
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=_Manifest)
    except FileNotFoundError as error:
        there = ", ".join(map(str, list_versions(folder.parent))) or "none"
        raise WeightSyncError(f"{folder} holds no complete version {version}; complete versions: {there}") from error
    except (OSError, msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WeightSyncError(f"{path} cannot be read: {error}; write the version again") from error
    plan = BucketPlan.build([TensorSpec(*spec) for spec in manifest.specs], manifest.bucket_bytes)
    if manifest.proof.version != version:
        raise WeightSyncError(f"{path} says version {manifest.proof.version} where {version} was due")
    if plan.digest != manifest.digest:
        raise WeightSyncError(f"{path}: the plan's digest is {plan.digest}, the writer had {manifest.digest}")
    return plan, manifest.layout, manifest.proof


def _write_synced(path: Path, data: bytes) -> None:
    """Write a small file, and return when it is on disk under its name."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_path(path.parent)

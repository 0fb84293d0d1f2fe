"""Weights on disk: one folder for each version, complete or not there, in safetensors files.

    weights/
      version-00000007/                          appears in one step, when all of it is on disk
        model-00001-of-00002.safetensors         whole tensors in order, as transformers and others load them
        model-00002-of-00002.safetensors
        model.safetensors.index.json             which tensor lies in which file
        weights.json                             version, plan, a checksum for each bucket, the files' sizes
      .version-00000008.partial/                 being written, or left by a writer that died

Source: the format of safetensors, https://github.com/huggingface/safetensors (8 bytes with the header's length, a
JSON header, the data); the index file of transformers' sharded checkpoints.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Final

from offbeat_types import MODEL_INDEX_FILE, TensorSpec, WeightProof, WeightSyncError, sync_path, tensor_file_index
from offbeat_weightsync._plan import BucketPlan
from offbeat_weightsync._proofs import proof_from_data, proof_to_data

MANIFEST: Final = "weights.json"
PREFIX: Final = "version-"


def version_folder(root: Path, version: int) -> Path:
    """Where a version lies once it is complete."""
    return root / f"{PREFIX}{version:08d}"


def partial_folder(root: Path, version: int) -> Path:
    """Where it is being written."""
    return root / f".{PREFIX}{version:08d}.partial"


def list_versions(root: str | Path) -> list[int]:
    """The complete versions, oldest first."""
    folders = [path for path in Path(root).glob(f"{PREFIX}*") if (path / MANIFEST).is_file()]
    return sorted(int(path.name.removeprefix(PREFIX)) for path in folders)


def remove_old_versions(root: str | Path, keep: int) -> None:
    """Remove all complete versions but the `keep` written last, which need not be the highest: a run may go back.

    Who reads one already reads on: it has the files open.

    Raises:
        WeightSyncError: `keep` is below 1.
    """
    if keep < 1:
        raise WeightSyncError(f"at least one version must be kept: got keep={keep}")
    written = {
        version: (version_folder(Path(root), version) / MANIFEST).stat().st_mtime_ns for version in list_versions(root)
    }
    for version in sorted(written, key=lambda version: (written[version], version))[:-keep]:
        doomed = version_folder(Path(root), version)
        hidden = doomed.with_name(f".{doomed.name}.removed")  # first, so that it is never seen half gone
        os.replace(doomed, hidden)
        shutil.rmtree(hidden)


def file_layout(plan: BucketPlan, file_bytes: int) -> list[tuple[int, int]]:
    """Which tensors share a file: [first, last) of each, so that a file has about `file_bytes`."""
    layout, first, used = [], 0, 0
    for index, spec in enumerate(plan.specs):
        if used and used + spec.num_bytes > file_bytes:
            layout.append((first, index))
            first, used = index, 0
        used += spec.num_bytes
    return [*layout, (first, len(plan.specs))]


def file_name(index: int, count: int) -> str:
    """Name of a file, as transformers has it."""
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def write_synced(path: Path, data: bytes) -> None:
    """Write a small file, and return when it is on disk under its name."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_path(path.parent)


def write_manifest(folder: Path, plan: BucketPlan, layout: list[tuple[int, int]], proof: WeightProof) -> None:
    """Write index and manifest."""
    names = [file_name(index, len(layout)) for index in range(len(layout))]
    files = {name: plan.specs[first:last] for name, (first, last) in zip(names, layout, strict=True)}
    write_synced(folder / MODEL_INDEX_FILE, tensor_file_index(files).encode())
    manifest = {
        "format": 1,
        "specs": [[spec.name, spec.dtype, list(spec.shape)] for spec in plan.specs],
        "bucket_bytes": plan.bucket_bytes,
        "digest": plan.digest,
        "layout": layout,
        "proof": proof_to_data(proof),
    }
    write_synced(folder / MANIFEST, json.dumps(manifest, indent=1).encode())


def read_manifest(folder: Path, version: int) -> tuple[BucketPlan, list[tuple[int, int]], WeightProof]:
    """Plan, layout of the files, and what was written.

    Raises:
        WeightSyncError: the folder is not there, is damaged, or holds another version.
    """
    path = folder / MANIFEST
    try:
        data = json.loads(path.read_bytes())
        plan = BucketPlan.build(
            [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in data["specs"]], data["bucket_bytes"]
        )
        layout = [(int(first), int(last)) for first, last in data["layout"]]
        proof = proof_from_data(data["proof"])
    except FileNotFoundError as error:
        there = ", ".join(map(str, list_versions(folder.parent))) or "none"
        raise WeightSyncError(f"{folder} holds no complete version {version}; complete versions: {there}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightSyncError(f"{path} cannot be read: {error}; write the version again") from error
    if proof.version != version:
        raise WeightSyncError(f"{path} says version {proof.version} where {version} was due")
    if plan.digest != data["digest"]:
        raise WeightSyncError(f"{path}: the plan's digest is {plan.digest}, the writer had {data['digest']}")
    return plan, layout, proof

"""Forces what was written onto the disk, so that a rename afterwards publishes what is whole."""

import os
from pathlib import Path


def sync_path(path: Path) -> None:
    """Return when a file's bytes, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Return when a folder and everything in it is on the disk."""
    for root, _, names in os.walk(folder):
        for name in names:
            sync_path(Path(root, name))
        sync_path(Path(root))

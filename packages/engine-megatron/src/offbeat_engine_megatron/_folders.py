"""Folders that are whole or not there: staged beside the place they are for, and moved there by renames."""

import shutil
import uuid
from pathlib import Path
from typing import Final

from offbeat_types import sync_path, sync_tree

TEMPORARY: Final = ".tmp-"
OLD: Final = ".old-"


def stage(folder: Path) -> Path:
    """Make an empty folder beside `folder`, after clearing away what a killed process has left there."""
    recover(folder)
    for left in folder.parent.glob(f"{TEMPORARY}*-{folder.name}"):
        if len(left.name) == len(TEMPORARY) + 9 + len(folder.name):
            shutil.rmtree(left)
    staged = _beside(folder, TEMPORARY)
    staged.mkdir(parents=True)
    return staged


def publish(staged: Path, folder: Path, *, replaces: bool) -> None:
    """Give a staged folder its name; everything in it is on the disk before.

    Args:
        staged: of `stage`.
        folder: may be there.
        replaces: what it holds is replaced; else it is kept, and what was staged comes into it.
    """
    sync_tree(staged)
    if folder.is_dir() and not replaces:
        for entry in sorted(staged.iterdir(), key=lambda each: each.is_dir()):  # the state of training comes last
            entry.rename(folder / entry.name)
        staged.rmdir()
        sync_path(folder)
        return
    old = _beside(folder, OLD)
    if folder.is_dir():  # a rename cannot replace a folder that holds files: the old one steps aside, see `recover`
        folder.rename(old)
    staged.rename(folder)
    sync_path(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def recover(folder: Path) -> None:
    """Put back a folder whose replacement was killed between its two renames, and clear away what it left else."""
    for old in folder.parent.glob(f"{OLD}*-{folder.name}"):
        if len(old.name) != len(OLD) + 9 + len(folder.name):
            continue
        if folder.exists():
            shutil.rmtree(old)
        else:
            old.rename(folder)


def _beside(folder: Path, prefix: str) -> Path:
    return folder.with_name(f"{prefix}{uuid.uuid4().hex[:8]}-{folder.name}")

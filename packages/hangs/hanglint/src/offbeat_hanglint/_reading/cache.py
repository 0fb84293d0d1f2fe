"""Results of reading files, kept in the user's cache directory: a second run reads only what changed.

An entry is plain JSON under a name that is the hash of what it was made from: the file's bytes, its name in the program
and the version of the code that reads it. Nothing needs to be renewed, then, and a damaged entry is as good as none.
"""

import contextlib
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

UNUSED_DAYS: Final = 30
TIDY_EVERY_S: Final = 24 * 3600
_DAY_S: Final = 24 * 3600
# Entries look alike in each folder of a version; two letters of the hash keep such a folder short.
_PREFIX_LETTERS: Final = 2
_TIDIED: Final = "tidied"
# A cache directory says so itself, for programs that back up or clean (https://bford.info/cachedir/).
_TAG: Final = "CACHEDIR.TAG"
_TAG_TEXT: Final = "Signature: 8a477f597d28d172789f06886806bc55\n# Written by hanglint; may be deleted at any time.\n"


def default_cache_folder() -> Path:
    """`$XDG_CACHE_HOME/hanglint`; `~/.cache/hanglint` without that variable, %LOCALAPPDATA% on Windows."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):  # the specification: a relative one is ignored
        return Path(named) / "hanglint"
    local = os.environ.get("LOCALAPPDATA") if sys.platform == "win32" else None
    return Path(local or Path("~/.cache").expanduser()) / "hanglint"


class FactCache:
    """Facts of files by content.

    Every failure of the disk means "not kept": a full disk, a folder that may not be written, a damaged file.

    Args:
        folder: where entries lie; None keeps nothing.
        version: of the code that makes the facts; entries of another version are never seen.
    """

    def __init__(self, folder: Path | None, version: str) -> None:
        self._folder = folder / _hash(version.encode(), sys.version_info[:2])[:16] if folder else None
        self.num_hits = 0
        self.num_misses = 0

    def read(self, content: bytes, name: str) -> Any | None:
        """Return what was kept for a file of this content and name; None when nothing was, or it is damaged."""
        found = self._load(self._entry(content, name)) if self._folder else None
        if found is None:
            self.num_misses += 1
        else:
            self.num_hits += 1
        return found

    def write(self, content: bytes, name: str, facts: Any) -> None:
        """Keep facts, which are plain JSON data other than None."""
        if self._folder is None:
            return
        text = json.dumps(facts, separators=(",", ":"), ensure_ascii=False)
        _write_whole(self._entry(content, name), text.encode("utf-8", "surrogatepass"))

    def _entry(self, content: bytes, name: str) -> Path:
        assert self._folder is not None
        key = _hash(content, name)
        return self._folder / key[:_PREFIX_LETTERS] / f"{key[_PREFIX_LETTERS:]}.json"

    @staticmethod
    def _load(path: Path) -> Any | None:
        try:
            text = path.read_bytes().decode("utf-8", "surrogatepass")
            return json.loads(text)
        except (OSError, ValueError, RecursionError):
            return None


def tidy(folder: Path, now_s: float | None = None) -> int:
    """Delete what has not been written or read for 30 days; looks once a day.

    Args:
        folder: the whole cache.
        now_s: seconds since 1970; the clock's by default.

    Returns:
        Number of entries deleted.
    """
    now_s = time.time() if now_s is None else now_s
    mark = folder / _TIDIED
    try:
        if mark.is_file() and now_s - mark.stat().st_mtime < TIDY_EVERY_S:
            return 0
    except OSError:
        return 0
    _write_whole(mark, b"")
    _write_whole(folder / _TAG, _TAG_TEXT.encode())
    num_deleted = 0
    for entry in folder.glob(f"*/{'?' * _PREFIX_LETTERS}/*"):
        try:
            read = entry.stat()
            if now_s - max(read.st_atime, read.st_mtime) > UNUSED_DAYS * _DAY_S:
                entry.unlink()
                num_deleted += 1
        except OSError:
            continue
    return num_deleted


def _hash(content: bytes, beside: object) -> str:
    digest = hashlib.sha256(content, usedforsecurity=False)
    digest.update(repr(beside).encode("utf-8", "backslashreplace"))
    return digest.hexdigest()


def _write_whole(path: Path, content: bytes) -> None:
    """Write a file that readers see whole or not at all; nothing is written where that is impossible."""
    part = path.parent / f".{os.urandom(8).hex()}.part"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)

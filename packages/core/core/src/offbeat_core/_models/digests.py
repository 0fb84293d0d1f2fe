"""Digests of files: made while a file is written, kept beside it, and compared when the file is read.

Source: XXH3 with 64 bits, https://xxhash.com. It is about as fast as memory, and finds bytes that a disk, a cable or a
copy has changed; it does not detect deliberate changes.
"""

import hashlib
import os
from pathlib import Path
from typing import Final

import xxhash

DIGEST_SUFFIX: Final = ".xxh3"
"""Ends the name of the file that holds the digest of the file beside it."""


def digest_file(path: Path) -> str:
    """Read a file and return its digest, 16 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()


def write_digest(path: Path, digest: str) -> None:
    """Keep the digest of a file beside it, and return when it is on the disk."""
    with path.with_name(path.name + DIGEST_SUFFIX).open("w") as file:
        file.write(f"{digest}\n")
        file.flush()
        os.fsync(file.fileno())


def digest_of(path: Path) -> str:
    """Return the digest that was made while a file was written, or else read the file to make one."""
    beside = path.with_name(path.name + DIGEST_SUFFIX)
    return beside.read_text(errors="replace").strip() if beside.is_file() else digest_file(path)


def describe_damage(path: Path, written: str) -> str:
    """Say how the bytes of a file differ from those that were written, such as "has the digest ..."; else nothing.

    Args:
        path: of the file.
        written: its digest when it was written.
    """
    try:
        found = digest_file(path)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return "" if found == written else f"has the digest {found} and was written with {written}"

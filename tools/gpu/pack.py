"""Packs what a GPU machine without a network needs beside torch and transformers into one folder.

    python tools/gpu/pack.py FOLDER [--python 3.12]

Wheels of ours by `uv build`, and the few others that they import, unpacked for that Python on Linux x86-64. There:
`PYTHONPATH=FOLDER python tools/gpu/run.py --out gpu-out`, from the root of this tree.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from workspace import packages

ROOT: Final = Path(__file__).parents[2]
OTHERS: Final = (
    *("msgspec", "xxhash", "rich", "markdown-it-py", "mdurl", "pygments"),
    *("tensorboardX", "protobuf"),
    *("megatron-core", "einops", "psutil"),
)
"""Imported by ours, and needed by neither torch nor transformers; at the versions of the lock."""
LEFT_OUT: Final = frozenset({"rollout-vllm", "rollout-trtllm", "sft-app"})
"""No piece imports these."""
NOT_NEEDED: Final = ("share",)
"""Folders that a wheel brings for notebooks."""
TOO_LARGE, FOLDER_IS_THERE = 1, 2
MAX_BYTES: Final = 60 * 10**6


def commands(folder: Path, wheels: Path, python: str) -> list[list[str]]:
    """Return the commands that build and unpack."""
    ours = [package.name for package in packages(ROOT) if package.key not in LEFT_OUT]
    build = [["uv", "build", "--quiet", "--wheel", f"--package={name}", f"--out-dir={wheels}"] for name in ours]
    target = ["uv", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", f"--target={folder}"]
    platform = [f"--python-version={python}", "--python-platform=x86_64-manylinux_2_28"]
    return [*build, [*target, *platform, "--no-sources", f"--find-links={wheels}", *ours, *OTHERS]]


def num_bytes(folder: Path) -> int:
    """Return the bytes of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main(arguments: Sequence[str] | None = None) -> int:
    """Pack, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--python", default="3.12", help="version on the GPU machine")
    args = parser.parse_args(arguments)
    if args.folder.exists():
        print(f"{args.folder} is there already, and what lies in it would stay: remove it, or name another folder")
        return FOLDER_IS_THERE
    with tempfile.TemporaryDirectory() as wheels:
        for command in commands(args.folder.resolve(), Path(wheels), args.python):
            subprocess.run(command, cwd=ROOT, check=True)
    for name in NOT_NEEDED:
        shutil.rmtree(args.folder / name, ignore_errors=True)
    size = num_bytes(args.folder)
    print(f"{args.folder}: {size / 1e6:.1f} MB, {MAX_BYTES / 1e6:.0f} allowed")
    return 0 if size <= MAX_BYTES else TOO_LARGE


if __name__ == "__main__":
    sys.exit(main())

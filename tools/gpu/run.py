"""Runs the pieces one after the other, each in a process of its own, and leaves a JSON for each.

    python tools/gpu/run.py [PIECE ...] --out FOLDER [--device cuda|cpu]

A piece has 8 minutes; one that fails, crashes or does not end is noted, and the next one runs. Exit code 0: all of them
passed; 1: some did not; 2: no such piece; 3: the device is not here.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.piece import FOLDER, device_name, record, write_json

from offbeat_core import ConfigError
from offbeat_device import open_device

PIECES: Final = {
    "device_seam": "the device as every other part sees it",
    "packed_attention": "packed attention and sliding windows beside plain attention with masks",
    "trainer_against_cpu": "a training step, on the device and on the CPU",
    "megatron_against_cpu": "the same by megatron-core, in a world of one",
    "decoding": "what the embedded engine samples, beside transformers",
    "parked_memory": "memory that trainer and engine give back, and take again",
    "cuda_ipc": "weights from process to process through device memory",
    "liveness_nccl": "the liveness monitor over nccl, in a world of one",
    "quickstart": "a whole run on one device",
    "decoding_speed": "tokens a second, and the share of the memory's bandwidth",
    "training_speed": "a step of 0.6 B parameters at 8,192 tokens, and the share of the peak",
}
"""In the order in which they run: what is right comes before what is fast."""
LIMIT_S: Final = 480.0
SOME_FAILED, UNKNOWN_PIECE, NO_DEVICE = 1, 2, 3
TAIL_LINES: Final = 20


def run_piece(script: Path, device: str, out: Path, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Run one script, and return what its JSON says; of one that came to no end, the figures so far, and why."""
    out.unlink(missing_ok=True)
    command = [sys.executable, str(script), "--device", device, "--out", str(out)]
    log = out.with_suffix(".log")
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            ended = f"ended with {process.wait(limit_s)}"
        except subprocess.TimeoutExpired:
            ended = f"did not end within {limit_s:.0f} s"
        finally:
            _kill_session(process)
    if not out.exists():
        result = record(script.stem, PIECES.get(script.stem, script.stem), device_name(open_device(device)))
        write_json(out, result | {"tiny": device == "cpu"})
    found: dict[str, Any] = json.loads(out.read_text())
    if not found["passed"] and not found["error"]:  # it came to no end of its own; the figures of before are there
        tail = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        found["error"] = "\n".join([ended, *tail])
        write_json(out, found)
    return found


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill the piece and the processes that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def show(done: dict[str, Any]) -> None:
    """Print the result of one piece in a few lines."""
    print(f"{done['piece']}: {'passed' if done['passed'] else 'FAILED'} in {done['seconds']} s on {done['device']}")
    for name, figure in done["figures"].items():
        print(f"  {name} {figure:.4g}" if isinstance(figure, float) else f"  {name} {figure}")
    if done["error"]:
        print("  " + done["error"].replace("\n", "\n  "), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line names, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help=f"of {', '.join(PIECES)}; none: all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    args = parser.parse_args(arguments)
    unknown = [name for name in args.pieces if name not in PIECES]
    if unknown:
        print(f"no such piece: {', '.join(unknown)}; there are {', '.join(PIECES)}")
        return UNKNOWN_PIECE
    try:
        open_device(args.device)
    except ConfigError as error:
        print(f"nothing was run: {error}")
        return NO_DEVICE
    args.out.mkdir(parents=True, exist_ok=True)
    passed = []
    for name in args.pieces or PIECES:
        result = run_piece(FOLDER / f"{name}.py", args.device, args.out / f"{name}.json")
        show(result)
        passed.append(result["passed"])
    print(f"{sum(passed)} of {len(passed)} passed; {args.out}", flush=True)
    return 0 if all(passed) else SOME_FAILED


if __name__ == "__main__":
    sys.exit(main())

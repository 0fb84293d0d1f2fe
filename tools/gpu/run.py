"""Runs the pieces one after the other, each in a process of its own, and leaves a JSON for each.

    python tools/gpu/run.py [PIECE ...] --out FOLDER [--device cuda|cpu] [--budget-s SECONDS] [--tree NAME=PATH ...]

A piece has 8 minutes; one that fails, crashes or does not end is noted, and the next one runs. With a budget a piece
begins only where its usual time is left, and the last line names those left out. With trees each piece runs with the
sources of each in turn, this folder's script and the same environment, and their figures are shown side by side:
`--tree before=../house --tree after=.`. Exit code 0: all that ran passed; 1: some did not; 2: no such piece, or no such
tree; 3: the device is not here.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.piece import FOLDER, device_name, record, write_json
from workspace import packages

from offbeat_core import ConfigError
from offbeat_device import open_device


@dataclass(frozen=True)
class Piece:
    """A script of this folder.

    Args:
        what: it shows.
        seconds: that it takes on one H200, at least about; a budget with less left leaves it out.
    """

    what: str
    seconds: float


PIECES: Final = {
    "grpo_shared": Piece(
        "a whole GRPO run, trainer and engine on one device at once, beside TRL; goal 100 samples/s", 150
    ),
    "grpo_turns": Piece(
        "a whole GRPO run in turns; goals 80 samples/s, parking and waking 20 GB/s, 1 GiB kept asleep", 150
    ),
    "train_profile": Piece(
        "kernels of a training step; goals 85,000 tokens/s at 0.6B, 45 % of the peak on 8B's layers", 150
    ),
    "decode_profile": Piece(
        "kernels of a decoding step; goals 1,200 and 48,000 tokens/s, 65 % of the bandwidth at 8B", 110
    ),
    "decode_continuous": Piece(
        "requests of mixed lengths beside a batch that starts together; goal 75 % of its speed", 45
    ),
    "ipc_alone": Piece("4 GiB of weights from process to process, nothing beside; goal 20 GB/s", 30),
    "two_ranks_one_gpu": Piece("two ranks of a trainer on one device, equal to one rank within 2e-4", 45),
    "sync_guard": Piece("decoding steps, forward and backward in which the host never waits", 40),
    "trainer_against_cpu": Piece("a training step, on the device and on the CPU", 10),
    "decoding": Piece("what the embedded engine samples, beside transformers", 20),
    "packed_attention": Piece("packed attention and sliding windows beside plain attention with masks", 10),
    "device_seam": Piece("the device as every other part sees it", 10),
    "megatron_against_cpu": Piece("a training step by megatron-core, in a world of one", 30),
    "parked_memory": Piece("memory that trainer and engine give back, and take again", 20),
    "cuda_ipc": Piece("weights from process to process through device memory", 35),
    "liveness_nccl": Piece("the liveness monitor over nccl, in a world of one", 55),
    "training_speed": Piece("a step of 0.6 B parameters at 8,192 tokens, and the share of the peak", 60),
    "decoding_speed": Piece("tokens a second, and the share of the memory's bandwidth", 75),
    "quickstart": Piece("the quickstart with its defaults; goal 0.9 of held-out sums within 20 s of updates", 60),
    "learning": Piece("a wider model fine-tuned, then trained by GRPO; goal 0.9 of held-out sums", 240),
}
"""In the order of their worth, which is that in which they run: whole runs, speeds, then one part each."""
LIMIT_S: Final = 480.0
SOME_FAILED, UNKNOWN_PIECE, NO_DEVICE = 1, 2, 3
TAIL_LINES: Final = 20


def run_piece(
    script: Path, device: str, out: Path, limit_s: float = LIMIT_S, tree: Path | None = None
) -> dict[str, Any]:
    """Run one script, and return what its JSON says; of one that came to no end, the figures so far, and why.

    Args:
        script: of this folder.
        device: "cuda", or "cpu" for the tiny form.
        out: file for the JSON; the log lies beside it.
        limit_s: longest time.
        tree: whose sources it imports; None: those that are installed.
    """
    out.unlink(missing_ok=True)
    command = [sys.executable, str(script), "--device", device, "--out", str(out)]
    log = out.with_suffix(".log")
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, env=environment_of(tree)
        )
        try:
            ended = f"ended with {process.wait(limit_s)}"
        except subprocess.TimeoutExpired:
            ended = f"did not end within {limit_s:.0f} s"
        finally:
            _kill_session(process)
    if not out.exists():
        what = PIECES[script.stem].what if script.stem in PIECES else script.stem
        result = record(script.stem, what, device_name(open_device(device)))
        write_json(out, result | {"tiny": device == "cpu"})
    found: dict[str, Any] = json.loads(out.read_text())
    if not found["passed"] and not found["error"]:  # it came to no end of its own; the figures of before are there
        tail = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        found["error"] = "\n".join([ended, *tail])
        write_json(out, found)
    return found


def environment_of(tree: Path | None) -> dict[str, str]:
    """Return the environment of a piece that imports the sources of a tree before those that are installed."""
    if tree is None:
        return dict(os.environ)
    sources = [str(package.source.parent) for package in packages(tree)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*sources, *filter(None, [os.environ.get("PYTHONPATH")])])}


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


def show_beside(name: str, results: Mapping[str, dict[str, Any]]) -> None:
    """Print the numbers of one piece by tree, and the last over the first."""
    of_trees = [result["figures"] for result in results.values()]
    print(f"{name}: {', '.join(results)}, last over first")
    for figure in of_trees[0]:
        values = [figures.get(figure) for figures in of_trees]
        if all(isinstance(value, int | float) for value in values):
            ratio = f"{values[-1] / values[0]:.3f}" if values[0] else "–"
            print(f"  {figure}: {', '.join(f'{value:.4g}' for value in values)}, {ratio}")


def parse_trees(words: Sequence[str]) -> dict[str, Path]:
    """Return folders by name.

    Raises:
        ConfigError: a word that is not NAME=PATH, or a path that is no tree of this project.
    """
    trees = {}
    for word in words:
        name, _, path = word.partition("=")
        if not name or not path or not (Path(path) / "pyproject.toml").is_file() or name in trees:
            raise ConfigError(f"--tree {word}: give NAME=PATH, names that differ and the root of a tree each")
        trees[name] = Path(path).resolve()
    return trees


def run_all(
    names: Sequence[str], device: str, out: Path, budget_s: float, trees: Mapping[str, Path]
) -> tuple[list[bool], list[str]]:
    """Run pieces while there is time for them; return which passed, and the names of those left out."""
    end_s = time.monotonic() + budget_s
    passed, left_out = list[bool](), list[str]()
    for name in names:
        usual_s, left_s = PIECES[name].seconds * max(1, len(trees)), end_s - time.monotonic()
        if usual_s > left_s:
            left_out.append(f"{name} (about {usual_s:.0f} s, {max(0.0, left_s):.0f} s left)")
            continue
        results = {}
        for tree_name, tree in trees.items() or [("", None)]:
            folder = out / tree_name
            folder.mkdir(parents=True, exist_ok=True)
            limit_s = max(1.0, min(LIMIT_S, end_s - time.monotonic()))
            results[tree_name] = run_piece(FOLDER / f"{name}.py", device, folder / f"{name}.json", limit_s, tree)
            show(results[tree_name])
        if trees:
            show_beside(name, results)
        passed += [result["passed"] for result in results.values()]
    return passed, left_out


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line names, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help=f"of {', '.join(PIECES)}; none: all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--budget-s", type=float, default=math.inf, help="for all pieces together; default: no bound")
    parser.add_argument("--tree", action="append", default=[], metavar="NAME=PATH", help="may be given several times")
    args = parser.parse_args(arguments)
    unknown = [name for name in args.pieces if name not in PIECES]
    if unknown:
        print(f"no such piece: {', '.join(unknown)}; there are {', '.join(PIECES)}")
        return UNKNOWN_PIECE
    try:
        trees = parse_trees(args.tree)
    except ConfigError as error:
        print(error)
        return UNKNOWN_PIECE
    try:
        open_device(args.device)
    except ConfigError as error:
        print(f"nothing was run: {error}")
        return NO_DEVICE
    passed, left_out = run_all(args.pieces or list(PIECES), args.device, args.out, args.budget_s, trees)
    print(f"{sum(passed)} of {len(passed)} passed; {args.out}", flush=True)
    if left_out:
        print(f"left out: {', '.join(left_out)}", flush=True)
    return 0 if all(passed) else SOME_FAILED


if __name__ == "__main__":
    sys.exit(main())

"""Writes docs/gpu.md from the JSONs that the pieces have left on an accelerator.

    python tools/gpu/report.py [FOLDER]

New JSONs of FOLDER go to tools/gpu/results first, which is committed; those of a CPU are refused. A piece that has no
JSON there has a row that says so.
"""

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.piece import FOLDER, RESULTS
from gpu.run import PIECES

PAGE: Final = FOLDER.parents[1] / "docs" / "gpu.md"
NOT_RUN: Final = "not run yet"
HEAD: Final = """# On a GPU

This page lists which code has run on a GPU, when, and on which one. "Not run yet" marks code that has not.
`python tools/gpu/report.py` writes this page from the results of `python tools/gpu/run.py`; see `tools/gpu/README.md`.
The tests run a tiny form of each piece on a CPU.

| piece | what | last run | on | passed |
|---|---|---|---|---|
"""
OTHER_FIGURES: Final = """
## Other figures

Measured once by hand. A Qwen3 of 0.6 B parameters with random weights, bfloat16, torch 2.11.

**Whole runs**, one H100, trainer and rollout engine on the one card, 8 prompts × 8 samples of 128 tokens, 2026-11-28:

| weights travel | samples/s |
|---|---|
| through host memory, which `rollout.weight_transport = "auto"` takes | 24.5 |
| by `rollout.weight_transport = "cuda-ipc"` | 58.0 |
| in turns, `cluster.colocate = true`: 4.5 s of an update of 14 s are the handover | 4.2 |

The mismatch of tokens without lag (`mismatch/abs_p99_nats_lag0`) is 0.019 to 0.027 nats in these runs. In the
quickstart it is 0.083 in the median of 98 updates and 0.30 at most; the alarm is at 0.5.

**The quickstart in turns**, the same H100, float32: 0.488 to 0.816 of the held-out sums after 100 updates, which took
49 s. The piece of today lets trainer and engine work at once and has a goal.

**An H200**, 2026-11-26: a training step of 8,192 tokens takes 0.227 s with the head in bfloat16 (15 % of the peak)
and 0.298 s in float32, with a peak memory of 24.5 GiB. Decoding samples 481 tokens/s at batch 1 and 17,500 at 64 (12
and 17 % of the bandwidth); transformers' `generate` samples 42 and 2,550.

**What is left.** Small kernels run between the products: a training step on the H100 launches 5,717 of them, and 64
decoding steps at batch 64 launch 46,800, with 28 % of their time in attention. The trainer's layers are transformers'
own, and `torch.compile` was not tried.

**`parked_memory`** does not pass: asleep at level 1 the rollout engine holds 64 MiB beside its weights. That is the
size of two cuBLAS workspaces of 32 MiB, one for each stream that computes; it was not shown that they are the cause.
"""


def read_results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Return the results by piece."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return {result["piece"]: result for result in found}


def take_results(folder: Path, into: Path = RESULTS) -> list[str]:
    """Copy the JSONs of accelerators; return the names of those refused."""
    into.mkdir(exist_ok=True)
    refused = []
    for path in sorted(folder.glob("*.json")):
        if json.loads(path.read_text())["tiny"]:
            refused.append(path.name)
        else:
            shutil.copyfile(path, into / path.name)
    return refused


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the whole page."""
    rows = [_row(name, piece.what, results.get(name)) for name, piece in PIECES.items()]
    figures = [_figures(results[name]) for name in PIECES if name in results]
    return HEAD + "\n".join(rows) + "\n" + "".join(figures) + OTHER_FIGURES


def _row(name: str, what: str, result: Mapping[str, Any] | None) -> str:
    if result is None:
        return f"| `{name}` | {what} | {NOT_RUN} | – | – |"
    at = f" ({result['commit']})" if result["commit"] else ""
    passed = "yes" if result["passed"] else "no: " + result["error"].splitlines()[0].replace("|", "/")
    return f"| `{name}` | {what} | {result['date']}{at} | {result['device']}, torch {result['torch']} | {passed} |"


def _figures(result: Mapping[str, Any]) -> str:
    lines = [f"\n## {result['piece']}\n\n{result['what']}. {result['seconds']} s.\n\n| figure | value |\n|---|---|\n"]
    lines += [f"| {name} | {_cell(value)} |\n" for name, value in result["figures"].items()]
    return "".join(lines) if result["figures"] else ""


def _cell(value: object) -> str:
    if value is None:
        return "unknown peak of this device"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Copy new results, and write the page."""
    for name in take_results(Path(sys.argv[1])) if len(sys.argv) > 1 else []:
        print(f"{name} is of a CPU: left out")
    PAGE.write_text(page(read_results()))


if __name__ == "__main__":
    main()

"""Code that the pieces share: where they run, how long something takes there, and the JSON that they leave.

A piece is a script of this folder with a function `run`, which takes a `Place`, raises where something is wrong, and
returns figures. What it gives to `Place.note` on the way is in its JSON however it ends, and so is checked after it was
noted. `python tools/gpu/PIECE.py --device cuda --out FILE` runs it alone.
"""

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import threading
import time
import tomllib
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

import offbeat_device
from offbeat_device import Device, open_device

Figure = float | int | str | bool | None
Figures = Mapping[str, Figure]
FOLDER: Final = Path(__file__).parent
RESULTS: Final = FOLDER / "results"
"""JSONs of the last runs on accelerators, which docs/gpu.md is written from."""
PEAKS_FILE: Final = FOLDER / "accelerators.toml"
FAILED: Final = 1
SPEED_SHARE: Final = 0.8
"""Share of a recorded speed that the same device must reach again."""
SPEEDS: Final = ("tokens_per_s", "mfu")
"""Names of figures of speed begin so."""
FOR_COMPARISON: Final = "_by_transformers"
"""Names of figures that are not of this code end so."""


class CheckError(Exception):
    """A failed check of a piece."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Machine and device of a piece.

    Args:
        device: opened.
        tiny: the sizes are those of a test on a CPU; figures of speed mean nothing then.
        keep: writes down figures that have come.
    """

    device: Device
    tiny: bool
    keep: Callable[[Figures], None] = lambda _: None

    @property
    def name(self) -> str:
        """Return the name as settings take it, such as "cuda:0"."""
        return str(self.device.torch_device)

    @property
    def is_accelerator(self) -> bool:
        """Return whether it has memory of its own; the CPU is the one device without a number."""
        return self.device.torch_device.index is not None

    def pick(self, tiny: int, full: int) -> int:
        """Return a size."""
        return tiny if self.tiny else full

    def note(self, figures: Figures) -> None:
        """Keep figures, even if the piece fails later."""
        self.keep(figures)

    def used_bytes(self) -> int:
        """Return the memory of the device that all processes use together; on the CPU, of this machine."""
        at = self.device.torch_device
        if at.type == "cuda":
            free, total = torch.cuda.mem_get_info(at)
            return int(total - free)
        lines = Path("/proc/meminfo").read_text().splitlines()
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        return 1024 * (kib["MemTotal"] - kib["MemAvailable"])

    def seconds(self, work: Callable[[], Any], repeats: int = 5) -> float:
        """Return the median of some calls, each until the device is done, after one call that is not counted."""
        work()
        taken = []
        for _ in range(1 if self.tiny else repeats):
            self.device.synchronize()
            start_s = time.perf_counter()
            work()
            self.device.synchronize()
            taken.append(time.perf_counter() - start_s)
        return statistics.median(taken)


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Peak performance of an accelerator, by its maker.

    Args:
        bfloat16_tflops: dense products, 10^12 operations a second.
        memory_gb_per_s: 10^9 bytes a second.
    """

    bfloat16_tflops: float
    memory_gb_per_s: float


def peaks_of(device_name: str) -> Peaks | None:
    """Look up the longest name in `accelerators.toml` that is part of the device's own; None where there is none."""
    known: dict[str, dict[str, Any]] = tomllib.loads(PEAKS_FILE.read_text())
    fitting = sorted((name for name in known if name in device_name), key=len)
    if not fitting:
        return None
    numbers = known[fitting[-1]]
    return Peaks(bfloat16_tflops=numbers["bfloat16_tflops"], memory_gb_per_s=numbers["memory_gb_per_s"])


def share(reached: float, peak: float | None) -> float | None:
    """Return the share of the peak; None where the peak is not known."""
    return None if peak is None else reached / peak


def require(holds: bool, what: str) -> None:
    """Raise unless it holds.

    Raises:
        CheckError: with `what`.
    """
    if not holds:
        raise CheckError(what)


def require_close(what: str, error: float, bound: float) -> float:
    """Return the error, at most the bound; NaN is not.

    Raises:
        CheckError: it is larger.
    """
    require(error <= bound, f"{what}: {error:.3g} off, {bound:.3g} allowed")
    return error


def require_goals(
    figures: Figures, at_least: Mapping[str, float], at_most: Mapping[str, float] = MappingProxyType({})
) -> None:
    """Compare figures with the goals of the project, all of them, so that the error names each that is missed.

    Args:
        figures: noted already. None, where the peak of the device is not known, reaches no goal.
        at_least: goal by the name of the figure.
        at_most: the same, of what should be small.

    Raises:
        CheckError: with what was missed.
    """
    missed = []
    for goals, sign, what in ((at_least, 1, "at least"), (at_most, -1, "at most")):
        for name, goal in goals.items():
            found = figures.get(name)
            if not isinstance(found, int | float) or not sign * found >= sign * goal:
                said = f"{found:.4g}" if isinstance(found, float) else f"{found}"
                missed.append(f"{name} is {said}, the goal is {what} {goal:g}")
    require(not missed, "; ".join(missed))


def reach(
    place: Place, figures: Figures, at_least: Mapping[str, float], at_most: Mapping[str, float] = MappingProxyType({})
) -> Figures:
    """Return the figures of a piece, which must reach its goals unless its shapes are tiny: see `require_goals`."""
    if not place.tiny:
        require_goals(figures, at_least, at_most)
    return figures


def require_recorded_speed(piece: str, device: str, figures: Figures, results: Path = RESULTS) -> None:
    """Compare figures of speed with those of the last run that passed on the same device, where there is one.

    Args:
        piece: that they are of.
        device: name of the accelerator.
        figures: noted already.
        results: folder of the recorded JSONs.

    Raises:
        CheckError: one is less than `SPEED_SHARE` of what is recorded, or is not there any more.
    """
    path = results / f"{piece}.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    if not result or not result["passed"] or result["device"] != device:
        return
    for name, recorded in result["figures"].items():
        if not name.startswith(SPEEDS) or name.endswith(FOR_COMPARISON) or recorded is None:
            continue
        found = figures.get(name)
        reached = isinstance(found, int | float) and found >= SPEED_SHARE * recorded
        require(
            reached,
            f"{name} is {found}, and {recorded:.4g} was recorded on this device: {SPEED_SHARE:g} of it must be reached",
        )


@contextmanager
def sampled_peak(place: Place, every_s: float = 0.1) -> Iterator[list[int]]:
    """Ask for the memory in use while the block lasts, in a thread.

    Yields:
        One number: the most bytes of the device that all processes used together beyond those used at first.
    """
    peak, before, over = [0], place.used_bytes(), threading.Event()

    def ask() -> None:
        while not over.wait(every_s):
            peak[0] = max(peak[0], place.used_bytes() - before)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


def device_name(device: Device) -> str:
    """Return the name of an accelerator as its driver says it; else the kind."""
    at = device.torch_device
    return str(torch.cuda.get_device_name(at)) if at.type == "cuda" else device.kind


def record(piece: str, what: str, device: str) -> dict[str, Any]:
    """Return what every piece's JSON says, whether it came to its end or not."""
    return {
        "piece": piece,
        "what": what,
        "device": device,
        "torch": str(torch.__version__),
        "transformers": version("transformers"),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "tiny": False,
        "seconds": 0.0,
        "passed": False,
        "figures": {},
        "error": "",
    }


def _commit() -> str:
    """Return the commit of the tree whose sources run, else of this folder's; "" where neither is a clone."""
    for folder in (Path(offbeat_device.__file__).parent, FOLDER):
        command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            continue
    return ""


def title_of(doc: str | None) -> str:
    """Return the first line of a docstring, without its full stop."""
    return (doc or "").strip().splitlines()[0].rstrip(".")


def main(run: Callable[[Place], Figures]) -> None:
    """Run a piece as the command line says, write its JSON, and end with 0, or 1 where it failed."""
    script = sys.modules["__main__"]
    parser = argparse.ArgumentParser(description=script.__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu: as it runs in tests, in a tiny form")
    parser.add_argument("--out", type=Path, required=True, help="file for the JSON")
    args = parser.parse_args()
    device = open_device(args.device)
    result = record(Path(str(script.__file__)).stem, title_of(script.__doc__), device_name(device))
    start_s = time.monotonic()

    def keep(figures: Figures) -> None:
        result["figures"] |= figures
        result["seconds"] = round(time.monotonic() - start_s, 1)
        write_json(args.out, result)

    place = Place(device=device, tiny=device.torch_device.index is None, keep=keep)
    result["tiny"] = place.tiny
    if place.tiny:
        torch.set_num_threads(1)  # a fork of a process that has computed with several threads hangs
    try:
        figures = run(place)
        result["passed"] = True
    except Exception as error:  # noqa: BLE001  the boundary of the piece
        traceback.print_exc()
        figures, result["error"] = {}, f"{type(error).__name__}: {error}"
    keep(figures)
    sys.exit(0 if result["passed"] else FAILED)


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write a piece's JSON whole: its process may be killed at any time."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(path)

"""Writes a table of docs/liveness.md: each healthy program with a long pause, and what the monitor said of it when.

python tools/healthy_table.py             print the table
python tools/healthy_table.py --write     put it into docs/liveness.md
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from fault_runs import Observation, Told, run_faults
from healthy_catalogue import HEALTHY, Healthy, complaints
from liveness_table import DOCUMENT, line, with_table
from workspace import ROOT

BEGIN: Final = "<!-- written by tools/healthy_table.py -->"
STALL_AFTER_S: Final = 1.5
PAUSE_S: Final = 6.0
NUM_RANKS_AT_ONCE: Final = 16
MAX_WORDS: Final = 18
HEAD: Final = ("program", "like", "said", "after", "then", "ended")


def table(seen: Mapping[Healthy, Observation]) -> str:
    """The table in Markdown, in the catalogue's order."""
    rows = [_row(healthy, seen[healthy]) for healthy in HEALTHY if healthy in seen]
    return "\n".join(line(cells) for cells in [HEAD, ["---"] * len(HEAD), *rows])


def _row(healthy: Healthy, seen: Observation) -> list[str]:
    link = f"[{healthy.name}](../{healthy.script.relative_to(ROOT)})"
    said = [each for each in seen.told if each.what != "clearing"]
    cleared = [each for each in seen.told if each.what == "clearing"]
    after = f"{seen.verdicts[0][0]:.1f} s" if said and seen.verdicts else ""
    words = "; ".join(map(_shortened, said)) or "nothing"
    ended = "; ".join(complaints(healthy, seen)) or "well"
    return [f"{healthy.title} {link}", healthy.like, words, after, "; ".join(map(_shortened, cleared)), ended]


def _shortened(told: Told) -> str:
    words = told.text.replace(sys.executable, "python").replace(f"{ROOT}/", "").split()
    return " ".join(words[:MAX_WORDS]) + (" …" if len(words) > MAX_WORDS else "")


def observe(programs: Iterable[Healthy], stall_after_s: float, pause_s: float) -> dict[Healthy, Observation]:
    """Run each on as many ranks as it makes sense with."""
    wanted = {
        healthy.run(max(healthy.sizes), stall_after_s=stall_after_s, pause_s=pause_s): healthy for healthy in programs
    }
    return {wanted[run]: seen for run, seen in run_faults(wanted, num_ranks_at_once=NUM_RANKS_AT_ONCE)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, then print or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stall-after-s", type=float, default=STALL_AFTER_S)
    parser.add_argument("--pause-s", type=float, default=PAUSE_S, help="length of the programs' pauses")
    parser.add_argument("--write", type=Path, nargs="?", const=DOCUMENT, help="the document to write it into")
    options = parser.parse_args(arguments)
    new = table(observe(HEALTHY, options.stall_after_s, options.pause_s))
    if options.write:
        options.write.write_text(with_table(options.write.read_text(), new, BEGIN))
    else:
        print(new)


if __name__ == "__main__":
    main()

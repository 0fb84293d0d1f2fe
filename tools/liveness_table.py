"""Writes the table of docs/liveness.md: each fault of the catalogue, with the monitor and in plain torch.

python tools/liveness_table.py             print the table
python tools/liveness_table.py --write     put it into docs/liveness.md
"""

import argparse
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from fault_catalogue import CATALOGUE, Fault
from fault_runs import FaultRun, Observation, is_proof, run_faults
from workspace import ROOT

DOCUMENT: Final = ROOT / "docs" / "liveness.md"
BEGIN: Final = "<!-- written by tools/liveness_table.py -->"
END: Final = "<!-- end -->"
STALL_AFTER_S: Final = 1.5
GLOO_TIMEOUT_S: Final = 20.0
PATIENCE_S: Final = 6.0
MAX_WORDS: Final = 14
# What torch's messages hold beside their message.
NOISE: Final = (
    r"^\[rank\d+\]: ",
    r"\[/__w/\S+\] ?",
    r"\[enforce fail at \S+\] ?",
    r"^\s*what\(\):\s*",
    r" This is typically caused by.*",
    r" \[127\.0\.0\.1\]:\d+",
    r" at 0x[0-9a-f]+",
)


def table(watched: dict[Fault, Observation], plain: dict[Fault, Observation]) -> str:
    """The table in Markdown, in the catalogue's order."""
    head = ["fault", "like", "verdict", "", "after", "plain torch says", "after"]
    rows = [_row(fault, watched[fault], plain[fault]) for fault in CATALOGUE if fault in watched]
    return "\n".join(line(cells) for cells in [head, ["---"] * len(head), *rows])


def line(cells: Sequence[str]) -> str:
    """One row of a table in Markdown."""
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _row(fault: Fault, watched: Observation, plain: Observation) -> list[str]:
    link = f"[{fault.name}](../{fault.script.relative_to(ROOT)})"
    found_s, found = watched.first(proof=fault.certainty == "proof") or (watched.verdict_s, watched.verdict)
    verdict = f"`{found['kind']}`" if found else "none"
    sure = ("proof" if is_proof(found) else "suspicion") if found else ""
    after = f"{found_s:.1f} s" if found_s is not None else ""
    said, said_s = plain_words(plain)
    return [f"{fault.title} {link}", fault.example_of, verdict, sure, after, said, said_s]


def plain_words(plain: Observation) -> tuple[str, str]:
    """What the first rank that fails says, and when."""
    failed = sorted((plain.left_s[rank], rank) for rank, code in plain.exit_codes.items() if code)
    if not failed:
        if all(code == 0 for code in plain.exit_codes.values()):
            return "nothing: it goes on and ends well", ""
        return "nothing", f"> {max(plain.left_s.values()):.0f} s"
    after_s, rank = failed[0]
    lines = [each for each in plain.outputs[rank].splitlines() if each.strip()]
    if not lines:
        return "nothing; the launcher sees the exit status", f"{after_s:.1f} s"
    telling = next((each for each in lines if "what():" in each), lines[-1])
    for noise in NOISE:
        telling = re.sub(noise, "", telling)
    words = telling.split()
    shown = " ".join(words[:MAX_WORDS]) + (" …" if len(words) > MAX_WORDS else "")
    return f"rank {rank}: {shown}", f"{after_s:.1f} s"


def observe(
    size: int, faults: Iterable[Fault] = CATALOGUE
) -> tuple[dict[Fault, Observation], dict[Fault, Observation]]:
    """Run each fault watched, then plain."""
    chosen = {fault.script: fault for fault in faults if size in fault.sizes}
    watched = [
        FaultRun(script=script, size=size, stall_after_s=STALL_AFTER_S, limit_s=_limit_s(fault))
        for script, fault in chosen.items()
    ]
    limit_s = GLOO_TIMEOUT_S + PATIENCE_S
    plain = [FaultRun(script=script, size=size, gloo_timeout_s=GLOO_TIMEOUT_S, limit_s=limit_s) for script in chosen]
    return (
        {chosen[run.script]: seen for run, seen in run_faults(watched, num_ranks_at_once=size)},
        {chosen[run.script]: seen for run, seen in run_faults(plain, num_ranks_at_once=8 * size)},
    )


def _limit_s(fault: Fault) -> float:
    """What is only suspected is not ended by the monitor; nothing more is said of it after a while."""
    return GLOO_TIMEOUT_S if fault.certainty == "proof" else STALL_AFTER_S + PATIENCE_S


def with_table(text: str, new: str, begin: str = BEGIN) -> str:
    """The document with the table between its marks replaced.

    Raises:
        ValueError: the document lacks the marks.
    """
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(END)
    if not (found and ended):
        raise ValueError(f"the document must hold {begin} and, after it, {END}: add them where the table is to go")
    return f"{before}{begin}\n{new}\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, then print or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4, help="number of ranks")
    parser.add_argument("--write", type=Path, nargs="?", const=DOCUMENT, help="the document to write it into")
    options = parser.parse_args(arguments)
    new = table(*observe(options.size))
    if options.write:
        options.write.write_text(with_table(options.write.read_text(), new))
    else:
        print(new)


if __name__ == "__main__":
    main()

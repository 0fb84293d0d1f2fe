"""Writes the tables of docs/liveness-programs.md, from runs of the programs under tests/e2e.

python tools/liveness_table.py             print the table of faults: with the monitor, and in plain torch
python tools/liveness_table.py healthy     print that of healthy programs with a long pause: what was reported when
python tools/liveness_table.py --write     put it into docs/liveness-programs.md
"""

import argparse
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from fault_runs import FaultRun, Message, Observation, is_proof, run_faults
from liveness_programs import CATALOGUE, HEALTHY, Fault, Healthy, Program, complaints
from workspace import ROOT

DOCUMENT: Final = ROOT / "docs" / "liveness-programs.md"
BEGIN: Final = "<!-- written by tools/liveness_table.py -->"
BEGIN_HEALTHY: Final = "<!-- written by tools/liveness_table.py healthy -->"
END: Final = "<!-- end -->"
HEAD: Final = ("fault", "like", "verdict", "", "after", "plain torch says", "after")
HEAD_HEALTHY: Final = ("program", "like", "said", "after", "then", "ended")
STALL_AFTER_S: Final = 1.5
GLOO_TIMEOUT_S: Final = 20.0
PATIENCE_S: Final = 6.0
PAUSE_S: Final = 6.0
MAX_WORDS: Final = 14
MAX_MESSAGE_WORDS: Final = 18
# The parts of torch's messages that are not the message itself.
NOISE: Final = (
    r"^\[rank\d+\]: ",
    r"\[/__w/\S+\] ?",
    r"\[enforce fail at \S+\] ?",
    r"^\s*what\(\):\s*",
    r" This is typically caused by.*",
    r" \[127\.0\.0\.1\]:\d+",
    r" at 0x[0-9a-f]+",
)


def fault_table(watched: Mapping[Fault, Observation], plain: Mapping[Fault, Observation]) -> str:
    """Return the rows in the catalogue's order."""
    rows = []
    for fault in (each for each in CATALOGUE if each in watched):
        seen = watched[fault]
        found_s, found = seen.first(proof=fault.certainty == "proof") or (seen.verdict_s, seen.verdict)
        verdict = f"`{found['kind']}`" if found else "none"
        sure = ("proof" if is_proof(found) else "suspicion") if found else ""
        after = f"{found_s:.1f} s" if found_s is not None else ""
        rows.append([_link(fault), fault.example_of, verdict, sure, after, *plain_words(plain[fault])])
    return _markdown(HEAD, rows)


def healthy_table(seen: Mapping[Healthy, Observation]) -> str:
    """Return the rows in the catalogue's order."""
    rows = []
    for healthy, run in ((each, seen[each]) for each in HEALTHY if each in seen):
        said = [each for each in run.messages if each.what != "clearing"]
        cleared = [each for each in run.messages if each.what == "clearing"]
        after = f"{run.verdicts[0][0]:.1f} s" if said and run.verdicts else ""
        words = "; ".join(map(_message_words, said)) or "nothing"
        ended = "; ".join(complaints(healthy, run)) or "well"
        rows.append([_link(healthy), healthy.like, words, after, "; ".join(map(_message_words, cleared)), ended])
    return _markdown(HEAD_HEALTHY, rows)


def _link(program: Program) -> str:
    return f"{program.title} [{program.name}](../{program.script.relative_to(ROOT)})"


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |" for cells in lines)


def _shortened(words: Sequence[str], most: int) -> str:
    return " ".join(words[:most]) + (" …" if len(words) > most else "")


def _message_words(message: Message) -> str:
    return _shortened(message.text.replace(sys.executable, "python").replace(f"{ROOT}/", "").split(), MAX_MESSAGE_WORDS)


def plain_words(plain: Observation) -> tuple[str, str]:
    """Return the message of the first rank that fails, and when it failed."""
    failed = sorted((plain.left_s[rank], rank) for rank, code in plain.exit_codes.items() if code)
    if not failed:
        if all(code == 0 for code in plain.exit_codes.values()):
            return "nothing: it continues and ends well", ""
        return "nothing", f"> {max(plain.left_s.values()):.0f} s"
    after_s, rank = failed[0]
    lines = [each for each in plain.outputs[rank].splitlines() if each.strip()]
    if not lines:
        return "nothing; the launcher sees the exit status", f"{after_s:.1f} s"
    message = next((each for each in lines if "what():" in each), lines[-1])
    for noise in NOISE:
        message = re.sub(noise, "", message)
    return f"rank {rank}: {_shortened(message.split(), MAX_WORDS)}", f"{after_s:.1f} s"


def observe_faults(size: int) -> tuple[dict[Fault, Observation], dict[Fault, Observation]]:
    """Run each fault watched, then plain."""
    chosen = {fault.script: fault for fault in CATALOGUE if size in fault.sizes}
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


def observe_healthy(size: int) -> dict[Healthy, Observation]:
    """Run each healthy program on that many ranks, or on as many as make sense for it."""
    runs = {
        each.run(min(size, max(each.sizes)), stall_after_s=STALL_AFTER_S, pause_s=PAUSE_S): each for each in HEALTHY
    }
    return {runs[run]: seen for run, seen in run_faults(runs, num_ranks_at_once=4 * size)}


def _limit_s(fault: Fault) -> float:
    """Return what is only suspected is not ended by the monitor; nothing more is said of it after a while."""
    return GLOO_TIMEOUT_S if fault.certainty == "proof" else STALL_AFTER_S + PATIENCE_S


def with_table(text: str, new: str, begin: str = BEGIN) -> str:
    """Return the document with the table between its marks replaced.

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
    parser.add_argument("table", nargs="?", choices=("faults", "healthy"), default="faults")
    parser.add_argument("--size", type=int, default=4, help="number of ranks")
    parser.add_argument("--write", type=Path, nargs="?", const=DOCUMENT, help="the document to write it into")
    options = parser.parse_args(arguments)
    if options.table == "healthy":
        new, begin = healthy_table(observe_healthy(options.size)), BEGIN_HEALTHY
    else:
        new, begin = fault_table(*observe_faults(options.size)), BEGIN
    if options.write:
        options.write.write_text(with_table(options.write.read_text(), new, begin))
    else:
        print(new)


if __name__ == "__main__":
    main()

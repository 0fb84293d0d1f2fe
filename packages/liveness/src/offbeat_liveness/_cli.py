"""The command `offbeat-liveness`, also `python -m offbeat_liveness`."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from offbeat_liveness import _dumps, _run
from offbeat_liveness._diagnosis.diagnosis import find_verdict
from offbeat_liveness._diagnosis.graph import Scene
from offbeat_liveness._diagnosis.verdict import Verdict
from offbeat_liveness._errors import LivenessError
from offbeat_liveness._process.head import Head, to_data

USAGE_ERROR: Final = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0, or 2 for something the caller can put right.
    """
    options = _parser().parse_args(arguments)
    try:
        if options.command == "show":
            print(_show(Path(options.directory), as_json=options.json))
        else:
            _run.start_watch(options)
    except LivenessError as error:
        print(f"offbeat-liveness: {error}", file=sys.stderr)
        return USAGE_ERROR
    if options.command == "run":
        _run.run_script(options)  # an error of the script ends it as it does without us
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="offbeat-liveness", description="Says who waits for whom in a stuck run.")
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="read the dumps of a run, dead or alive")
    show.add_argument("directory", metavar="DIR")
    show.add_argument("--json", action="store_true", help="verdicts and heads as one JSON object")
    _run.add_arguments(commands.add_parser("run", help="run a script under watch, with the processes it starts"))
    return parser


def _show(directory: Path, *, as_json: bool) -> str:
    heads, verdicts = _dumps.read_heads(directory), _dumps.read_verdicts(directory)
    if not heads and not verdicts:
        raise LivenessError(f"{directory} must hold dumps of offbeat liveness: found none; set OFFBEAT_LIVENESS_DIR")
    if not verdicts:
        verdicts = _verdict_of(heads)
    if as_json:
        return json.dumps(
            {"verdicts": [each.to_data() for each in verdicts], "heads": [to_data(each) for each in heads]}
        )
    told = [each.text for each in verdicts] or ["no verdict: nothing was found stuck"]
    return "\n".join([*told, "", "last heads:", *(_line(head) for head in heads)])


def _verdict_of(heads: Sequence[Head]) -> list[Verdict]:
    """The run died before anybody could lead: what the dumps alone tell."""
    oldest_s = max((wait.age_s for head in heads for wait in head.waits), default=0.0)
    if oldest_s <= 0:
        return []
    verdict = find_verdict(Scene(heads=heads, stall_after_s=oldest_s, time_s=max(head.time_s for head in heads)))
    return [verdict] if verdict else []


def _line(head: Head) -> str:
    when = time.strftime("%H:%M:%S", time.localtime(head.time_s))
    wait = next(iter(head.waits), None)
    doing = f"in {wait.what} for {wait.age_s:.0f} s" if wait else head.error or "in no wait"
    stack = (wait.stack if wait else ()) or head.error_stack or (head.threads[0].stack if head.threads else ())
    where = f" at {stack[0]}" if stack else ""
    return f"  {when} {head.name} (pid {head.pid} on {head.host}): {head.state}, {doing}{where}"

"""The command `offbeat-liveness`, also `python -m offbeat_liveness`: runs a script under watch, or shows dumps."""

import argparse
import importlib.util
import json
import os
import runpy
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, get_args

from offbeat_liveness import _dumps
from offbeat_liveness._diagnosis import find_verdict
from offbeat_liveness._diagnosis.graph import WaitGraph, unanswered_s
from offbeat_liveness._diagnosis.verdict import Verdict
from offbeat_liveness._network.job_store import WORKER
from offbeat_liveness._printable import printable
from offbeat_liveness._process.proc import HOST, pid_state
from offbeat_liveness._process.snapshot import ProcessSnapshot, to_data
from offbeat_liveness._settings import DIRECTORY, POLICY, STALL_AFTER, LivenessError, Policy, read_settings
from offbeat_liveness._watch import watch, watch_when_needed

USAGE_ERROR: Final = 2
CLOSED_PIPE: Final = 141
SITE_FOLDER: Final = str(Path(__file__).parent / "_site")
DEFAULT_POLICY: Final = "abort"
NO_TORCH: Final = (
    "offbeat liveness: torch is not installed in this interpreter ({}): only declared waits are watched, and what "
    "stands beside them (queues, futures, locks, requests); no collectives"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0, or 2 for something the caller can put right.
    """
    options = _parser().parse_args(arguments)
    try:
        if options.command == "show":
            print(printable(_show(Path(options.directory), as_json=options.json)), flush=True)
        else:
            start_watch(options)
    except LivenessError as error:
        print(printable(f"offbeat-liveness: {error}"), file=sys.stderr)
        return USAGE_ERROR
    except BrokenPipeError:  # the reader has seen enough, such as `head`; Python would complain once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    if options.command == "run":
        run_script(options)  # an error of the script ends it as it does without us
    return 0


def _version() -> str:
    try:
        return f"offbeat-liveness {version('offbeat-liveness')}"
    except PackageNotFoundError:  # its folder is on the path, and it is not installed
        return "offbeat-liveness, not installed"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="offbeat-liveness", description="Report what a stuck run waits for.")
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="read the dumps of a run, dead or alive")
    show.add_argument("directory", metavar="DIR")
    show.add_argument("--json", action="store_true", help="verdicts and heads as one JSON object")
    add_arguments(commands.add_parser("run", help="run a script under watch, with the processes it starts"))
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
    texts = [each.text for each in verdicts] or ["no verdict: nothing was found stuck"]
    return "\n".join([*texts, "", "last heads:", *(_line(head) for head in heads)])


def _verdict_of(heads: Sequence[ProcessSnapshot]) -> list[Verdict]:
    oldest_s = max((unanswered_s(head, wait) for head in heads for wait in head.waits), default=0.0)
    if oldest_s <= 0:
        return []
    verdict = find_verdict(WaitGraph(heads=heads, stall_after_s=oldest_s, time_s=max(head.time_s for head in heads)))
    return [verdict] if verdict else []


def _line(head: ProcessSnapshot) -> str:
    when = time.strftime("%H:%M:%S", time.localtime(head.time_s))
    wait = next(iter(head.waits), None)
    doing = f"in {wait.what} for {wait.age_s:.0f} s" if wait else head.error or "in no wait"
    stack = (wait.stack if wait else ()) or head.error_stack or (head.threads[0].stack if head.threads else ())
    where = f" at {stack[0]}" if stack else ""
    return f"  {when} {head.name} (pid {head.pid} on {head.host}): {_state(head)}, {doing}{where}"


def _state(head: ProcessSnapshot) -> str:
    """Return what a process said of itself and what has become of it: the dump of one that was killed says it runs."""
    if head.state != "running":
        return head.state
    if head.host != HOST:
        return "running then"
    return "running then, gone now" if pid_state(head.pid, head.born) == "gone" else "running"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `run`; everything after the script belongs to the script."""
    parser.add_argument("--stall-after-s", type=float, help=f"default: {STALL_AFTER}, else 60")
    parser.add_argument("--policy", choices=get_args(Policy), help=f"default: {POLICY}, else {DEFAULT_POLICY}")
    parser.add_argument("--directory", help=f"where dumps go; default: {DIRECTORY}, else none are written")
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module's name")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER)


def start_watch(options: argparse.Namespace) -> None:
    """Watch this process and those it starts; without a rank in the environment, from when it enters a world.

    torch is not imported before the script does so itself, so whatever it sets in its environment first still counts.

    Raises:
        LivenessError: a setting is out of range, or the script does not exist.
    """
    if not options.is_module and not Path(options.script).exists():
        raise LivenessError(f"the script to run must exist: got {options.script!r}; check the path")
    policy = options.policy or os.environ.get(POLICY) or DEFAULT_POLICY
    settings = read_settings(options.stall_after_s, policy, options.directory)
    os.environ[STALL_AFTER] = str(settings.stall_after_s)
    os.environ[POLICY] = settings.policy
    if settings.directory is not None:
        os.environ[DIRECTORY] = str(settings.directory)
    os.environ[WORKER] = str(os.getpid())
    _reach_children()
    if importlib.util.find_spec("torch") is None:
        print(NO_TORCH.format(sys.executable), file=sys.stderr, flush=True)
    if os.environ.get("RANK", "").isdecimal():  # a rank, which others may wait for before it has imported anything
        watch(settings.stall_after_s, settings.policy, settings.directory)
    else:
        watch_when_needed(settings)


def _reach_children() -> None:
    """Python processes that are started from here find our sitecustomize first; it runs theirs as well."""
    known = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    if SITE_FOLDER not in known:
        os.environ["PYTHONPATH"] = os.pathsep.join([SITE_FOLDER, *known])


def run_script(options: argparse.Namespace) -> None:
    sys.argv[:] = [options.script, *options.arguments]
    if options.is_module:
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(options.script).absolute().parent)
        runpy.run_path(options.script, run_name="__main__")

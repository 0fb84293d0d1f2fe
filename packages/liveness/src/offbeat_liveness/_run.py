"""Runs a script under watch without touching it, and reaches the processes that it starts."""

import argparse
import importlib.util
import os
import runpy
import sys
from pathlib import Path
from typing import Final

from offbeat_liveness._errors import LivenessError
from offbeat_liveness._network.job_store import WORKER
from offbeat_liveness._settings import DIRECTORY, POLICY, STALL_AFTER, read_settings
from offbeat_liveness._watch import watch, watch_when_needed

SITE_FOLDER: Final = str(Path(__file__).parent / "_site")
DEFAULT_POLICY: Final = "abort"
NO_TORCH: Final = (
    "offbeat liveness: torch is not installed in this interpreter ({}): only declared waits are watched, and what "
    "stands beside them (queues, futures, locks, requests); no collectives"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `run`; everything after the script belongs to the script."""
    parser.add_argument("--stall-after-s", type=float, help=f"default: {STALL_AFTER}, else 60")
    parser.add_argument(
        "--policy", choices=("report", "abort", "strict"), help=f"default: {POLICY}, else {DEFAULT_POLICY}"
    )
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
    """Run the script in this process as __main__."""
    sys.argv[:] = [options.script, *options.arguments]
    if options.is_module:
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(options.script).absolute().parent)
        runpy.run_path(options.script, run_name="__main__")

"""The liveness of a run: the driver is watched, and every role that it starts with it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import offbeat_liveness as liveness
from offbeat_run import LivenessConfig


@contextlib.contextmanager
def watched_driver(config: LivenessConfig, log_folder: Path) -> Iterator[None]:
    """Watch this process, and the roles that it starts under their names, while the block lasts.

    Whoever stands still is named in `liveness.log`, and in the log of whichever role finds it out. Nothing is ended for
    that: the ranks of a trainer end themselves, and for the others there is a supervisor.

    Args:
        config: section `liveness`.
        log_folder: of the run.
    """

    def write_down(verdict: liveness.Verdict) -> None:
        log_folder.mkdir(parents=True, exist_ok=True)
        with (log_folder / "liveness.log").open("a") as file:
            file.write(verdict.text + "\n")

    if liveness.current_monitor() is not None:  # as whoever has started the driver wants it
        yield
        return
    monitor = liveness.watch(config.stall_after_s, policy="report", name="driver", on_verdict=write_down)
    try:
        yield
    finally:
        monitor.close()

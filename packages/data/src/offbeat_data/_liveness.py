"""Liveness of the process that scores: it is watched where the process that asks it is."""

import os
from contextlib import AbstractContextManager

import offbeat_liveness as liveness

SCORER = "scorer"


def scorer_environment() -> dict[str, str]:
    """Environment of a child that scores: with an invitation where this process is watched."""
    monitor = liveness.current_monitor()
    if monitor is None:
        return dict(os.environ)
    return {**os.environ, **monitor.invite(policy="report")}


def declare_scoring(deadline_s: float) -> AbstractContextManager[None]:
    """The wait for an answer of the child."""
    return liveness.waiting("reward.score", on=SCORER, deadline_s=deadline_s)


def watch_scorer() -> None:
    """In the child: watch it, if it was invited."""
    liveness.watch_if_invited(SCORER)

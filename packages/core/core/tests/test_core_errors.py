"""Errors say which process, how long and what to do, keep their exit code, and survive the way between processes."""

import inspect
import pickle

import pytest

import offbeat_core
from offbeat_core import (
    ConfigError,
    DeadlineError,
    OffbeatError,
    PeerFailedError,
    ShapeError,
    UserError,
    WeightSyncError,
)

ERRORS = [item for _, item in inspect.getmembers(offbeat_core, inspect.isclass) if issubclass(item, OffbeatError)]
DEADLINE = DeadlineError("trainer.train", "rollout-0", 1.5, "look at its log")
PEER = PeerFailedError("rollout-0", "killed by signal 9", "step 7\nstep 8")


def test_a_deadline_names_the_wait_and_who_did_not_come():
    assert str(DeadlineError("q.get", "trainer", 30)) == "q.get: waited 30 s for trainer, which did not come"
    assert str(DEADLINE).endswith("waited 1.5 s for rollout-0, which did not come; look at its log")


def test_a_failed_peer_is_named_with_its_last_lines():
    assert str(PeerFailedError("scorer-0", "out of memory")) == "scorer-0 failed: out of memory"
    assert str(PEER).splitlines() == [
        "rollout-0 failed: killed by signal 9",
        "last lines of rollout-0:",
        "step 7",
        "step 8",
    ]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_exit_codes_distinguish_the_user_s_mistakes_from_failed_and_stuck_runs(kind):
    expected = 2 if issubclass(kind, UserError) else 4 if issubclass(kind, DeadlineError) else 3
    assert kind.exit_code == expected


def test_one_except_catches_them_all():
    assert {ConfigError, ShapeError, WeightSyncError, DeadlineError, PeerFailedError} <= set(ERRORS)
    assert not issubclass(ShapeError, UserError)


@pytest.mark.parametrize("error", [DEADLINE, PEER, ConfigError("x")], ids=lambda error: type(error).__name__)
def test_an_error_is_the_same_after_a_round_trip(error):
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)

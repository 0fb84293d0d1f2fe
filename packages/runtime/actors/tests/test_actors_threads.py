"""CPUs are counted as the container allows, and shared out whole."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat_actors import available_cpus, check_processes, split_threads
from offbeat_core import ConfigError

WEIGHTS = st.dictionaries(st.text(max_size=3), st.floats(0.01, 100), min_size=1, max_size=6)


@given(st.integers(0, 64), WEIGHTS)
def test_threads_are_shared_out_whole_with_at_least_one_each(num_threads: int, weights: dict[str, float]) -> None:
    shares = split_threads(num_threads, weights)
    assert list(shares) == list(weights)
    assert min(shares.values()) >= 1
    assert sum(shares.values()) == max(num_threads, len(weights))


@given(st.integers(0, 64), WEIGHTS)
def test_a_heavier_role_never_gets_fewer_threads(num_threads: int, weights: dict[str, float]) -> None:
    shares = split_threads(num_threads, weights)
    for light in weights:
        for heavy in weights:
            assert weights[light] >= weights[heavy] or shares[light] <= shares[heavy]


def test_shares_follow_the_weights() -> None:
    assert split_threads(16, {"trainer-0": 2, "rollout-0": 1, "rollout-1": 1}) == {
        "trainer-0": 8,
        "rollout-0": 4,
        "rollout-1": 4,
    }
    assert split_threads(4, {}) == {}


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_a_weight_that_is_no_weight_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="every weight must be above 0"):
        split_threads(4, {"a": weight})


def test_available_cpus_are_at_least_one_and_at_most_what_is_there() -> None:
    assert 1 <= available_cpus() <= (os.cpu_count() or 1)


@pytest.mark.parametrize(("num_cpus", "gib", "room"), [(2, 1024, 64), (64, 2, 10)], ids=["by CPUs", "by memory"])
def test_more_processes_than_cpus_or_memory_have_room_for_are_refused(
    monkeypatch: pytest.MonkeyPatch, num_cpus: int, gib: int, room: int
) -> None:
    monkeypatch.setattr("offbeat_actors._processes.machine.available_cpus", lambda: num_cpus)
    monkeypatch.setattr("offbeat_actors._processes.machine.memory_bytes", lambda: gib * 2**30)
    check_processes({"engine.num_ranks": 2, "rollout.num_engines": room - 2})
    with pytest.raises(ConfigError, match=rf"have room for {room}; lower rollout\.num_engines$"):
        check_processes({"engine.num_ranks": 2, "rollout.num_engines": room - 1})

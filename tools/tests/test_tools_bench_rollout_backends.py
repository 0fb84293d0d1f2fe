"""The comparison of rollout engines: what it reads, and when it calls two curves alike."""

from dataclasses import replace
from typing import Any

import pytest
from bench.rollout_backends import Curve, difference, read_curve


def update(reward: float) -> dict[str, Any]:
    return {"time_s": 20.0, "perf/update_s": 2.0, "perf/samples_per_s": 32.0, "train/reward": reward}


def curve(*rewards: float) -> Curve:
    held_out = [{"time_s": 15.0, "eval/reward": 0.25}, {"time_s": 90.0, "eval/reward": 0.75}]
    return read_curve([held_out[0], *(update(reward) for reward in rewards), held_out[1]], "torch", 5.0)


def test_a_curve_is_read_from_the_metrics() -> None:
    assert curve(0.5, 0.25, 0.75) == Curve(
        backend="torch",
        rewards=(0.5, 0.25, 0.75),
        before=0.25,
        after=0.75,
        start_s=10.0,
        update_s=2.0,
        samples_per_s=32.0,
    )
    with pytest.raises(SystemExit, match="1 updates"):
        curve(0.5)


def test_a_rise_is_no_scatter() -> None:
    assert curve(0.1, 0.2, 0.3, 0.4).standard_error == pytest.approx(0, abs=1e-12)


def test_curves_are_compared_by_their_scatter() -> None:
    one = curve(0.5, 0.6, 0.5, 0.6)
    # About the line 0.52, 0.54, 0.56, 0.58: off by 0.02, 0.06, 0.06, 0.02; 2 degrees of freedom, 4 updates.
    assert one.standard_error == pytest.approx((2 * (0.02**2 + 0.06**2) / 2) ** 0.5 / 2)
    assert difference(one, one) == 0
    shifted = replace(one, rewards=tuple(reward + 0.2 for reward in one.rewards))
    assert difference(one, shifted) == pytest.approx(0.2 / (2**0.5 * one.standard_error))

"""The clock of a run, against times set by hand."""

import pytest

from offbeat_async_policy import BusyClock, BusyShares


def test_busy_shares_add_up() -> None:
    now = [0.0]
    spans: list[tuple[str, float, float]] = []
    clock = BusyClock("trainer-0", lambda: 1, lambda: now[0], lambda *span: spans.append(span))
    with clock.busy("rollout-0"):
        now[0] = 4.0
        with clock.busy("rollout-0"), clock.busy("trainer-0"):
            now[0] = 6.0
            with clock.held(["rollout-0"]):
                now[0] = 7.0
            now[0] = 8.0
    now[0] = 10.0
    shares = clock.lap()
    assert (shares.wall_s, shares.trainer_idle, shares.rollout_idle) == pytest.approx((10.0, 0.6, 0.3))
    assert shares.overlap == pytest.approx(0.3)
    assert spans == [("rollout-0", 0.0, 6.0), ("trainer-0", 4.0, 8.0), ("rollout-0", 7.0, 8.0)]
    now[0] = 12.0
    assert clock.lap() == BusyShares(wall_s=2.0, trainer_idle=1.0, rollout_idle=1.0, overlap=0.0), "of this lap alone"

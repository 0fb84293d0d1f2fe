"""The quickstart's bench: figures from a run's metrics, the promises, and a run that fails."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from bench import quickstart

SCRIPT = Path(quickstart.__file__)


def update(step: int, seconds: float, **values: float) -> quickstart.Rows:
    """The row of one update."""
    shares = {"async/overlap_share": 0.5, "async/trainer_idle_share": 0.2, "async/rollout_idle_share": 0.3}
    lags = {"train/lag_mean": 1.0, "train/lag_max": 1.0}
    speeds = {"perf/update_s": seconds, "perf/tokens_per_s": 10.0, "perf/samples_per_s": 1.0}
    return [{"step": step, **shares, **lags, **speeds, **values}]


def validation(step: int, accuracy: float) -> quickstart.Rows:
    """The row of one validation."""
    return [{"step": step, "eval/accuracy": accuracy}]


ROWS = [
    *validation(0, 0.3),
    *update(1, 1.0, **{"perf/tokens_per_s": 100.0, "async/overlap_share": 0.0, "train/lag_max": 2.0}),
    *update(2, 3.0, **{"perf/tokens_per_s": 20.0, "async/overlap_share": 0.8}),
    *validation(1, 0.6),
    *validation(2, 0.95),
]


def test_an_update_of_three_seconds_counts_three_times_one_of_one() -> None:
    figures = quickstart.summarise(ROWS, 0, 60.0)
    assert figures.training_s == pytest.approx(4.0)
    assert figures.tokens_per_s == pytest.approx((100 * 1 + 20 * 3) / 4)
    assert figures.overlap == pytest.approx(0.6)
    assert figures.lag_max == 2
    assert (figures.before, figures.after) == (0.3, 0.95)


def test_every_promise_must_hold_for_every_seed() -> None:
    kept = quickstart.summarise(ROWS, 0, 300.0)
    assert quickstart.verdict([kept, kept])[0]
    for broken in ({"before": 0.51}, {"after": 0.89}, {"after": float("nan")}, {"total_s": 301.0}):
        holds, line = quickstart.verdict([kept, replace(kept, seed=7, **broken)])
        assert not holds
        assert "seed 7" in line
        assert "seed 0" not in line


def test_a_run_without_a_second_validation_is_no_whole_run() -> None:
    with pytest.raises(SystemExit, match="2 updates and 1 validations"):
        quickstart.summarise(ROWS[:3], 0, 60.0)


def test_rows_are_read_as_the_run_folder_holds_them(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert quickstart.read_rows(path) == ROWS


def test_a_run_that_fails_is_shown_with_its_reason() -> None:
    command = [sys.executable, str(SCRIPT), "--seeds", "-1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 1
    assert "ended with 2" in done.stderr
    assert "--seed" in done.stderr.split("ended with 2")[1]

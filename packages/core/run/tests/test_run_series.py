"""A report of a long run takes the memory of a short one, and damaged lines never end it."""

import json
import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat_run import RunFolder
from offbeat_run._log.run_log import GenerationsLog
from offbeat_run._log.timeline import Timeline
from offbeat_run._metrics.metrics import MetricsLog
from offbeat_run._metrics.series import MAX_POINTS, LagColumns, Series
from offbeat_run._report.page import write_report

PEAK = """
import resource, sys
from offbeat_run._report.page import write_report
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
write_report(sys.argv[1])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
NUM_UPDATES = 12_000


def series_of(values):
    series = Series()
    for step, value in enumerate(values):
        series.add(step, float(value))
    return series


@settings(max_examples=25, deadline=None)
@given(count=st.integers(1, 20_000), seed=st.integers(0, 9))
def test_a_thinned_series_keeps_the_last_value_its_mean_and_its_ends(count, seed):
    values = np.random.default_rng(seed).normal(size=count)
    series = series_of(values)
    points, means = series.points(), series.means()
    assert len(points) <= MAX_POINTS
    assert points[-1] == (count - 1, values[-1])
    assert (series.count, series.first, series.last) == (count, (0, values[0]), (count - 1, values[-1]))
    assert (series.low, series.high) == (values.min(), values.max())
    (whole, again) = series.ends(count)
    assert whole.count == again.count == count
    assert whole.value == pytest.approx(values.mean())
    assert len(means) == len(points)


def test_the_mean_of_an_end_has_the_error_of_its_own_values():
    values = np.random.default_rng(0).normal(size=1000)
    before, after = series_of(values).ends(100)
    for mean, part in ((before, values[:100]), (after, values[-100:])):
        assert (mean.value, mean.count) == (pytest.approx(part.mean()), 100)
        assert mean.error == pytest.approx(1.96 * part.std(ddof=1) / 10)


def test_values_of_earlier_steps_are_sorted_in():
    series = Series()
    for step in (1, 2, 4, 3):
        series.add(step, step / 10)
    assert [step for step, _ in series.points()] == [1, 2, 3, 4]
    assert series.last == (4, 0.4)


def test_lag_columns_of_a_long_run_add_up():
    lags = LagColumns()
    for step in range(5000):
        lags.add(step, [1.0, 2.0] if step % 2 else [0.0, 0.0, 4.0])
    assert len(lags.columns) <= 300
    assert np.sum([[*counts, 0.0][:3] for _, counts in lags.columns], axis=0).tolist() == [2500.0, 5000.0, 10000.0]


@pytest.fixture
def long_run(tmp_path):
    """A run of many updates, with metrics, long completions, and a timeline."""
    draw = random.Random(0)
    with RunFolder.create(tmp_path / "run") as run:
        run.write_text(run.config, "")
        with run.metrics.open("w") as file:
            for step in range(1, NUM_UPDATES + 1):
                values = {f"train/metric_{n}": draw.random() for n in range(60)}
                line = {"step": step, "time_s": step, "train/reward": draw.random(), **values}
                file.write(json.dumps({**line, "async/lag_histogram": [1, 2, 3]}) + "\n")
        with (run.generations / "train.jsonl").open("w") as file:
            line = {"step": 1, "kind": "train", "version": 0, "prompt": "p", "completion": "x" * 16_000, "reward": 1.0}
            for step in range(NUM_UPDATES):
                file.write(json.dumps({**line, "step": step}) + "\n")
        with Timeline(run.timeline) as timeline:
            for step in range(NUM_UPDATES):
                timeline.span("trainer-0", "train", step, step + 0.5)
                timeline.span("rollout-0", "generate", step, step + 0.9)
    return run


def test_the_report_of_a_long_run_takes_little_memory(long_run):
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(long_run.path)], capture_output=True, text=True, timeout=300, check=True
    )
    assert int(done.stdout) < 100  # MiB; all lines at once would be 400
    assert long_run.report.stat().st_size < 5_000_000


DAMAGE = {
    "nothing": b"",
    "zeros": b"\0" * 200 + b"\n",
    "half a line": b'{"step": 3, "time_s": 4, "tr',
    "other JSON": b'[1, 2]\n7\nnull\n"text"\n',
    "brackets without end": b"[" * 100_000 + b"\n",
    "no UTF-8": b'{"step": 3, "time_s": 4, "a\xff": 1}\n',
    "wrong types": b'{"step": "x", "time_s": [], "train/reward": {}, "kind": 3, "ph": "X", "tid": {}, "samples": 1}\n',
    "huge numbers": b'{"step": 1' + b"0" * 400 + b', "time_s": 1e308, "train/reward": 1e308}\n',
    "no calendar has it": b'{"step": 3, "time_s": 1e300, "train/reward": 1}\n{"step": -9, "time_s": "nan"}\n',
    "large values": b'{"step": 3, "time_s": 4, "a": 1e308}\n{"step": 4, "time_s": 5, "a": -1e308}\n',
    "spans": b'{"ph": "M", "name": "thread_name", "tid": [1]}\n{"ph": "X", "tid": 1, "ts": "a", "dur": -1}\n',
}
FILES = ("metrics.jsonl", "alarms.jsonl", "sessions.jsonl", "timeline.json", "generations/train.jsonl",
         "generations/validation.jsonl", "validation/held-out.jsonl", "config.toml", "plan.txt")  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_no_damage_to_a_file_of_a_run_ends_its_report(tmp_path, name):
    with RunFolder.create(tmp_path / "run") as run:
        run.write_text(run.config, '[model]\npath = "m"\n')
        run.keep()
        with MetricsLog(run, tensorboard=False) as log, GenerationsLog(run), Timeline(run.timeline) as timeline:
            log.write(1, {"train/reward": 0.1})
            log.write(2, {"train/reward": 0.2})
            timeline.span("trainer-0", "train", 1.0, 2.0)
        path = run.path / name
        path.parent.mkdir(exist_ok=True)
        whole = path.read_bytes() if path.is_file() else b""
        for damage in DAMAGE.values():
            for content in (damage, whole + damage, damage + whole):
                path.write_bytes(content)
                page = write_report(run).read_text()
                assert "<h1>" in page
                assert "NaN" not in page.partition('id="figures">')[2].partition("</script>")[0]
        path.write_bytes(b"nonsense\n" * 5000 + whole)
        assert "<h1>" in write_report(run).read_text()


def test_a_file_with_more_damage_than_a_user_reads_is_counted_up_to_a_bound(tmp_path):
    with RunFolder.create(tmp_path / "run") as run:
        run.write_text(run.config, "")
        run.keep()
        run.metrics.write_bytes(b"nonsense\n" * 5000 + b'{"step":1,"time_s":1,"train/reward":1}\n')
        assert "Left out: 1000 damaged lines or more of the run's files" in write_report(run).read_text()

"""Every bench runs in small and gives the rows that it promises, as JSON or as a table."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench import harness, lags, placement, quickstart
from bench.liveness_scale import measure

from offbeat_run import MetricsLine
from offbeat_testing import tiny_model

BENCH = Path(harness.__file__).parent


def run(name, *words, cwd):
    """Return the rows of a bench that runs in its own process, which leaves nothing behind."""
    command = [sys.executable, str(BENCH / name), *map(str, words), "--json"]
    there = sorted(cwd.iterdir())
    ended = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    assert sorted(cwd.iterdir()) == there
    return json.loads(ended.stdout)


def test_rows_are_a_table_or_json(capsys):
    rows = [{"what": "a", "seconds": 0.12345, "num": 3}, {"what": "b", "seconds": 12345.6, "num": 4}]
    harness.show(rows, title="two rows")
    assert capsys.readouterr().out.splitlines()[2:] == [
        *("| what | seconds | num |", "| --- | --- | --- |", "| a | 0.123 | 3 |", "| b | 12346 | 4 |")
    ]
    harness.show(rows, as_json=True)
    assert json.loads(capsys.readouterr().out) == rows


def test_sides_take_turns_and_who_begins_changes():
    order = []
    found = harness.take_turns({name: lambda name=name: order.append(name) or 1.0 for name in "ab"}, 2)
    assert order == ["a", "b", "b", "a"]
    assert found == {"a": [1.0, 1.0], "b": [1.0, 1.0]}


def test_placement_times_every_case_and_decides_every_random_one():
    rows = [placement.measure(case, 1) for case in placement.cases(16)]
    outcomes = {row["case"]: row["outcome"] for row in rows}
    assert len(outcomes) == 10
    assert outcomes["widths 3 + 5, nothing left over"] == "plan"
    assert outcomes["widths 3 + 5, one too many"].startswith("refused")
    assert all(row["median_s"] > 0 for row in rows)
    decided, _ = placement.decide(60, 16)
    assert set(decided) == {"plan", "proven impossible"}


def test_the_brief_look_of_a_large_run_comes_to_the_same_verdict_and_reads_a_part():
    row = measure(128, 30)
    assert row["brief_mb"] < row["full_mb"]


@pytest.mark.nightly
def test_generation_is_compared_at_every_batch_in_a_group_and_with_top_p(tmp_path):
    words = (
        "--batch",
        "2",
        "3",
        "--group",
        "2",
        "--group-prompt",
        "150",
        "--new",
        "8",
        "--threads",
        "1",
        "--repeats",
        "1",
    )
    rows = run("vs_generate.py", tiny_model(tmp_path / "model"), *words, cwd=tmp_path)
    assert [row["work"] for row in rows] == ["batch 2", "batch 3", "group 2", "top_p 0.95"]
    assert all(min(row["rollout_torch"], row["generate"], row["ratio to generate"]) > 0 for row in rows[:-1])
    assert min(rows[-1]["without top_p"], rows[-1]["ratio to without top_p"]) > 0


@pytest.mark.nightly
def test_a_training_step_is_timed_by_type_and_by_sharing_of_prompts(tmp_path):
    words = ("--prompts", "2", "--samples", "2", "--steps", "1", "--threads", "1")
    rows = run("train_step.py", tiny_model(tmp_path / "model"), *words, cwd=tmp_path)
    assert [(row["dtype"], row["prompts"]) for row in rows] == [
        (dtype, prompts) for dtype in ("float32", "bfloat16") for prompts in ("unshared", "shared")
    ]
    assert rows[1]["packed"] < rows[0]["packed"]


@pytest.mark.nightly
def test_exact_numerics_are_timed_against_native_ones(tmp_path):
    words = ("--samples", "2", "--repeats", "1", "--completion-tokens", "6", "--dtypes", "float32")
    rows = run("exact.py", tiny_model(tmp_path / "model"), *words, cwd=tmp_path)
    assert [row["work"] for row in rows] == ["sampling", "prompts", "training"]
    assert all(row["price"] > 0 and row["differ"] == 0 for row in rows)


@pytest.mark.nightly
def test_a_step_is_timed_by_layout_of_ranks(tmp_path):
    words = ("--size", "tiny", "--steps", "1", "--sequences", "4", "--tokens", "32", "--only", "engine-torch")
    rows = run("megatron_step.py", *words, cwd=tmp_path)
    assert [row["layout"] for row in rows] == ["one rank", "dp2", "tp2"]
    assert all(row["step_s"] > 0 and row["peak_mb"] > 0 for row in rows)


@pytest.mark.nightly
@pytest.mark.parametrize("part", ["monitor", "all_reduce"])
def test_the_monitor_is_timed_on_two_ranks(part):
    from bench import liveness

    rows = liveness.measure(part, 2, 1)
    if part == "monitor":
        assert all(row["share"] < 1 for row in rows)
    else:
        assert [row["bytes"] for row in rows] == list(liveness.SIZES_BYTES)
        assert all(row["without_us"] > 0 and row["with_us"] > 0 and row["ratio"] > 0 for row in rows)


@pytest.mark.nightly
def test_every_transport_of_weights_is_measured_beside_its_floor(tmp_path):
    rows = run("weightsync.py", "--size", "tiny", "--repeats", "2", cwd=tmp_path)
    assert {(row["transport"], row["floor"]) for row in rows} == {
        *(("shared-memory", floor) for floor in ("memcpy", "tensors", "two-copy")),
        *(("broadcast", "loopback"), ("broadcast", "gloo"), ("tcp", "loopback")),
        *(("disk-write", "write"), ("disk-read", "read")),
        *((payload, "all weights") for payload in ("adapter", "changes", "changes-tcp")),
    }
    assert all(row["ratio_of_fastest"] > 0 for row in rows)


@pytest.mark.nightly
def test_every_published_row_is_simulated_with_its_totals(tmp_path):
    rows = run("simulate.py", "published", cwd=tmp_path)
    assert len({row["name"] for row in rows}) == 9
    assert all(row["simulated"] > 0 for row in rows)
    steps = [row["what"] for row in rows if row["name"] == rows[0]["name"]]
    assert steps == ["step, s", *(f"{number}00 steps, min" for number in range(1, len(steps)))]


def update(seconds, **values):
    """Return the metrics of one update."""
    return {**dict.fromkeys(quickstart.MEANS, 1.0), "train/lag_max": 1.0, "perf/update_s": seconds, **values}


VALUES = [
    {"eval/accuracy": 0.3},
    update(1.0, **{"perf/tokens_per_s": 100.0, "async/overlap_share": 0.0, "train/lag_max": 2.0}),
    update(3.0, **{"perf/tokens_per_s": 20.0, "async/overlap_share": 0.8}),
    {"eval/accuracy": 0.6},
    {"eval/accuracy": 0.95},
]


def test_an_update_of_three_seconds_counts_three_times_one_of_one():
    row = quickstart.summarise(VALUES, 0, 60.0)
    assert row["training_s"] == pytest.approx(4.0)
    assert row["perf/tokens_per_s"] == pytest.approx((100 * 1 + 20 * 3) / 4)
    assert row["async/overlap_share"] == pytest.approx(0.6)
    assert (row["train/lag_max"], row["before"], row["after"]) == (2, 0.3, 0.95)


def test_every_promise_of_the_quickstart_must_hold():
    kept = quickstart.summarise(VALUES, 7, 300.0)
    assert quickstart.broken(kept) == []
    for wrong in ({"before": 0.51}, {"after": 0.89}, {"after": float("nan")}, {"total_s": 301.0}):
        [words] = quickstart.broken({**kept, **wrong})
        assert words.startswith("seed 7: ")


def test_a_quickstart_that_is_cut_short_or_fails_is_reported():
    with pytest.raises(SystemExit, match="2 updates and 1 validations"):
        quickstart.summarise(VALUES[:3], 0, 60.0)
    command = [sys.executable, str(BENCH / "quickstart.py"), "--seeds", "-1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 1
    assert "--seed" in done.stderr.split("ended with 2")[1]


def test_a_study_of_lags_makes_each_run_once_and_shows_all_seeds(tmp_path):
    keys = list(lags.missing_runs([], ["addition"], [0, 4], 2))
    assert keys == [
        (lesson, lag, correction, seed)
        for seed in range(2)
        for lesson, lag, correction in [("addition", 0, "none"), ("addition", 4, "auto"), ("addition", 4, "none")]
    ]
    measured = {"before": 0.4, "train/lag_mean": 1.0, "mismatch/kl": 1e-3}
    rows = [
        {"lesson": lesson, "lag": lag, "correction": correction, "seed": seed, "after": 0.5 + 0.1 * seed, **measured}
        for lesson, lag, correction, seed in keys
    ]
    assert list(lags.missing_runs(rows, ["addition"], [0, 4], 2)) == []
    assert "| addition | 4 | default | 0.550 | ± 0.071 | 1.00 | 1.0e-03 | 2 |" in lags.page(rows)
    assert "| addition | 0 | on policy |" in lags.page(rows)
    lags.draw(rows, tmp_path / "lags.svg")
    assert (tmp_path / "lags.svg").read_text().count("legend") == 1


def test_a_run_of_the_study_is_measured_by_its_last_validation_and_the_means_of_its_updates():
    update = {"train/lag_mean": 2.0, "train/lag_max": 3.0, "train/reward": 0.5, "mismatch/kl": 1e-3}
    update |= {"mismatch/ess_share": 0.9, "perf/update_s": 1.0}
    values = [{"eval/accuracy": 0.4}, update, update | {"train/lag_mean": 4.0}, {"eval/accuracy": 0.8}]
    lines = [MetricsLine(step=at, time_s=0.0, values=each) for at, each in enumerate(values)]
    found = lags.measure(lines)
    assert (found["before"], found["after"], found["train/lag_mean"], found["lag_max"]) == (0.4, 0.8, 3.0, 3.0)

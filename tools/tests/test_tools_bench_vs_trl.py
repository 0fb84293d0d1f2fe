"""The comparison with TRL: what is timed, the same prompts for both, and both halves for real on a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench import vs_trl

from offbeat_testing import tiny_model

SCRIPT = Path(vs_trl.__file__)
SMALL = ["--steps", "1", "--prompts", "2", "--samples", "2", "--max-tokens", "8", "--threads", "1"]


def steps(*ends_s: float) -> list[vs_trl.Step]:
    """Steps that ended then."""
    return [vs_trl.Step(end_s=end_s, tokens=end_s, reward=0.5) for end_s in ends_s]


def test_neither_the_first_step_nor_the_last_ones_are_timed() -> None:
    speed = vs_trl.measure(steps(100.0, 110.0, 130.0, 131.0, 132.0), num_measured=2, samples_per_step=60)
    assert speed.step_s == pytest.approx(15.0)
    assert speed.samples_per_s == pytest.approx(120 / 30)
    assert speed.tokens == pytest.approx(120.0)


def test_too_few_steps_are_an_error() -> None:
    with pytest.raises(SystemExit, match=r"3 steps were asked for, 2 were made"):
        vs_trl.measure(steps(1.0, 2.0), num_measured=2, samples_per_step=4)


def test_the_sums_are_right_and_the_same_each_time(tmp_path: Path) -> None:
    first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    vs_trl.write_sums(first, 20)
    vs_trl.write_sums(second, 20)
    assert first.read_text() == second.read_text()
    for row in map(json.loads, first.read_text().splitlines()):
        one, _, other = row["prompt"][0]["content"].removeprefix("What is ").removesuffix("?").split()
        assert int(one) + int(other) == int(row["answer"])


@pytest.mark.nightly
def test_offbeat_makes_every_step_with_the_real_application(tmp_path: Path) -> None:
    args = vs_trl.parse([str(tiny_model(tmp_path / "model")), *SMALL])
    data = tmp_path / "sums.jsonl"
    vs_trl.write_sums(data, vs_trl.num_rows(args))
    made = vs_trl.run_offbeat(args, data, tmp_path)
    assert len(made) == vs_trl.WARM_UP_STEPS + 1 + vs_trl.DRAIN_STEPS
    assert vs_trl.measure(made, 1, 4).samples_per_s > 0
    assert all(0 < step.tokens <= 8 for step in made)


@pytest.mark.skipif(
    not (vs_trl.peer_environment() / "complete").exists(),
    reason="TRL's environment (1.2 GB) is made by the first `python tools/bench/vs_trl.py MODEL_FOLDER`",
)
def test_both_halves_run_and_are_compared(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(SCRIPT), str(tiny_model(tmp_path / "model")), *SMALL, "--json", str(figures)]
    subprocess.run(command, capture_output=True, text=True, check=True, timeout=110)
    report = json.loads(figures.read_text())
    assert report["ratio"] == pytest.approx(report["offbeat"]["samples_per_s"] / report["trl"]["samples_per_s"])
    assert 0 < report["trl"]["tokens"] <= 8


def test_a_side_that_fails_is_named_with_its_reason(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path / "no-model"), *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 1
    assert "offbeat ended with 2" in done.stderr
    assert "no-model" in done.stderr

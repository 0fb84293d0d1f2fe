"""The simulator's benchmarks print every published row, and compare with real runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"


def test_every_published_row_is_printed_with_its_totals(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "simulate.py"), "published", "--json"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    rows = {row["name"]: row for row in json.loads(ended.stdout)}
    assert len(rows) == 9
    for row in rows.values():
        assert row["step_s"] > 0
        assert [steps for steps, _, _ in row["totals_min"]] == [100, 200, 300, 400][: len(row["totals_min"])]
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


@pytest.mark.timeout(300)  # two real runs, each with its roles: half a minute on a quiet machine
def test_two_real_synchronous_runs_become_a_scenario(tmp_path: Path) -> None:
    """The shortest form of the comparison with real runs; whether it is close is no matter here."""
    command = [sys.executable, str(BENCH / "simulate_run.py"), "--updates", "4", "--keep", str(tmp_path), "--only", "1"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=480, check=False)
    assert ended.returncode in (0, 1), ended.stderr
    assert "[engines]" in ended.stdout
    assert "groups/s measured" in ended.stdout
    assert (tmp_path / "measured.toml").is_file()

"""The simulator's benchmarks print every published row, and compare with real runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"


@pytest.mark.nightly
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

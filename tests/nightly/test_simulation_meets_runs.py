"""The simulator beside real runs: the shortest form of `tools/bench/simulate_run.py`."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "tools" / "bench" / "simulate_run.py"


@pytest.mark.timeout(600)
def test_two_real_synchronous_runs_become_a_scenario(tmp_path: Path) -> None:
    """The accuracy of the prediction is not checked here."""
    command = [sys.executable, str(BENCH), "--updates", "4", "--keep", str(tmp_path), "--only", "1"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=480, check=False)
    assert ended.returncode in (0, 1), ended.stderr
    assert "[engines]" in ended.stdout
    assert "groups/s measured" in ended.stdout
    assert (tmp_path / "measured.toml").is_file()

"""The bench runs both engines for real and reports every row it was asked for."""

import json
import subprocess
import sys
from pathlib import Path

from offbeat_testing import tiny_model

SCRIPT = Path(__file__).parents[1] / "bench" / "vs_generate.py"


def test_both_sides_run_and_every_batch_has_a_row(tmp_path: Path) -> None:
    """On a model that takes no time."""
    folder = tiny_model(tmp_path / "model")
    command = [sys.executable, str(SCRIPT), str(folder), "--batch", "2", "3", "--new", "8", "--threads", "1"]
    done = subprocess.run(
        [*command, "--repeats", "1", "--json"], capture_output=True, text=True, check=True, timeout=110
    )
    report = json.loads(done.stdout)
    assert [row["batch"] for row in report["rows"]] == [2, 3]
    for row in report["rows"]:
        assert row["rollout_torch"] > 0
        assert row["generate"] > 0
        assert row["ratio"] > 0


def test_a_side_that_dies_is_shown(tmp_path: Path) -> None:
    """A folder without weights ends the run with the reason."""
    folder = tiny_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    command = [sys.executable, str(SCRIPT), str(folder), "--batch", "2", "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 1
    assert "lacks model.safetensors" in done.stderr

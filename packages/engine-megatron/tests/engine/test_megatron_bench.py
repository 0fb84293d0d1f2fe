"""The benchmark trains each engine by layout, and says what that costs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[4] / "tools" / "bench" / "megatron_step.py"


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_engines_are_measured_by_layout(tmp_path):
    small = ["--size", "tiny", "--steps", "1", "--sequences", "4", "--tokens", "32"]
    command = [sys.executable, str(SCRIPT), *small, "--only", ": pp2", "--json"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr
    found = {(each["engine"], each["layout"]): each for each in json.loads(ended.stdout)}
    assert set(found) == {("engine-megatron", "pp2"), ("engine-megatron", "pp2, virtual_pipeline=2")}
    assert all(each["step_s"] > 0 and each["tokens_per_s"] > 0 and each["peak_mb"] > 50 for each in found.values())
    assert list(tmp_path.iterdir()) == []

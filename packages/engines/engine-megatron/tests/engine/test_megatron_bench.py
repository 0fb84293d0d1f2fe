"""The benchmark trains each engine by layout, and says what that costs; the piece for a GPU runs in its tiny form."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[5] / "tools"


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_engines_are_measured_by_layout(tmp_path):
    small = ["--size", "tiny", "--steps", "1", "--sequences", "4", "--tokens", "32"]
    command = [sys.executable, str(TOOLS / "bench" / "megatron_step.py"), *small, "--only", ": pp2", "--json"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr
    found = {(each["engine"], each["layout"]): each for each in json.loads(ended.stdout)}
    assert set(found) == {("engine-megatron", "pp2"), ("engine-megatron", "pp2, virtual_pipeline=2")}
    assert all(each["step_s"] > 0 and each["tokens_per_s"] > 0 and each["peak_mb"] > 50 for each in found.values())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_the_piece_for_a_gpu_runs_on_a_cpu(tmp_path):
    out = tmp_path / "result.json"
    command = [sys.executable, str(TOOLS / "gpu" / "megatron_against_cpu.py"), "--device", "cpu", "--out", str(out)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert {"update qwen3", "update qwen3_moe"} <= json.loads(out.read_text())["figures"].keys()

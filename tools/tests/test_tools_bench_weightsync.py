"""The weight-sync benchmark runs each transport and gives a ratio to each floor."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "bench" / "weightsync.py"


@pytest.mark.nightly
def test_every_transport_is_measured_beside_its_floor(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--size", "tiny", "--repeats", "2", "--json"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    found = {(each["transport"], each["floor"]): each for each in json.loads(ended.stdout)}
    assert set(found) == {
        ("shared-memory", "memcpy"),
        ("shared-memory", "tensors"),
        ("shared-memory", "two-copy"),
        ("broadcast", "loopback"),
        ("broadcast", "gloo"),
        ("tcp", "loopback"),
        ("disk-write", "write"),
        ("disk-read", "read"),
    }
    for each in found.values():
        assert each["num_bytes"] > 100_000
        assert each["ratio_of_fastest"] > 0
        assert len(each["all_sync_s"]) == 2
    assert list(tmp_path.iterdir()) == []  # nothing is left behind

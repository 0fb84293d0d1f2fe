"""The bench runs both engines for real and reports every row it was asked for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench import vs_generate

from offbeat_testing import tiny_model

SCRIPT = Path(vs_generate.__file__)


@pytest.mark.nightly
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


def side(folder: Path, script: str) -> vs_generate.Side:
    """A side whose Python is a shell script."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return vs_generate.Side(str(python), "peer", folder, threads=1)


@pytest.mark.timeout(30)
def test_a_side_that_stands_still_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vs_generate, "ANSWER_DEADLINE_S", 0.2)
    still = side(tmp_path, "exec sleep 60")
    try:
        with pytest.raises(SystemExit, match=r"peer gave no answer for 0\.2 s"):
            still.tokens_per_s(2, 4)
    finally:
        still.close()


@pytest.mark.timeout(30)
def test_a_side_may_say_much_on_stderr(tmp_path: Path) -> None:
    """More than a pipe holds."""
    talkative = side(tmp_path, "head -c 300000 /dev/zero >&2; read line; echo 5; exec sleep 60")
    try:
        assert talkative.tokens_per_s(2, 4) == 5.0
    finally:
        talkative.close()

"""Secrecy of a run: no other user may write to its folder, nothing in it or on the terminal is a secret, and
nothing of it can be reached from another machine.
"""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from role_faults import listening_addresses, role_pids, updates

from offbeat_testing import RunningCommand

Main = Callable[[], object]
SECRET = "hf-0123456789-must-not-be-read"
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    return SECRET


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.nightly
def test_a_run_shows_nobody_else_anything(
    forked_main: Main, config: Path, tmp_path: Path, secret: str, no_umask: None
) -> None:
    run = tmp_path / "run"
    words = ["--model.path", f"{tmp_path}/${{HF_TOKEN}}/model", "--rollout.serve_port=0", "--engine.num_ranks=2"]
    where = tmp_path / secret
    where.mkdir()
    (where / "model").symlink_to(_model_of(config))
    with RunningCommand(forked_main, "train", config, "--out", run, *words, "--data.epochs=4") as process:
        process.wait_until(lambda: len(updates(run)) >= 2, "2 updates")
        listening = set().union(*map(listening_addresses, [process.pid, *role_pids(process).values()]))
        assert process.wait() == 0, process.output
        assert secret not in process.output
    assert listening, "the endpoint and the meeting place of the ranks"
    assert listening <= LOOPBACK
    for path in run.rglob("*"):
        assert path.is_dir() or secret.encode() not in path.read_bytes(), path
    assert "HF_TOKEN" in (run / "config.toml").read_text()
    assert stat.S_IMODE(run.stat().st_mode) & stat.S_IRWXO == 0, "no other user gets to its contents"


def _model_of(config: Path) -> str:
    (line,) = [line for line in config.read_text().splitlines() if line.startswith("path") and "model" in line]
    return line.split('"')[1]

"""Users that may write to a run folder, and what it never contains."""

import os
import stat
from dataclasses import dataclass, field
from typing import Any

import pytest

from offbeat_core import ConfigError, setting
from offbeat_run import LogConfig, RunFolder, run_command


@dataclass(frozen=True, kw_only=True)
class Data:
    path: str = setting("", "Where.")
    options: dict[str, Any] = setting({}, "More.")


@dataclass(frozen=True, kw_only=True)
class Config:
    data: Data = field(default_factory=Data)
    log: LogConfig = field(default_factory=LogConfig)


@pytest.fixture
def secret(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "ab~/cd$ef-0123456789")
    return "ab~/cd$ef-0123456789"


def test_others_can_neither_write_nor_read_a_run_folder(tmp_path):
    before = os.umask(0)
    try:
        with RunFolder.create(tmp_path / "run") as run:
            run.write_config(Config())
            run.keep()
    finally:
        os.umask(before)
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o750


def test_a_folder_that_all_may_write_to_is_closed(tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with RunFolder.create(folder) as run:
        run.write_config(Config())
        run.keep()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o770, "others can read no prompts and no weights"
    folder.chmod(0o777)
    RunFolder.open(folder, write=False).close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o777  # a reader changes nothing
    RunFolder.open(folder).close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o775


def test_an_error_and_the_plan_name_a_secret_and_do_not_hold_it(secret, tmp_path, capsys):
    def main():
        raise ConfigError(f"cannot reach https://user:{secret}@host")

    with pytest.raises(SystemExit):
        run_command(main, program="test")
    assert capsys.readouterr().err == "error: cannot reach https://user:${WANDB_API_KEY}@host\n"
    with RunFolder.create(tmp_path / "run") as run:
        run.write_plan([("data", f"from {secret}")])
        assert run.plan.read_text() == "data: from ${WANDB_API_KEY}\n"

"""A run remembers which commands worked on it, from when to when, and how each ended; a heading shows it."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from offbeat_core import BackendError, RunFolderError
from offbeat_run import RunFolder, record_session, refuse_foreign_run
from offbeat_run._folder.sessions import Session, read_sessions
from offbeat_run._metrics.metrics import MetricsLog
from offbeat_run._metrics.series import read_run_metrics
from offbeat_run._run_summary import summarize_run

KILLED = """
import os, signal, sys
from offbeat_run import RunFolder, record_session
from offbeat_run._metrics.metrics import MetricsLog
with RunFolder.open(sys.argv[1]) as run, record_session(run, "app train my.toml"):
    MetricsLog(run, tensorboard=False).write(1, {"train/reward": 0.5})
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def run(tmp_path):
    with RunFolder.create(tmp_path / "run") as run:
        run.write_text(
            run.config, '[model]\npath = "models/Tiny"\n[data]\npath = "q.jsonl"\n[reward]\nname = "exact"\n'
        )
        run.keep()
        yield run


def summary(run):
    return summarize_run(run, read_run_metrics(run.metrics, []), read_sessions(run, []))


def ended(run, command, error):
    with pytest.raises(type(error)), record_session(run, command):
        raise error


def test_a_session_is_written_down_with_how_it_ended(run):
    before_s = time.time()
    with record_session(run, "app train my.toml"):
        (going,) = read_sessions(run)
        assert (going.ended_s, going.end) == (None, "")
    ended(run, "app resume a", KeyboardInterrupt())
    ended(run, "app resume b", BackendError("no room\nand more"))
    ended(run, "app resume c", ValueError("a bug"))
    first, *others = read_sessions(run)
    assert before_s - 1 <= first.started_s <= first.ended_s <= time.time() + 1
    assert (first.command, first.end, first.reason) == ("app train my.toml", "finished", "")
    assert [(each.end, each.reason) for each in others] == [
        ("interrupted", ""), ("failed", "no room"), ("failed", "ValueError: a bug"),
    ]  # fmt: skip


def test_the_heading_of_a_run_says_what_it_is_and_how_it_stands(run):
    assert (summary(run).headline, summary(run).task[2]) == ("Tiny on q.jsonl", ("reward", "exact"))
    assert summary(run).status == ""  # the folder of an older version
    with record_session(run, "app train my.toml"):
        assert summary(run).status == "running"
    ended(run, "app resume a", KeyboardInterrupt())
    assert (summary(run).status, summary(run).history) == ("interrupted", "resumed once")
    ended(run, "app resume b", BackendError("no room"))
    assert (summary(run).status, summary(run).history) == (
        "failed", "no room (before that interrupted once, resumed 2 times)",
    )  # fmt: skip
    with record_session(run, "app resume c"):
        pass
    assert (summary(run).status, summary(run).history) == (
        "finished", "interrupted once, failed once, resumed 3 times",
    )  # fmt: skip
    assert summary(run).commands == ["app train my.toml", "app resume c"]


def test_a_session_that_was_killed_is_distinguished_from_one_that_runs(run):
    run.close()
    done = subprocess.run([sys.executable, "-c", KILLED, str(run.path)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert summary(run).status == "killed"
    long_ago_s = time.time() - 1000
    os.utime(run.metrics, (long_ago_s, long_ago_s))
    with RunFolder.open(run.path) as again, record_session(again, "app resume run"):
        assert (summary(again).status, summary(again).history) == ("running", "killed once, resumed once")
        killed = read_sessions(again)[0]
        assert killed.end == "killed"
        assert killed.ended_s == killed.started_s  # nothing was written after it


def test_the_time_of_a_run_leaves_out_the_pauses_between_its_sessions(run):
    lines = [
        {"command": "train", "started_s": 1000.0}, {"ended_s": 1060.0, "end": "interrupted"},
        {"command": "resume", "started_s": 9000.0}, {"ended_s": 9030.0, "end": "finished"},
    ]  # fmt: skip
    run.write_text(run.sessions, "".join(f"{json.dumps(line)}\n" for line in lines))
    with MetricsLog(run, tensorboard=False) as log:
        log.write(1, {"train/reward": 0.0}, time_s=1050.0)
        log.write(2, {"train/reward": 1.0}, time_s=9020.0)
    assert dict(summary(run).tiles)["time"] == "1 min 30 s"
    run.sessions.unlink()
    assert dict(summary(run).tiles)["time"] == "2 h 12 min"  # all that an older folder shows


@pytest.mark.parametrize(
    "line", ["nonsense", '{"started_s": "now"}', '{"ended_s": 1, "end": "blew up"}', '{"reason": 3}', "[" * 100_000]
)
def test_a_damaged_line_of_a_session_is_left_out(run, line):
    with record_session(run, "app train my.toml"):
        pass
    run.write_text(run.sessions, f"{line}\n{run.sessions.read_text()}{line}\n")
    damaged = []
    (found,) = read_sessions(run, damaged)
    assert isinstance(found, Session)
    assert found.end == "finished"
    assert len(damaged) == 2


def test_a_secret_of_the_environment_is_not_written_into_a_command(run, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh12345678")
    with record_session(run, "app train --data.token hf_abcdefgh12345678"):
        pass
    assert "abcdefgh" not in run.sessions.read_text()


def test_the_run_of_another_application_is_refused_with_its_name(run):
    refuse_foreign_run(run, "other-app")  # before its first session that is unknown
    with record_session(run, "app train my.toml"):
        refuse_foreign_run(run, "app")
    with pytest.raises(
        RunFolderError, match=r"is a run of app, and not of other-app; app continues it, and the models"
    ):
        refuse_foreign_run(run, "other-app")

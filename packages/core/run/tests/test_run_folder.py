"""A run folder belongs to one run and one process, and refuses what would spoil another."""

import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from offbeat_core import RunFolderError, parse_config
from offbeat_run import LogConfig, RunFolder, check_shared, writer_of

LOOKING = """
import sys
from pathlib import Path
from offbeat_run import writer_of
print(flush=True)
while True:
    writer_of(Path(sys.argv[1]))
"""


def make(path):
    run = RunFolder.create(path)
    run.write_text(run.config, "")
    return run


def test_a_new_folder_has_a_name_for_everything(tmp_path):
    with RunFolder.create(tmp_path / "deep" / "run") as run:
        inside = {
            str(path.relative_to(run.path))
            for path in (run.config, run.settled, run.plan, run.metrics, run.timeline, run.report, run.log("rollout-0"))
        }
        assert inside == {
            "config.toml", "settled.toml", "plan.txt", "metrics.jsonl", "timeline.json", "report.html",
            "logs/rollout-0.log",
        }  # fmt: skip
        assert all(folder.is_dir() for folder in (run.tensorboard, run.generations, run.logs, run.checkpoints.path))


def test_a_reader_sees_if_a_process_writes_to_a_folder_and_keeps_no_writer_out(tmp_path):
    began_s = time.time()
    assert not writer_of(tmp_path / "none")
    with make(tmp_path / "run") as run:
        assert writer_of(run.path)
        writer = writer_of(run.path)
        assert writer, "looking does not take the lock away"
        assert (writer.pid, writer.host) == (os.getpid(), socket.gethostname())
        assert began_s <= writer.since_s <= time.time()
        (run.path / ".lock").write_text("17\n")  # as version 0.1.0 writes it
        assert str(writer_of(run.path)) == "process 17"
        (run.path / ".lock").write_text("one of us\n")  # damaged
        assert str(writer_of(run.path)) == "process unknown"
        (run.path / ".lock").write_text("")  # another process has taken the lock, and is about to write
        assert str(writer_of(run.path)) == "process unknown"
    assert not writer_of(tmp_path / "run")
    with subprocess.Popen([sys.executable, "-c", LOOKING, tmp_path / "run"], stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        try:
            for _ in range(300):
                RunFolder.open(tmp_path / "run").close()
        finally:
            reader.kill()


def test_a_forked_child_does_not_keep_a_dead_writers_folder_locked(tmp_path):
    run = make(tmp_path / "run")
    child = os.fork()
    if not child:
        signal.pause()
        os._exit(0)
    try:
        assert writer_of(run.path), "the child lets go of its copy alone"
        run.close()
        deadline_s = time.monotonic() + 10
        while writer_of(run.path) and time.monotonic() < deadline_s:  # until the child has begun
            time.sleep(0.01)
        assert not writer_of(run.path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_folder_that_holds_files_is_refused_with_the_three_ways_out(tmp_path):
    (tmp_path / "kept.txt").write_text("precious")
    with pytest.raises(RunFolderError, match=r"not empty; resume it with .*, choose another folder, or remove it"):
        RunFolder.create(tmp_path)
    assert (tmp_path / "kept.txt").read_text() == "precious"


def test_a_machine_that_does_not_have_the_folder_is_named(tmp_path):
    check_shared(tmp_path)
    with pytest.raises(RunFolderError, match=rf"elsewhere is not on {socket.gethostname()}.*under one path.*--out"):
        check_shared(tmp_path / "elsewhere")


@pytest.mark.parametrize("kind", ["file", "loop"])
def test_checkpoints_that_are_no_folder_are_named(tmp_path, kind):
    with make(tmp_path / "run") as run:
        run.checkpoints.path.rmdir()
        if kind == "file":
            run.checkpoints.path.write_text("not a folder")
        else:
            run.checkpoints.path.symlink_to(run.checkpoints.path)
    with pytest.raises(RunFolderError, match="checkpoints: must be a folder that can be written"):
        RunFolder.open(run.path)


def test_a_file_in_place_of_a_run_is_said_to_be_one(tmp_path):
    (tmp_path / "my.toml").write_text("")
    with pytest.raises(RunFolderError, match=r"my\.toml: is a file; give the folder of a run"):
        RunFolder.open(tmp_path / "my.toml")


def test_a_place_that_cannot_hold_a_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="is a file"):
        RunFolder.create(tmp_path / "file")
    with pytest.raises(RunFolderError, match="cannot write a run folder here"):
        RunFolder.create(tmp_path / "file" / "run")
    with pytest.raises(RunFolderError, match="cannot write a run folder here"):
        RunFolder.create("/proc/offbeat-run")


def test_too_little_space_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(RunFolderError, match=r"no space left: this run needs 1024 PiB"):
        RunFolder.create(tmp_path / "run", required_bytes=2**60)
    with RunFolder.create(tmp_path / "run"):  # and the refusal has left nothing in the way
        pass


def test_a_second_process_is_refused_with_the_one_that_is_there(tmp_path):
    make(tmp_path / "run").close()
    code = (
        "import sys, time; from offbeat_run import RunFolder\n"
        "run = RunFolder.open(sys.argv[1]); print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        host = re.escape(socket.gethostname())
        with pytest.raises(RunFolderError, match=f"process {holder.pid} on {host} is working in this run folder"):
            RunFolder.open(tmp_path / "run")
        RunFolder.open(tmp_path / "run", write=False)  # a reader is welcome
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait(timeout=30)
        assert holder.stdout is not None
        holder.stdout.close()
    RunFolder.open(tmp_path / "run").close()  # a killed process holds nothing


def test_what_is_not_a_run_folder_is_not_opened(tmp_path):
    with pytest.raises(RunFolderError, match="no such run folder"):
        RunFolder.open(tmp_path / "none")
    with pytest.raises(RunFolderError, match=r"not a run folder: it holds no config\.toml"):
        RunFolder.open(tmp_path)


def test_a_reader_writes_nothing_into_the_folder(tmp_path):
    (tmp_path / "config.toml").write_text("")
    RunFolder.open(tmp_path, write=False)
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


def test_a_folder_with_a_user_s_own_config_is_left_as_it_is(tmp_path):
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(RunFolderError, match=r"not a run folder: .* begin one with: train .*config.toml"):
        RunFolder.open(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


def test_opening_clears_what_a_kill_left_half_written(tmp_path):
    with make(tmp_path / "run") as run:
        (run.path / ".tmp-1234-config.toml").write_text("half")
        torn = run.checkpoints.path / ".tmp-1234-step-000001"
        torn.mkdir()
        (torn / "half").write_text("")
        aside = run.checkpoints.path / ".old-1234-step-000002"
        aside.mkdir()
        (aside / "whole").write_text("kept")
        for name in (".old-5678-step-000003", "step-000003"):  # a kill after the new one had got its name
            (run.checkpoints.path / name).mkdir()
            (run.checkpoints.path / name / "whole").write_text(name)
    with RunFolder.open(tmp_path / "run") as run:
        assert not (run.path / ".tmp-1234-config.toml").exists()
        assert sorted(path.name for path in run.checkpoints.path.iterdir()) == ["step-000002", "step-000003"]
        assert (run.checkpoints.path / "step-000003" / "whole").read_text() == "step-000003"
        assert (run.checkpoints.path / "step-000002" / "whole").read_text() == "kept"


def test_the_resolved_configuration_is_kept(tmp_path):
    from dataclasses import field, make_dataclass

    root = make_dataclass("Root", [("log", LogConfig, field(default_factory=LogConfig))], frozen=True)
    config = root(log=LogConfig(generations=3, trackers=("wandb",)))
    with RunFolder.create(tmp_path / "run") as run:
        run.write_config(config)
        assert parse_config(run.config.read_text(), root) == config

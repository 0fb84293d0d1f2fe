"""A run that Slurm starts on two nodes: it ends as any other, saves before its time is over, and names a lost node."""

import os
import re
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sft_runs import RANKS, WORDS, assert_same, values_of

from offbeat_testing import CommandLine, SlurmStandIn

# Ray's processes take their time on a busy machine.
ON_NODES = ["--cluster.connect_timeout_s=300", "--cluster.start_timeout_s=400", "--cluster.trainer_threads=1"]
JOB_S = 1200

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(JOB_S + 600)]


@pytest.fixture
def script(command: CommandLine, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Write a batch script for two nodes."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'offbeat-actors[ray]'")
    monkeypatch.chdir(tmp_path)

    def write(*words: str) -> Path:
        path = tmp_path / "my.sbatch"
        ended = command("slurm", config, "--cluster=2x0", "--out", path, *WORDS, *RANKS, *ON_NODES, *words)
        assert ended.code == 0, ended.err
        assert "sbatch" in ended.out
        return path

    return write


def finish(process: "subprocess.Popen[str]") -> tuple[int, str]:
    output, _ = process.communicate(timeout=JOB_S)
    return process.returncode, output


def processes_of(folder: Path, job: int) -> list[str]:
    """Return the command lines of what a job has left running."""
    listed = subprocess.run(["ps", "-eo", "args="], capture_output=True, text=True, check=True).stdout
    marks = (f"/tmp/ray-{job}/", f"{folder}/runs", f"{folder}/slurm")
    return [line for line in listed.splitlines() if any(mark in line for mark in marks)]


def wait_until(condition: Callable[[], Any], process: "subprocess.Popen[str]", deadline_s: float = JOB_S) -> None:
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert process.poll() is None, finish(process)
        assert time.monotonic() < end_s, "it has not come to pass"
        time.sleep(0.1)


def test_a_job_on_two_nodes_trains_as_one_process_does(
    script: Callable[..., Path], command: CommandLine, config: Path, tmp_path: Path
) -> None:
    job = os.getpid()
    code, output = finish(SlurmStandIn(tmp_path / "slurm", 2).submit(script(), job))
    assert code == 0, output
    assert processes_of(tmp_path, job) == []
    assert not (tmp_path / "runs" / f"sft-{job}.job" / "ray.token").exists()
    assert command("train", config, "--out", tmp_path / "undisturbed", *WORDS).code == 0
    assert_same(tmp_path / "runs" / f"sft-{job}", tmp_path / "undisturbed")


def test_a_job_whose_time_is_nearly_over_saves_and_resumes_to_the_same_end(
    script: Callable[..., Path], command: CommandLine, config: Path, tmp_path: Path
) -> None:
    job, words = os.getpid(), ["--data.epochs=15"]  # 38 updates
    run, cluster = tmp_path / "runs" / f"sft-{job}", SlurmStandIn(tmp_path / "slurm", 2)
    process = cluster.submit(script(*words), job)
    wait_until(lambda: len(values_of(run, "train/loss")) > 2, process)
    cluster.send_signal("USR1")
    code, output = finish(process)
    assert code == 0, output
    assert "slurm: restart 1" in output
    assert "the time of this job is over" in output
    assert re.search(r"resum|continu", output)
    assert command("train", config, "--out", tmp_path / "undisturbed", *WORDS, *words).code == 0
    assert_same(run, tmp_path / "undisturbed")


def test_two_jobs_on_the_same_nodes_do_not_meet(script: Callable[..., Path], tmp_path: Path) -> None:
    path, first = script(), os.getpid()
    jobs = [SlurmStandIn(tmp_path / f"slurm-{number}", 2).submit(path, number) for number in (first, first + 1)]
    ended: list[tuple[int, str]] = []
    waiting = [threading.Thread(target=lambda each=each: ended.append(finish(each))) for each in jobs]
    for each in waiting:
        each.start()
    for each in waiting:
        each.join()
    assert [code for code, _ in ended] == [0, 0], ended


def test_a_node_that_never_joins_is_named_within_the_deadline_and_nothing_stays(
    script: Callable[..., Path], tmp_path: Path
) -> None:
    path, job, cluster = script(), os.getpid(), SlurmStandIn(tmp_path / "slurm", 2)
    text = path.read_text().replace("max_restarts=3", "max_restarts=0")
    path.write_text(text.replace(':$port" 600 ', ':$port" 120 '))  # enough for the head, and less to wait for
    cluster.break_node("node-1")
    code, output = finish(cluster.submit(path, job))
    assert code == 4, output
    assert "joining the Ray cluster: waited 120 s for node-1, which did not come" in output
    assert processes_of(tmp_path, job) == []
    assert not (tmp_path / "runs" / f"sft-{job}").exists()

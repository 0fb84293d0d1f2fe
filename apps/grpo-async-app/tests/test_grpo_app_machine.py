"""A run on a machine that is at fault: a disk that fails or is slow, a clock that jumps, memory that is over.

The disk and the clock are the C library's: `faulty_machine.c` stands before it in each process of the run. The rest is
the kernel's.
"""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from role_faults import DRIVER, Job, last_value, role_pids, updates

from offbeat_run import read_metrics
from offbeat_testing import RunningCommand, wait_until_gone

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
NUM_EPOCHS = 8
EVENTS = {Path("/sys/fs/cgroup/memory"): "memory.oom_control", Path("/sys/fs/cgroup"): "memory.events"}
"""Where the kernel bounds the memory of a group of processes, and counts those that it has ended for it."""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # the job adds to it
    return Job.make(tmp_path / "job", NUM_EPOCHS, score_s=0.1)


class Faults:
    """Faults of the machine of this test's runs, by name, as `faulty_machine.c` has them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin(self, name: str, *words: object) -> None:
        """Let it be so from now on."""
        made = self._folder / f".{name}"
        made.write_text(" ".join(map(str, words)))
        made.rename(self._folder / name)

    def end(self, name: str) -> None:
        """Let it be so no longer."""
        (self._folder / name).unlink()


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Faults:
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler (Debian: apt install gcc)")
    source, library = Path(__file__).with_name("faulty_machine.c"), tmp_path / "faulty_machine.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    (tmp_path / "faults").mkdir()
    monkeypatch.setenv("OFFBEAT_FAULTS", str(tmp_path / "faults"))
    monkeypatch.setenv("LD_PRELOAD", str(library))
    return Faults(tmp_path / "faults")


@contextlib.contextmanager
def begun(job: Job, *words: str) -> Iterator[RunningCommand]:
    """A run that has done some updates."""
    with job.train(*words) as process:
        process.wait_until(lambda: len(updates(job.run)) >= 3, "3 updates", 600)
        yield process


def assert_ends_well(process: RunningCommand, job: Job) -> None:
    assert process.wait(600) == 0, process.output
    assert job.complaints() == [], process.output


@pytest.mark.parametrize("name", ["metrics.jsonl", "generations/train.jsonl", "checkpoints", ""])
def test_a_disk_that_fails_ends_the_run_with_one_line_and_it_is_resumed_on_a_sound_one(
    job: Job, faults: Faults, name: str
) -> None:
    with begun(job) as process:
        faults.begin("failing", job.run / name if name else f"{job.run}/")
        assert process.wait(300) == 2, process.output
        assert "the disk or its file system fails (Input/output error)" in process.output
        assert "Traceback" not in process.output
    faults.end("failing")
    with job.resume() as process:
        assert_ends_well(process, job)


RECORDS = (
    "metrics.jsonl",
    "generations/train.jsonl",
    "generations/validation.jsonl",
    "validation/held-out.jsonl",
    "timeline.json",
)
"""Files that a run cannot continue without."""
LOGS = ("logs/trainer-0.log", "logs/rollout-0.log", "logs/scorer-0.log", "logs/liveness.log")
"""Files that it can do without."""


@pytest.mark.parametrize("names", [RECORDS, LOGS], ids=["records", "logs"])
def test_a_disk_that_takes_no_more_of_a_file_is_told_in_one_line_or_done_without(
    job: Job, faults: Faults, tmp_path: Path, names: tuple[str, ...]
) -> None:
    with begun(job) as process:
        process.kill()
        process.wait()
    kept = shutil.copytree(job.run, tmp_path / "kept")
    for name in names:
        shutil.rmtree(job.run)
        shutil.copytree(kept, job.run)
        faults.begin("full", job.run / name)
        with job.resume() as process:
            code, output = process.wait(600), process.output
        faults.end("full")
        assert "Traceback" not in output, name
        if names is RECORDS:
            assert code == 2, (name, output)
            assert "no space left to write it" in output.splitlines()[-1], (name, output)
            with job.resume() as process:
                code, output = process.wait(600), process.output
        assert code == 0, (name, output)
        assert job.complaints() == [], name


def test_a_checkpoint_that_the_disk_does_not_give_back_is_passed_over(job: Job, faults: Faults) -> None:
    with begun(job) as process:
        process.wait_until(lambda: len(updates(job.run)) >= 6, "6 updates", 300)
        process.kill()
        process.wait()
    latest = sorted((job.run / "checkpoints").glob("step-*"))[-1]
    faults.begin("failing", f"{latest}/trainer/")
    with job.resume() as process:
        assert_ends_well(process, job)
        assert f"checkpoint {latest.name} is damaged" in process.output
        assert "Input/output error" in process.output
        assert "Traceback" not in process.output


def test_a_slow_disk_slows_a_run_and_ends_nobody(job: Job, faults: Faults) -> None:
    faults.begin("slow", 30, f"{job.run}/")
    with begun(job) as process:
        assert_ends_well(process, job)
        assert "liveness" not in process.output
    assert last_value(job.run, "engines/restarts") == last_value(job.run, "trainer/restarts") == 0.0


@pytest.mark.parametrize("jump_s", [7200, -7200], ids=["ahead", "back"])
def test_a_clock_that_jumps_hurries_and_stalls_nobody(job: Job, faults: Faults, jump_s: int) -> None:
    with begun(job) as process:
        faults.begin("clock", jump_s)
        assert_ends_well(process, job)
        assert "liveness" not in process.output
    assert last_value(job.run, "engines/restarts") == last_value(job.run, "trainer/restarts") == 0.0
    lasted = {
        name: value
        for line in read_metrics(job.run / "metrics.jsonl")
        for name, value in line.values.items()
        if name.endswith("_s") and isinstance(value, float)
    }
    assert lasted
    assert all(0.0 <= value < 1800 for value in lasted.values()), lasted


@contextlib.contextmanager
def no_more_memory(name: str) -> Iterator[Path]:
    """A group whose processes the kernel ends as soon as they want more than they had before."""
    parent = next((each for each in EVENTS if (each / "cgroup.procs").exists()), None)
    if parent is None or not os.access(parent / "cgroup.procs", os.W_OK):
        pytest.skip("needs root, and control groups that bound memory")
    group = parent / f"offbeat-{os.getpid()}-{name}"
    group.mkdir()
    bound = next((group / each for each in ("memory.limit_in_bytes", "memory.max") if (group / each).exists()), None)
    try:
        if bound is None:
            pytest.skip("control groups do not bound memory here")
        bound.write_text("4096")
        yield group
    finally:
        group.rmdir()


@pytest.mark.parametrize("role", ["rollout-1", "trainer-0", "scorer", DRIVER])
def test_a_role_that_the_kernel_ends_for_want_of_memory_is_started_again(job: Job, role: str) -> None:
    reward = job.folder / "slow_reward.py"
    reward.write_text(reward.read_text().replace("    return", "    bytearray(8 << 20)\n    return"))
    with no_more_memory(role) as group, begun(job) as process:
        pid = process.pid if role == DRIVER else role_pids(process)[role]
        (group / "cgroup.procs").write_text(str(pid))
        wait_until_gone([pid], deadline_s=60)
        if role == DRIVER:
            assert process.wait() == -signal.SIGKILL
        else:
            assert_ends_well(process, job)
            assert role == "scorer" or "killed by SIGKILL" in process.output
        assert "oom_kill 1" in (group / EVENTS[group.parent]).read_text().splitlines()
    if role == DRIVER:
        with job.resume() as process:
            assert_ends_well(process, job)


def test_a_ray_cluster_without_its_head_is_named_and_what_was_trained_is_saved(job: Job) -> None:
    with begun(job, "--cluster.launcher=ray", "--cluster.connect_timeout_s=600") as process:
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in process.descendants()}
        [head] = [pid for pid, command in commands.items() if "gcs_server" in command]
        os.kill(head, signal.SIGKILL)
        assert process.wait(120) == 3, process.output
        assert "the head of the Ray cluster failed: it has answered nothing at 127.0.0.1:" in process.output
        assert f"resume with: grpo-async-app resume {job.run}" in process.output
        assert role_pids(process) == {}
    assert (job.run / "checkpoints" / f"step-{updates(job.run)[-1]:06d}").is_dir(), "nothing trained is lost"
    with job.resume() as process:
        assert_ends_well(process, job)

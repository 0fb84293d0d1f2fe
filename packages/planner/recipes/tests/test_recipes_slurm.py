"""The batch script for Slurm: what it asks for, how it ends and starts again, and that values stay values."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from offbeat_core import ConfigError
from offbeat_recipes._batch import slurm
from offbeat_recipes._batch.job import BatchJob, write_job
from offbeat_run import CommandWords
from offbeat_testing import SlurmStandIn

PROGRAM = "a-program-of-this-test"
HOSTILE = "--data.path=$(touch hit) `touch hit` \"; touch hit #' \\ é"


def job_of(folder: Path, num_nodes: int = 1, **changes: object) -> BatchJob:
    values = {
        "program": PROGRAM,
        "name": "my-run",
        "config": folder / "my.toml",
        "settings": (),
        "num_nodes": num_nodes,
        "devices_per_node": 8,
        "kind": "GPU",
        "save_s": 240.0,
    }
    return BatchJob(**values | changes)  # type: ignore[arg-type]


def directives(job: BatchJob, **options: str) -> list[str]:
    text = slurm.slurm_script(job, CommandWords(options=options))
    return [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_program(folder: Path, text: str) -> dict[str, str]:
    """Write the program that jobs run; return the environment in which they find it."""
    (folder / "bin").mkdir()
    path = folder / "bin" / PROGRAM
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return {"PATH": f"{path.parent}{os.pathsep}{os.environ['PATH']}"}


def run_job(folder: Path, program: str, job: BatchJob | None = None, signal: str = "") -> tuple[int, str, list[str]]:
    """Run a job to its end; return its exit code, what it printed, and the words of each start of the program.

    Args:
        folder: of the job.
        program: lines of bash that the job runs.
        job: on one node when None.
        signal: that the job gets once the program has written the file `ready`.
    """
    environment = write_program(folder, f'echo "$@" >>{folder}/starts\n{program}')
    script = folder / "my.sbatch"
    script.write_text(slurm.slurm_script(job or job_of(folder), CommandWords()))
    cluster = SlurmStandIn(folder / "slurm", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", environment["PATH"])
        process = cluster.submit(script)
    if signal:
        end_s = time.monotonic() + 60
        while not (folder / "ready").exists():
            assert time.monotonic() < end_s, "the program has not begun"
            time.sleep(0.05)
        cluster.send_signal(signal)
    output, _ = process.communicate(timeout=60)
    starts = (folder / "starts").read_text().splitlines() if (folder / "starts").exists() else []
    return process.returncode, output, starts


# The program of a run that has begun: it has a configuration, with which it can be resumed.
BEGIN = "if [[ $1 == train ]]; then mkdir -p runs/my-run-7; touch runs/my-run-7/config.toml; fi"


def test_a_job_asks_for_the_nodes_and_devices_of_the_plan_and_a_signal_before_its_end(folder: Path) -> None:
    held = directives(job_of(folder, 2), partition="gpu", account="us", time="1-00:00:00")
    assert {"nodes=2", "gpus-per-node=8", "requeue", "signal=B:USR1@300", "time=1-00:00:00"} <= {*held}
    assert {"partition=gpu", "account=us", "ntasks-per-node=1", "exclusive", "mem=0"} <= {*held}
    assert "gres=tpu:8" in directives(job_of(folder, kind="TPU"))
    assert not [line for line in directives(job_of(folder, devices_per_node=0)) if "gpu" in line]


def test_set_replaces_adds_and_removes_what_is_asked_for(folder: Path) -> None:
    held = directives(job_of(folder), set="exclusive= mem=200G qos=high no-kill")
    assert {"mem=200G", "qos=high", "no-kill"} <= {*held}
    assert not [line for line in held if line.startswith("exclusive") or line == "mem=0"]


def test_a_setting_of_several_lines_is_refused_and_no_file_is_written(folder: Path) -> None:
    job, words = job_of(folder, settings=("--run.note=a\nb",)), CommandWords(options={"out": str(folder / "my.sbatch")})
    with pytest.raises(ConfigError, match=r"control characters: got .*put the setting into the file"):
        write_job(words, job, "text", ".sbatch", "sbatch {}")
    assert not (folder / "my.sbatch").exists()


@pytest.mark.parametrize(
    "options",
    [{"time": "1 day"}, {"partition": "a b"}, {"account": "a\n#SBATCH --x"}, {"set": "a=b\n"}, {"set": "'a=\"b'"}],
    ids=str,
)
def test_what_slurm_would_read_otherwise_is_refused(folder: Path, options: dict[str, str]) -> None:
    if options == {"set": "a=b\n"}:
        assert "a=b" in directives(job_of(folder), **options), "a line's end separates words"
        return
    with pytest.raises(ConfigError, match="takes"):
        directives(job_of(folder), **options)


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_bash_reads_the_script_of_any_job(folder: Path, num_nodes: int) -> None:
    text = slurm.slurm_script(
        job_of(folder, num_nodes, settings=(HOSTILE,)), CommandWords(options={"container": "a b"})
    )
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_values_reach_the_program_as_they_are(folder: Path) -> None:
    job = job_of(folder, settings=(HOSTILE,), config=folder / "my $(touch hit) 'recipe'.toml")
    code, output, _ = run_job(folder, "printf '%s\\n' \"$@\" >words", job)
    assert code == 0, output
    words = (folder / "words").read_text().splitlines()
    assert words[:2] == ["train", str(job.config)]
    assert HOSTILE in words
    assert words[-1] == "--cluster.launcher=local"
    assert not (folder / "hit").exists()


@pytest.mark.parametrize("code", [3, 4])
def test_a_run_that_fails_or_stalls_is_resumed_and_given_up_after_three_restarts(folder: Path, code: int) -> None:
    got, output, starts = run_job(folder, f"{BEGIN}\nexit {code}")
    assert got == code, output
    assert [words.split()[0] for words in starts] == ["train", "resume", "resume", "resume"]
    assert starts[1] == f"resume {folder}/runs/my-run-7 --cluster.launcher=local"


@pytest.mark.parametrize("code", [0, 1, 2])
def test_a_run_that_has_ended_or_that_would_fail_again_is_not_started_again(folder: Path, code: int) -> None:
    got, output, starts = run_job(folder, f"{BEGIN}\nexit {code}")
    assert got == code, output
    assert len(starts) == 1


def test_a_job_whose_time_is_nearly_over_saves_and_is_queued_again_and_resumes(folder: Path) -> None:
    program = f"""{BEGIN}
if [[ $1 == resume ]]; then exit 0; fi
trap 'sleep 0.5; touch saved; exit 130' USR1
touch ready
while :; do sleep 0.1; done"""
    code, output, starts = run_job(folder, program, signal="USR1")
    assert code == 0, output
    assert (folder / "saved").exists()
    assert [words.split()[0] for words in starts] == ["train", "resume"]
    assert "the time of this job is over" in output


def test_a_job_that_is_cancelled_saves_and_is_not_queued_again(folder: Path) -> None:
    program = f"{BEGIN}\ntrap 'touch saved; exit 130' TERM\ntouch ready\nwhile :; do sleep 0.1; done"
    code, output, starts = run_job(folder, program, signal="TERM")
    assert code == 130, output
    assert (folder / "saved").exists()
    assert len(starts) == 1
    assert f"{PROGRAM} resume {folder}/runs/my-run-7" in output


def test_a_run_that_ended_before_it_had_begun_is_begun_anew(folder: Path) -> None:
    program = "mkdir -p runs/my-run-7\nif [[ -e once ]]; then exit 0; fi\ntouch once runs/my-run-7/left\nexit 3"
    code, output, starts = run_job(folder, program)
    assert code == 0, output
    assert [words.split()[0] for words in starts] == ["train", "train"]
    assert [path.name for path in folder.glob("runs/my-run-7.ended-*/*")] == ["left"]


def test_jobs_that_share_a_node_have_ports_of_their_own(folder: Path) -> None:
    text = slurm.slurm_script(job_of(folder, 2), CommandWords())
    (line,) = (line for line in text.splitlines() if line.startswith("port="))
    loop = f'for SLURM_JOB_ID in {{4000..4999}} 12191 67108863; do {line}; echo "$port"; done'
    ports = [int(port) for port in subprocess.check_output(["bash", "-c", loop], text=True).split()]
    pairs = [port + offset for port in ports[:1000] for offset in (0, 1)]  # Ray's client server has the next one
    assert len(set(pairs)) == len(pairs)
    assert all(1024 < port < 32767 for port in ports), "those above are given out by the system"

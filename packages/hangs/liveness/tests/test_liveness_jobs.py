"""Jobs beside each other, and what is left of one: a shared dump folder, a launcher that is gone, old dumps."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from liveness_launch import Run, finish, rank_main, step

from offbeat_liveness import _dumps
from offbeat_liveness._cli import main
from offbeat_liveness._network.job_store import job_of
from offbeat_liveness._network.peers import Peers
from offbeat_liveness._network.side_channel import Address, Listener, is_refused
from offbeat_liveness._network.survey import SilenceHistory
from offbeat_liveness._process.proc import HOST, birth
from offbeat_liveness._process.snapshot import ProcessSnapshot


def test_jobs_are_distinguished_by_what_has_started_them() -> None:
    assert job_of({}) == job_of({"MASTER_PORT": "29500"}) == ""  # a trainer's world and its engines' are one job
    first, second = ({"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": port} for port in ("29500", "29501"))
    assert job_of(first) != job_of(second)
    assert job_of({"TORCHELASTIC_RUN_ID": "a"}) != job_of({"TORCHELASTIC_RUN_ID": "b"})
    both = {"SLURM_JOB_ID": "7"}
    assert job_of(both | {"TORCHELASTIC_RUN_ID": "a"}) == job_of(both | {"TORCHELASTIC_RUN_ID": "b"})
    assert job_of(first | {"OFFBEAT_LIVENESS_JOB": "x"}) == job_of(second | {"OFFBEAT_LIVENESS_JOB": "x"})


def works_on(rank: int) -> None:
    for _ in range(7):
        time.sleep(1)
        step()


def calls_something_else(rank: int) -> None:
    time.sleep(1)
    if rank == 0:
        dist.barrier()
    else:
        step()


def as_job(body: Any, rank: int, *args: Any) -> None:
    os.environ.update(TORCHELASTIC_RUN_ID=body.__name__, LOCAL_RANK=str(rank))
    rank_main(body, rank, *args)


def test_a_job_that_hangs_is_reported_in_its_own_log_and_ends_no_other_with_the_same_folder(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    for name in ("healthy", "hung"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "dumps").symlink_to(tmp_path / "shared")
    healthy = Run(works_on, 2, tmp_path / "healthy", main=as_job, policy="abort")
    hung = Run(calls_something_else, 2, tmp_path / "hung", main=as_job, policy="abort")
    lives, ends = finish([healthy, hung])
    assert lives.exit_codes == [0, 0], lives.outputs
    assert ends.exit_codes == [4, 4], ends.outputs
    assert "different-op: collective 3 of the default group" in ends.outputs[0]
    assert "different-op" not in "".join(lives.outputs)
    warnings = [text for each in (lives, ends) for text in each.outputs if "is used by another job too (" in text]
    assert warnings
    assert all(text.count("is used by another job too") == 1 for text in warnings)
    assert all(re.search(r"too \((rank \d, )?pid \d+, TORCHELASTIC_RUN_ID=", text) for text in warnings)
    assert "is used by another job" not in lives.outputs[1] + ends.outputs[1]


def test_another_job_is_warned_of_once_however_many_ranks_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFBEAT_LIVENESS_JOB", "mine")
    peers = Peers(tmp_path, "trainer-0", lambda message: {})
    said = []
    try:
        for name in ("rank 0", "rank 1"):
            pid = os.getppid() if said else 1  # two processes that live
            other = Address(host="127.0.0.1", port=1, machine=HOST, pid=pid, born=birth(pid), name=name, job="theirs")
            _dumps.write(tmp_path, _dumps.address_name(HOST, pid), dataclasses.asdict(other))
            peers.keep_joined(waits_long=False)
            said.append(peers.intruders)
    finally:
        peers.close()
    assert "is used by another job too (rank 0, pid 1, theirs; this one is OFFBEAT_LIVENESS_JOB=mine)" in said[0]
    assert said[1] == said[0]


def says_its_error_and_leaves(rank: int, call: Callable[[], None], rank_1_call: Callable[[], None]) -> None:
    """Launchers that fork by hand end so: they print the error, and leave without any function of the exit."""
    if rank == 0:
        write = _dumps.write
        _dumps.write = lambda *data: [time.sleep(0.2), write(*data)]
    try:
        call() if rank == 0 else rank_1_call()
    except RuntimeError:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def loses_its_peer(rank: int) -> None:
    says_its_error_and_leaves(rank, step, lambda: os.kill(os.getpid(), signal.SIGKILL))


def is_set_free_by_the_end(rank: int) -> None:
    says_its_error_and_leaves(rank, step, dist.barrier)


def test_a_forked_rank_leaves_its_verdict_and_the_exit_code_of_the_others_on_a_slow_disk(tmp_path: Path) -> None:
    lost, freed = finish(
        [Run(body, 2, tmp_path / body.__name__, policy="abort") for body in (loses_its_peer, is_set_free_by_the_end)]
    )
    assert [each.kind for each in lost.verdicts] == ["dead-peer"], lost.outputs
    assert freed.only.kind == "different-op"
    assert freed.exit_codes == [4, 4], freed.outputs


ORPHAN = """
import os, subprocess, sys, time
rank = '''
import os, time
import offbeat_liveness as liveness
monitor = liveness.watch(stall_after_s=1)
print("started", flush=True)
end_s = time.monotonic() + 30
while "is gone" not in "".join(monitor.head().notes) and time.monotonic() < end_s:
    time.sleep(0.1)
time.sleep(1)
print(monitor.head().notes, flush=True)
'''
child = subprocess.Popen([sys.executable, "-c", rank], env=os.environ | {"RANK": "0", "TORCHELASTIC_RUN_ID": "x"})
time.sleep(60)
"""


def test_a_rank_says_that_its_launcher_is_gone(tmp_path: Path) -> None:
    """Without it ranks live on until the timeout of their group, and no agent restarts them."""
    log = tmp_path / "log"
    with log.open("w") as file:
        agent = subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=file, stderr=file)
    wait_for(lambda: "started" in log.read_text(), log)
    agent.send_signal(signal.SIGKILL)
    agent.wait()
    wait_for(lambda: "('" in log.read_text(), log)
    said = f"the launcher of rank 0 (torchrun, pid {agent.pid}) is gone"
    assert log.read_text().count(f"offbeat liveness: {said}") == 1
    assert f"('{said}" in log.read_text()


def wait_for(happens: Any, log: Path) -> None:
    end_s = time.monotonic() + 60
    while not happens():
        assert time.monotonic() < end_s, log.read_text()
        time.sleep(0.05)


LEFT_BEHIND = """
import sys, time
import offbeat_liveness as liveness
monitor = liveness.watch(stall_after_s=0.2, directory=sys.argv[1], name="trainer-0")
with liveness.waiting("samples.get"):
    time.sleep(60)
"""


def test_show_says_which_processes_of_a_run_are_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = subprocess.Popen([sys.executable, "-c", LEFT_BEHIND, str(tmp_path)])
    wait_for(lambda: list(tmp_path.glob("head-trainer-0*")), Path(__file__))
    assert main(["show", str(tmp_path)]) == 0
    assert f"(pid {process.pid} on {HOST}): running, in samples.get" in capsys.readouterr().out
    process.kill()
    process.wait()
    assert main(["show", str(tmp_path)]) == 0
    assert f"(pid {process.pid} on {HOST}): running then, gone now, in samples.get" in capsys.readouterr().out


@pytest.mark.parametrize(("later_ticks", "state"), [(0, "running,"), (1, "running then, gone now,")])
def test_a_process_is_distinguished_from_a_later_one_with_its_pid_though_the_clock_was_set(
    later_ticks: int, state: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pid, a_month_ago_s = os.getpid(), time.time() - 30 * 86400
    born = birth(pid) - later_ticks
    _dumps.write_head(
        tmp_path,
        ProcessSnapshot(key=f"{HOST}:{pid}", name="trainer-0", pid=pid, born=born, host=HOST, time_s=a_month_ago_s),
    )
    assert main(["show", str(tmp_path)]) == 0
    assert f"(pid {pid} on {HOST}): {state}" in capsys.readouterr().out


def test_a_process_on_its_way_out_is_not_said_to_hold_the_gil() -> None:
    """Its monitor has ended, and listens no more; for one whose GIL is held the kernel still takes connections."""
    listener = Listener("127.0.0.1", lambda: "secret", lambda message: {})
    address = Address(
        host="127.0.0.1", port=listener.port, machine=HOST, pid=os.getpid(), born=birth(os.getpid()), name="rank 2"
    )
    assert not is_refused(address)
    listener.close()
    end_s = time.monotonic() + 10
    while not is_refused(address):
        assert time.monotonic() < end_s
        time.sleep(0.02)
    silent = SilenceHistory()
    assert silent.stand_in(address, 1.0, is_leaving=True).notes == (
        "rank 2 does not answer any more, and runs: it is on its way out",
    )
    assert "on its way out" not in silent.stand_in(address, 1.0, is_leaving=False).notes[0]

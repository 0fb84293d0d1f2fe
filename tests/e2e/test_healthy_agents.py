"""Healthy programs under torchrun and the wrapper, as their users start them: real interpreters that begin and end."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fault_runs import HEADLINE, POINTER
from healthy_catalogue import MAX_TOLD, PROGRAMS

PAUSE_S = 6.0
STALL_AFTER_S = 2.0
# Each has ended wrongly in about one run of 25.
NUM_EXITS = int(os.environ.get("OFFBEAT_HEALTHY_EXITS", "4"))
PATIENCE_S = 90.0
pytestmark = pytest.mark.timeout(300 + 20 * NUM_EXITS)


class Agent:
    """A torchrun of one rank, with what it prints in a file."""

    def __init__(self, folder: Path, name: str, program: Path, *options: str) -> None:
        self.log = folder / f"{name}.log"
        settings = {"OFFBEAT_STALL_AFTER_S": str(STALL_AFTER_S), "OMP_NUM_THREADS": "1", "RES_OPTIONS": "attempts:0"}
        settings |= {"FOLDER": str(folder), "PAUSE_S": str(PAUSE_S), "GLOO_SOCKET_IFNAME": "lo"}
        # Without it an agent that is new waits for an address that torch 2.13 has set for the first round alone.
        settings |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        command = [sys.executable, "-m", "torch.distributed.run", *options]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "-m", "offbeat_liveness", "run", str(program)],
                env=os.environ | settings,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def ended_at_last(agents: list[Agent]) -> Iterator[None]:
    try:
        yield
    finally:
        for agent in agents:
            agent.end()


def wait_until(happens: Callable[[], bool], what: str, agents: list[Agent]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not happens():
        outputs = "\n".join(f"--- {agent.log.name}\n{agent.output}" for agent in agents)
        assert time.monotonic() < until_s, f"{what} has not come\n{outputs}"
        time.sleep(0.1)


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def told(text: str) -> list[str]:
    return [line for line in text.splitlines() if HEADLINE in line and POINTER not in line]


def test_one_of_two_agents_is_replaced(tmp_path):
    """The agents count their restarts apart: after this one of them stands at one, and the other at none."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=zoo", "--local-addr=127.0.0.1"]
    patience = "--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=3"
    options = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--monitor-interval=0.2", patience, *meeting]
    agents: list[Agent] = []

    def start(name: str) -> Agent:
        agents.append(Agent(tmp_path, name, Path(__file__).with_name("elastic_run.py"), *options))
        return agents[-1]

    with ended_at_last(agents):
        kept = start("kept")
        wait_until(lambda: listens(port), "the agents' store", agents)
        lost = start("lost")
        wait_until(lambda: len(list(tmp_path.glob("first-*"))) == 2, "the first world", agents)
        (tmp_path / "second").touch()
        lost.process.send_signal(signal.SIGTERM)
        lost.process.wait(PATIENCE_S)
        new = start("new")
        wait_until(lambda: None not in (kept.process.poll(), new.process.poll()), "the end", agents)
        outputs = kept.output + new.output
        restarts = {int((tmp_path / f"restarts-{rank}").read_text()) for rank in range(2)}
        assert len(restarts) == 2, f"the agents have counted alike: {restarts}"
        assert (kept.process.returncode, new.process.returncode) == (0, 0), outputs
        assert all(f"rank {rank}: done" in outputs for rank in range(2)), outputs
        of_second = [*told(kept.output.partition("begins anew")[2]), *told(new.output)]
        assert len(of_second) <= MAX_TOLD, outputs
        assert all("suspicion: " in line or "moves again" in line for line in of_second), outputs


@pytest.mark.parametrize("number", range(NUM_EXITS))
def test_a_program_whose_main_thread_holds_the_gil_ends_well(tmp_path, number):
    options = ["--standalone", "--nproc-per-node=2", "--local-addr=127.0.0.1"]
    agent = Agent(tmp_path, "exits", PROGRAMS / "exits_holding_the_gil.py", *options)
    with ended_at_last([agent]):
        wait_until(lambda: agent.process.poll() is not None, "the end", [agent])
        assert agent.process.returncode == 0, agent.output
        assert all(f"rank {rank}: done" in agent.output for rank in range(2)), agent.output
        assert told(agent.output) == [], agent.output

"""Healthy programs under torchrun and the wrapper, as their users start them: real interpreters that begin and end."""

import os
import signal
import socket
from pathlib import Path

import pytest
from liveness_programs import MAX_MESSAGES, PROGRAMS
from torchrun import ALONE, Torchrun, ended_at_last, headlines, wait_until

# Each ended wrongly in about one run of 25.
NUM_EXITS = int(os.environ.get("OFFBEAT_HEALTHY_EXITS", "4"))
LIMIT_S = 90.0
ENVIRONMENT = {"OFFBEAT_STALL_AFTER_S": "2", "PAUSE_S": "6"}
# Without it an agent that is new waits for an address that torch 2.13 sets in the first round alone. With it rank 0
# listens at a port that another process may have taken since the agent has found it free.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
pytestmark = [pytest.mark.timeout(400), pytest.mark.nightly]


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_one_of_two_agents_is_replaced(tmp_path):
    """The agents count their restarts separately: after this, one of them has counted one, and the other none."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=zoo", "--local-addr=127.0.0.1"]
    patience = "--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=3"
    options = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--monitor-interval=0.2", patience, *meeting]
    program = Path(__file__).with_name("elastic_run.py")
    environment = ENVIRONMENT | OWN_STORE | {"FOLDER": str(tmp_path)}
    agents: list[Torchrun] = []

    def start(name: str) -> Torchrun:
        agents.append(Torchrun(tmp_path, name, program, *options, environment=environment))
        return agents[-1]

    with ended_at_last(agents):
        kept = start("kept")
        wait_until(lambda: listens(port), "the agents' store", agents, LIMIT_S)
        lost = start("lost")
        wait_until(lambda: len(list(tmp_path.glob("first-*"))) == 2, "the first world", agents, LIMIT_S)
        (tmp_path / "second").touch()
        lost.process.send_signal(signal.SIGTERM)
        lost.process.wait(LIMIT_S)
        new = start("new")
        wait_until(lambda: None not in (kept.process.poll(), new.process.poll()), "the end", agents, LIMIT_S)
        outputs = kept.output + new.output
        assert (kept.process.returncode, new.process.returncode) == (0, 0), outputs
        assert all(f"rank {rank}: done" in outputs for rank in range(2)), outputs
        restarts = {int((tmp_path / f"restarts-{rank}").read_text()) for rank in range(2)}
        assert len(restarts) == 2, f"the agents have counted alike: {restarts}"
        lines = [*headlines(kept.output.partition("begins anew")[2]), *headlines(new.output)]
        assert len(lines) <= MAX_MESSAGES, outputs
        assert all("suspicion: " in line or "moves again" in line for line in lines), outputs


@pytest.mark.parametrize("number", range(NUM_EXITS))
def test_a_program_whose_main_thread_holds_the_gil_ends_well(tmp_path, number):
    options = [*ALONE, "--nproc-per-node=2"]
    agent = Torchrun(tmp_path, "exits", PROGRAMS / "exits_holding_the_gil.py", *options, environment=ENVIRONMENT)
    with ended_at_last([agent]):
        wait_until(lambda: agent.process.poll() is not None, "the end", [agent], LIMIT_S)
        assert agent.process.returncode == 0, agent.output
        assert all(f"rank {rank}: done" in agent.output for rank in range(2)), agent.output
        assert headlines(agent.output) == [], agent.output

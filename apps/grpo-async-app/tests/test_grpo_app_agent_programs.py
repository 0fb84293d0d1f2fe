"""The agent role runs programs as they are, and leaves none behind, however it ends."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_async_app._config.agent import AgentConfig
from grpo_async_app._roles import agent_forks
from grpo_async_app._roles.agent import AgentExit, AgentRole
from offbeat_core import ConfigError
from offbeat_testing import wait_until_gone

ECHO = """
import json, os, sys
row = json.load(open(sys.argv[1]) if sys.argv[1:] else sys.stdin)
print(row["question"], os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], os.environ.get("COLOUR"))
"""
LASTING = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""
FAILING = "import sys\nprint('no bread today', file=sys.stderr)\nsys.exit(3)\n"

every_start = pytest.mark.parametrize("preload", [[], ["json"]], ids=["a process each", "forks"])


@pytest.fixture
def program(tmp_path: Path) -> str:
    return str(tmp_path / "program.py")


def role(*command: str, preload: list[str], **settings: object) -> AgentRole:
    python = "python" if preload else sys.executable
    return AgentRole(config=AgentConfig(command=[python, *command], preload=preload, **settings))  # type: ignore[arg-type]


async def run(agent: AgentRole, times: int = 1) -> list[AgentExit]:
    await agent.start()
    try:
        return await asyncio.gather(
            *(agent.run({"question": f"n{at}"}, "http://here/v1", f"key{at}") for at in range(times))
        )
    finally:
        await agent.close()


@every_start
def test_each_program_gets_its_row_and_its_session(program: str, preload: list[str]) -> None:
    Path(program).write_text(ECHO)
    found = asyncio.run(run(role(program, preload=preload, variables={"COLOUR": "red"}), times=5))
    assert [each.printed.split() for each in found] == [
        [f"n{at}", "http://here/v1", f"key{at}", "red"] for at in range(5)
    ]
    assert {each.how for each in found} == {"well"}


@every_start
def test_a_program_may_read_a_file(program: str, preload: list[str]) -> None:
    Path(program).write_text(ECHO)
    [found] = asyncio.run(run(role(program, "{prompt_file}", preload=preload, prompt_in="file")))
    assert found.printed.startswith("n0 ")


@every_start
def test_a_program_that_fails_says_why(program: str, preload: list[str]) -> None:
    Path(program).write_text(FAILING)
    [found] = asyncio.run(run(role(program, preload=preload)))
    assert (found.how, found.detail) == ("failed", "exit code 3: no bread today")


SHOWS_ENVIRONMENT = """
import json, os
from pathlib import Path
print(json.dumps([dict(os.environ), Path("/proc/self/environ").read_text()]))
"""


@every_start
def test_a_program_gets_what_is_listed_and_no_secret_of_the_run(
    program: str, preload: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(program).write_text(SHOWS_ENVIRONMENT)
    secrets = ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OFFBEAT_LIVENESS_SECRET", "RAY_AUTH_TOKEN_PATH"]
    for name in [*secrets, "DATABASE", "SEARCH_KEY"]:
        monkeypatch.setenv(name, f"value of {name}")
    monkeypatch.setenv("LC_TIME", "C")
    [found] = asyncio.run(run(role(program, preload=preload, forward_env=["SEARCH_KEY"], variables={"COLOUR": "red"})))
    seen, started_with = json.loads(found.printed)
    assert seen["SEARCH_KEY"] == "value of SEARCH_KEY"
    assert (seen["COLOUR"], seen["LC_TIME"], seen["OPENAI_API_KEY"]) == ("red", "C", "key0")
    assert seen["PATH"] == os.environ["PATH"]
    assert not {*secrets, "DATABASE"} & seen.keys()
    assert not [name for name in secrets if f"value of {name}" in started_with]


@every_start
def test_of_what_a_program_prints_the_end_is_kept_and_no_file_grows(program: str, preload: list[str]) -> None:
    flood = "for _ in range(200):\n    print('x' * 100_000)\n"
    kinds = "import os, stat\nprint([stat.S_ISFIFO(os.fstat(fd).st_mode) for fd in (1, 2)], flush=True)\n"
    Path(program).write_text(flood + kinds)
    [found] = asyncio.run(run(role(program, preload=preload)))
    assert found.printed.endswith("x\n[True, True]\n")
    assert len(found.printed) == 64 * 1024


DESERTED = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True).pid, flush=True)
"""


@every_start
def test_what_a_program_leaves_behind_with_its_output_keeps_nobody_waiting(program: str, preload: list[str]) -> None:
    Path(program).write_text(DESERTED)
    begun_s = time.monotonic()
    [found] = asyncio.run(run(role(program, preload=preload, deadline_s=100.0)))
    os.kill(int(found.printed), signal.SIGKILL)
    assert found.how == "well"
    assert time.monotonic() - begun_s < 60


READS_KEY = """
import os, subprocess, sys
fd = int(os.environ["OFFBEAT_REWARD_KEY_FD"])
print(os.read(fd, 100).decode(), flush=True)
subprocess.run(["sh", "-c", f"env | grep -c reward-0; cat /dev/fd/{fd}"], close_fds=False)
"""


@every_start
def test_the_key_of_its_reward_is_read_once_by_the_program_and_found_by_nothing_it_starts(
    program: str, preload: list[str]
) -> None:
    async def scenario() -> list[AgentExit]:
        agent = role(program, preload=preload)
        await agent.start()
        try:
            return [await agent.run({}, "", "session-0", "reward-0"), await agent.run({}, "", "session-0")]
        finally:
            await agent.close()

    Path(program).write_text(READS_KEY)
    found, without = asyncio.run(scenario())
    assert found.printed == "reward-0\n0\n"
    assert "KeyError: 'OFFBEAT_REWARD_KEY_FD'" in without.detail


def test_python_is_that_of_the_run_whatever_the_path_has(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\necho another\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    Path(program).write_text("import sys\nprint(sys.executable)\n")
    [found] = asyncio.run(run(AgentRole(config=AgentConfig(command=["python", program]))))
    assert found.printed.strip() == sys.executable


def test_a_program_without_the_client_says_how_to_install_it_in_one_line(program: str, capfd) -> None:  # type: ignore[no-untyped-def]
    Path(program).write_text("raise ModuleNotFoundError(\"No module named 'openai'\")\n")
    [found] = asyncio.run(run(role(program, preload=[])))
    assert found.detail.startswith(
        "exit code 1: ModuleNotFoundError: No module named 'openai'; pip install \"grpo-async"
    )
    assert "\n" not in found.detail
    assert "Traceback" in capfd.readouterr().out, "the log of the role has all of it"


def test_a_program_that_is_not_there_is_a_failure_in_words() -> None:
    agent = AgentRole(config=AgentConfig(command=["/nowhere/program"]))
    [found] = asyncio.run(run(agent))
    assert found.how == "failed"
    assert "/nowhere/program cannot be started" in found.detail


def pids(file: Path) -> list[int]:
    end_s = time.monotonic() + 60
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < end_s
        time.sleep(0.01)
    return [int(pid) for pid in file.read_text().split()]


@every_start
def test_at_its_deadline_a_program_is_killed_with_its_children(
    program: str, tmp_path: Path, preload: list[str]
) -> None:
    Path(program).write_text(LASTING)
    agent = role(program, str(tmp_path / "pids"), preload=preload, deadline_s=3.0)
    [found] = asyncio.run(run(agent))
    assert found.how == "timed_out"
    wait_until_gone(pids(tmp_path / "pids"), 10)


LEAVING = """
import os, pathlib, sys, time
os.{leave}
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(600)
"""


@every_start
@pytest.mark.parametrize("leave", ["setsid()", "setpgid(0, 0)", "kill(os.getpgid(0), 9)"])
def test_a_program_that_leaves_its_group_has_no_more_time_than_others(
    program: str, tmp_path: Path, preload: list[str], leave: str
) -> None:
    Path(program).write_text(LEAVING.format(leave=leave))
    file = tmp_path / "pids"
    start_s = time.monotonic()
    [found] = asyncio.run(run(role(program, str(file), preload=preload, deadline_s=3.0)))
    assert (found.how, time.monotonic() - start_s < 60) == ("timed_out", True)
    wait_until_gone(pids(file), 10)


@every_start
def test_a_cancelled_episode_is_killed(program: str, tmp_path: Path, preload: list[str]) -> None:
    Path(program).write_text(LASTING)

    async def scenario() -> None:
        agent = role(program, str(tmp_path / "pids"), preload=preload)
        await agent.start()
        running = asyncio.ensure_future(agent.run({}, "", ""))
        started = await asyncio.to_thread(pids, tmp_path / "pids")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await asyncio.to_thread(wait_until_gone, started, 10)
        await agent.close()

    asyncio.run(scenario())


@pytest.fixture
def killed_role(program: str, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs a program for ever."""
    Path(program).write_text(LASTING)
    words = [program, str(tmp_path / "pids")]
    preload = os.environ.get("TEST_PRELOAD", "").split()
    text = (
        "import asyncio\n"
        "from grpo_async_app._config.agent import AgentConfig\n"
        "from grpo_async_app._roles.agent import AgentRole\n"
        "async def main():\n"
        f"    agent = AgentRole(config=AgentConfig(command=['python', *{words!r}], preload={preload!r}))\n"
        "    await agent.start()\n"
        "    await agent.run({}, '', '')\n"
        "asyncio.run(main())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", text], start_new_session=True)
    yield process
    process.kill()
    process.wait()


@every_start
def test_nothing_is_left_of_a_role_that_was_killed(
    preload: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("TEST_PRELOAD", " ".join(preload))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    process = request.getfixturevalue("killed_role")
    started = pids(tmp_path / "pids")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_until_gone(started, 10)


def test_a_process_that_forks_no_more_is_replaced(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_forks, "_TAKEN_S", 0.2)
    begun = []
    start = agent_forks.ForkServer.start
    monkeypatch.setattr(agent_forks.ForkServer, "start", lambda server: (begun.append(server), start(server))[1])
    Path(program).write_text("")
    agent = role(program, preload=["json"], variables={"LONG": "x" * 100_000})

    async def scenario() -> list[AgentExit]:
        await agent.start()
        assert agent._forks is not None
        assert agent._forks._process is not None
        os.kill(agent._forks._process.pid, signal.SIGSTOP)
        asked = [agent.run({}, "", "") for _ in range(8)]
        try:
            return await asyncio.gather(*asked)
        finally:
            await agent.close()

    found = asyncio.run(scenario())
    failed = [each.detail for each in found if each.how == "failed"]
    assert sum("has taken none for 0.2 s" in detail for detail in failed) == 1
    assert all("has taken none" in detail or "signal 9" in detail for detail in failed), "it ended with what it had"
    assert {each.how for each in found} == {"failed", "well"}, "the deadline is not waited for"
    assert len(begun) == 2


def test_modules_that_cannot_be_imported_end_the_start() -> None:
    agent = AgentRole(config=AgentConfig(command=["python", "x.py"], preload=["no_such_module"]))
    with pytest.raises(ConfigError, match="importing no_such_module failed"):
        asyncio.run(agent.start())

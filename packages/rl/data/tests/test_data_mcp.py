"""An MCP server, a real one in a process of its own, and an environment of its tools."""

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest

from offbeat_core import ConfigError, DataError
from offbeat_data import EnvironmentConfig, EpisodeHost, Prompt, build_environment, environment_tools

pytest.importorskip("mcp", reason="the extra mcp is not installed")

SERVER = '''
import os

from mcp.server.mcpserver import MCPServer

server = MCPServer("shop")
stock = {"bread": 3}


@server.tool()
def sell(what: str, number: int) -> str:
    """Sell some of what there is."""
    stock[what] -= number
    return f"{stock[what]} {what} left"


@server.tool()
def fail(why: str) -> str:
    """Raise."""
    raise ValueError(why)


@server.tool()
def colour() -> str:
    """The colour."""
    return os.environ.get("COLOUR", "none")


server.run()
'''
PROMPT = Prompt(index=0, ids=np.array([1], np.int32), text="?", answer="7")


@pytest.fixture
def config(tmp_path: Path) -> EnvironmentConfig:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    return EnvironmentConfig(
        name="mcp", options={"command": [sys.executable, str(script)], "variables": {"COLOUR": "red"}}
    )


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


SELL = call("sell", '{"what": "bread", "number": 1}')


def contents(answer):
    return [message["content"] for message in answer]


def test_the_tools_are_described_as_chat_templates_know_them(config):
    described = {tool["function"]["name"]: tool["function"] for tool in environment_tools(config)}
    assert set(described) == {"sell", "fail", "colour"}
    assert described["sell"]["description"] == "Sell some of what there is."
    assert set(described["sell"]["parameters"]["properties"]) == {"what", "number"}


def test_each_episode_has_a_server_of_its_own_and_what_goes_wrong_is_told_to_the_model(config):
    async def play():
        host = EpisodeHost(build_environment(config), 30.0)
        await asyncio.gather(host.reset(0, PROMPT), host.reset(1, PROMPT))
        first = [await host.step(0, SELL) for _ in range(2)]
        other = await host.step(1, SELL + call("colour", "{}"))
        wrong = await host.step(1, call("fail", '{"why": "no bread today"}') + call("steal", "{}"))
        assert await host.step(0, "two left") is None
        for episode in (0, 1):
            await host.close(episode)
        return first, other, wrong

    first, other, wrong = asyncio.run(play())
    assert [contents(each) for each in first] == [["2 bread left"], ["1 bread left"]]
    assert contents(other) == ["2 bread left", "red"]
    assert "no bread today" in contents(wrong)[0]
    assert contents(wrong)[1] == "error: there is no tool steal; there are sell, fail, colour"


def test_a_shared_server_serves_all_episodes(config):
    shared = EnvironmentConfig(name="mcp", options={**config.options, "is_shared": True})

    async def play():
        host = EpisodeHost(build_environment(shared), 30.0)
        await asyncio.gather(host.reset(0, PROMPT), host.reset(1, PROMPT))
        said = [contents(await host.step(episode, SELL)) for episode in (0, 1)]
        await host.close(0)
        await host.close(1)
        return said

    assert asyncio.run(play()) == [["2 bread left"], ["1 bread left"]]


def test_what_is_no_server_is_refused_in_words(tmp_path):
    with pytest.raises(ConfigError, match="must be a list"):
        build_environment(EnvironmentConfig(name="mcp", options={"command": "python server.py"}))
    with pytest.raises(DataError, match="is gone"):
        environment_tools(EnvironmentConfig(name="mcp", options={"command": [str(tmp_path / "nowhere")]}))

"""OpenEnv without a server: what is refused before a run and how one that is gone is reported.

With a real one, which wants an environment of its own: tests/nightly/test_openenv_server.py.
"""

import asyncio
import socket

import numpy as np
import pytest

from offbeat_core import ConfigError, DataError
from offbeat_data import (
    DataConfig,
    EnvironmentConfig,
    EnvironmentFailedError,
    EpisodeHost,
    Prompt,
    build_character_tokenizer,
    build_environment,
    environment_tools,
    load_prompts,
)
from offbeat_data._sources.openenv_server import StepResult

serve = pytest.importorskip("websockets.asyncio.server", reason="the extra openenv is not installed").serve

PROMPT = Prompt(index=0, ids=np.array([1], np.int32), text="?")


def openenv(url, **options):
    return EnvironmentConfig(name="openenv", options={"url": url, **options})


@pytest.fixture
def unused():
    """An address that no server has, and none gets meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


def test_a_server_that_is_not_there_is_named_before_a_run_and_ends_an_episode_in_it(unused, tmp_path):
    with pytest.raises(DataError, match=rf"no OpenEnv server answers at {unused}/schema: .*refused.*; start it"):
        environment_tools(openenv(unused))
    with pytest.raises(DataError, match=f"no OpenEnv server answers at {unused}"):
        load_prompts(DataConfig(path=f"openenv:{unused}"), build_character_tokenizer(tmp_path), needs_answer=False)

    async def begin():
        await EpisodeHost(build_environment(openenv(unused)), 10.0).reset(0, PROMPT)

    with pytest.raises(EnvironmentFailedError, match=r"\(raised\).*no OpenEnv server answers at"):
        asyncio.run(begin())


@pytest.mark.parametrize(
    "said",
    [
        "no JSON",
        "[1]",
        '{"type": "state"}',
        '{"type": "observation", "data": {"observation": {}, "reward": "?"}}',
    ],
)
def test_a_server_that_says_something_else_ends_the_episode_in_words(said):
    async def answer(connection):
        await connection.recv()
        await connection.send(said)

    async def begin():
        async with serve(answer, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            await EpisodeHost(build_environment(openenv(url)), 10.0).reset(0, PROMPT)

    with pytest.raises(EnvironmentFailedError, match=r"DataError.*an OpenEnv server answers .*, got"):
        asyncio.run(begin())


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (openenv("127.0.0.1:8000"), "is like http://127.0.0.1:8000, got '127.0.0.1:8000'"),
        (openenv("http://localhost", reward="mean"), 'must be "sum" or "last", got \'mean\''),
        (openenv("http://localhost", port=8000), "openenv refuses .*port"),
        (EnvironmentConfig(name="openenv"), "openenv refuses .*url"),
    ],
)
def test_options_without_a_meaning_are_refused(config, text):
    with pytest.raises(ConfigError, match=text):
        build_environment(config)


def test_a_token_that_is_not_there_is_named(unused):
    with pytest.raises(ConfigError, match="token_env = 'OFFBEAT_NO_TOKEN'"):
        environment_tools(openenv(unused, token_env="OFFBEAT_NO_TOKEN"))


def test_the_model_is_told_one_field_of_an_observation_or_all_of_it():
    observation = {"message": "too low", "seen": [1, 2], "hint": None, "metadata": {}}
    result = StepResult(observation=observation, reward=None, done=False)
    assert result.text_of("message") == "too low"
    assert result.text_of("seen") == "[1, 2]"
    assert result.text_of("hint") == ""
    assert result.text_of("") == '{"message": "too low", "seen": [1, 2], "hint": null}'
    deeper = StepResult(observation={"metadata": {"hint": "higher"}}, reward=None, done=False)
    assert deeper.text_of("metadata.hint") == "higher"
    assert deeper.text_of("") == '{"metadata": {"hint": "higher"}}'
    with pytest.raises(DataError, match="observation_field = 'messages' is not in the observation"):
        result.text_of("messages")

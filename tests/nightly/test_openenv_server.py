"""Episodes on a server of OpenEnv's own library, with an environment that is defined here.

openenv needs an mcp that vLLM refuses, so it is not in the lock, and the server has an environment of its own:
`nox -s openenv`.
"""

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from string import ascii_letters

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
from offbeat_data._sources.openenv_server import OpenEnvServer, OpenEnvSession
from offbeat_run import read_metrics
from offbeat_testing import RunningCommand, forked_main, small_grpo_run, tiny_model

OPENENV_PYTHON = os.environ.get("OFFBEAT_OPENENV_PYTHON", "")
pytestmark = pytest.mark.skipif(not OPENENV_PYTHON, reason="OFFBEAT_OPENENV_PYTHON names no Python with openenv")

SERVER = '''
import os
import random
import socket
import sys
import time

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    number: int
    polite: bool = False


class Reply(Observation):
    message: str
    hint: str = ""
    picture: str | None = None


class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, high=9, **others):
        self._secret = random.Random(seed).randint(0, high)
        return Reply(message=f"0 to {high}, task {seed}")

    def step(self, action, timeout_s=None, **others):
        if action.number == 13:
            raise RuntimeError("an unlucky number")
        if action.number == 77:
            time.sleep(30)
        if action.number == 42:
            return Reply(message="look", picture=os.environ["PICTURE"])
        if action.number == self._secret:
            return Reply(message="right", done=True, reward=1.0)
        hint = "higher" if action.number < self._secret else "lower"
        return Reply(message="wrong", hint=hint, reward=-0.25, metadata={"polite": action.polite})

    @property
    def state(self):
        return self._state


def guarded(app, token):
    """Rejects requests without the token, as a Space of the Hub does."""

    async def serve(scope, receive, send):
        if scope["type"] == "lifespan" or (b"authorization", f"Bearer {token}".encode()) in scope["headers"]:
            await app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    return serve


sessions, token = int(sys.argv[1]), os.environ.get("GUESS_TOKEN")
app = create_fastapi_app(GuessEnvironment, Guess, Reply, max_concurrent_envs=sessions)
listening = socket.socket()
listening.bind(("127.0.0.1", 0))
listening.listen()
print(listening.getsockname()[1], flush=True)
config = uvicorn.Config(guarded(app, token) if token else app, log_level="warning")
uvicorn.Server(config).run(sockets=[listening])
'''
OWN_CLIENT = """
import asyncio
import json
import sys

from openenv.core import GenericEnvClient


async def play(url, seed, actions):
    async with GenericEnvClient(base_url=url) as client:
        results = [await client.reset(seed=seed)]
        for action in actions:
            results.append(await client.step(action))
    return [[result.observation, result.reward, result.done] for result in results]


print(json.dumps(asyncio.run(play(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])))))
"""
PICTURE = "iVBORw0KGgo="
"""The beginning of a PNG, in base64; it is never decoded here."""
PROMPT = Prompt(index=0, ids=np.array([1], np.int32), text="?", fields={"openenv": {"reset": {"seed": 3}}})


@dataclass(frozen=True)
class Server:
    url: str
    process: subprocess.Popen[str]

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10.0)


@contextlib.contextmanager
def running_server(folder: Path, sessions: int = 8, **variables: str) -> Iterator[Server]:
    script = folder / "server.py"
    script.write_text(SERVER)
    command = [OPENENV_PYTHON, str(script), str(sessions)]
    environment = {**os.environ, **variables}
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        port = process.stdout.readline().strip()  # empty where the process ended; pytest's limit holds for the rest
        assert port, "the server did not start"
        yield Server(f"http://127.0.0.1:{port}", process)
    finally:
        process.kill()
        process.wait(10.0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("server"), PICTURE=PICTURE) as running:
        yield running


def guessing(server: Server, **options: object) -> EnvironmentConfig:
    return EnvironmentConfig(name="openenv", options={"url": server.url, "action_field": "number", **options})


def host(config: EnvironmentConfig, step_timeout_s: float = 20.0) -> EpisodeHost:
    return EpisodeHost(build_environment(config), step_timeout_s)


async def play(host: EpisodeHost, prompt: Prompt, turns: list[str], episode: int = 0):
    """Return the replies to each turn, and the score."""
    await host.reset(episode, prompt)
    replies = [await host.step(episode, turn) for turn in turns]
    score = await host.reward(episode)
    await host.close(episode)
    return replies, score


SECRET = 3  # of the seed in PROMPT: random.Random(3).randint(0, 9)


def test_an_episode_gets_the_servers_replies_and_the_sum_of_its_rewards(server):
    turns = ["9", "perhaps 3", str(SECRET)]
    replies, score = asyncio.run(play(host(guessing(server, observation_field="hint")), PROMPT, turns))
    assert replies[0] == [{"role": "user", "content": "lower"}]
    assert replies[1][0]["content"].startswith("error: number: Input should be a valid integer")
    assert replies[2] is None
    assert score.value == 0.75
    assert score.parts == {"openenv": 0.75, "rewarded_steps": 2.0, "refused_actions": 1.0}
    _, last = asyncio.run(play(host(guessing(server, reward="last")), PROMPT, ["9", "8"]))
    assert last.value == -0.25


def test_a_turn_may_be_the_action_itself_in_json(server):
    options = {"action_field": "", "tag": "act", "action": {"polite": True}, "role": "tool"}
    turns = ["<think>?</think><act>9</act>", "9", "<act>{</act>", '<think>?</think><act>{"number": 9}</act>']
    replies, score = asyncio.run(play(host(guessing(server, **options)), PROMPT, turns))
    assert [each[0]["role"] for each in replies] == ["tool"] * 4
    assert replies[0][0]["content"] == "error: an action must be a JSON object"
    assert replies[1][0]["content"] == "error: an action must stand in <act>...</act>"
    assert replies[2][0]["content"].startswith("error: an action must be a JSON object: ")
    answer = {"message": "wrong", "hint": "lower", "metadata": {"polite": True}}
    assert {name: json.loads(replies[3][0]["content"])[name] for name in answer} == answer
    assert (score.value, score.parts["refused_actions"]) == (-0.25, 3.0)


def test_a_field_of_an_observation_may_be_an_image(server):
    looking = host(guessing(server, observation_field="message", image_field="picture"))
    replies, _ = asyncio.run(play(looking, PROMPT, ["9", "42"]))
    assert replies[0] == [{"role": "user", "content": "wrong"}]
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}}
    assert replies[1] == [{"role": "user", "content": [{"type": "text", "text": "look"}, image]}]


def test_openenvs_own_client_receives_the_same(server, tmp_path):
    actions = [{"number": 9}, {"number": 0, "polite": True}, {"number": SECRET}]
    script = tmp_path / "client.py"
    script.write_text(OWN_CLIENT)
    command = [OPENENV_PYTHON, str(script), server.url, "3", json.dumps(actions)]
    theirs = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)

    async def ours():
        session = OpenEnvSession(OpenEnvServer(url=server.url))
        results = [await session.begin({"seed": 3}), *[await session.ask("step", action) for action in actions]]
        await session.close()
        return [[result.observation, result.reward, result.done] for result in results]

    assert asyncio.run(ours()) == theirs
    assert [reward for _, reward, _ in theirs] == [None, -0.25, -0.25, 1.0]


def test_prompts_are_what_the_server_says_first_and_their_episodes_begin_alike(server, tmp_path):
    tokenizer = build_character_tokenizer(tmp_path, "0123456789 tosk,")
    options = {"observation_field": "message", "reset": {"high": 4}}
    data = DataConfig(path=f"openenv:{server.url}", num_items=3, eval_size=1, task_options=options, seed=2)
    prompts = load_prompts(data, tokenizer, needs_answer=False)
    assert [prompt.question for prompt in prompts.train] == [f"0 to 4, task {2_000_000 + at}" for at in range(3)]
    assert [prompt.question for prompt in prompts.eval] == ["0 to 4, task 2000003"]
    played = host(guessing(server, observation_field="hint"))
    turns = ["0", "1", "2", "3", "4"]

    async def guess(prompt):
        """Return the turn that was right, without any later text."""
        await played.reset(prompt.index, prompt)
        for turn in turns:
            if await played.step(prompt.index, turn) is None:
                score = await played.reward(prompt.index)
                await played.close(prompt.index)
                return score.value
        return None

    values = [asyncio.run(guess(prompt)) for prompt in prompts.train]
    assert all(value is not None for value in values)
    assert values == [asyncio.run(guess(prompt)) for prompt in prompts.train]
    task = {**prompts.train[0].fields["openenv"], "begins": "another"}
    text = "begins with '0 to 4, task 2000000', and the prompt that was drawn of it is 'another'"
    with pytest.raises(EnvironmentFailedError, match=text):
        asyncio.run(played.reset(0, replace(PROMPT, fields={"openenv": task})))


def test_what_goes_wrong_on_the_server_ends_its_episode_and_no_other(server):
    async def both():
        two = host(guessing(server))
        await asyncio.gather(two.reset(0, PROMPT), two.reset(1, PROMPT))
        with pytest.raises(EnvironmentFailedError, match=r"\(raised\).*EXECUTION_ERROR: an unlucky number"):
            await two.step(0, "13")
        replies = await two.step(1, str(SECRET))
        await two.close(1)
        return replies

    assert asyncio.run(both()) is None


def test_a_server_that_takes_too_long_meets_the_deadline(server):
    async def wait():
        slow = host(guessing(server), step_timeout_s=2.0)
        await slow.reset(0, PROMPT)
        with pytest.raises(EnvironmentFailedError, match=r"\(timed_out\).*environment.step_timeout_s = 2"):
            await slow.step(0, "77")

    begun_s = asyncio.run(timed(wait()))
    assert begun_s < 15.0


async def timed(work) -> float:
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    await work
    return loop.time() - begun_s


def test_a_server_that_goes_ends_the_episodes_on_it(tmp_path):
    async def lose(running):
        held = host(guessing(running))
        await held.reset(0, PROMPT)
        running.end()
        with pytest.raises(EnvironmentFailedError, match=r"\(raised\).*the OpenEnv server .* is gone"):
            await held.step(0, "9")
        with pytest.raises(EnvironmentFailedError, match="no OpenEnv server answers at"):
            await held.reset(1, PROMPT)

    with running_server(tmp_path) as running:
        asyncio.run(lose(running))


def test_an_episode_waits_for_a_place_on_a_full_server(tmp_path, caplog):
    async def share(running):
        shared = host(guessing(running))
        await shared.reset(0, PROMPT)
        second = asyncio.create_task(play(shared, PROMPT, [str(SECRET)], episode=1))
        await asyncio.sleep(1.5)
        assert not second.done()
        await shared.close(0)
        _, score = await second
        hurried = host(guessing(running), step_timeout_s=1.5)
        await shared.reset(2, PROMPT)
        with pytest.raises(EnvironmentFailedError, match="timed_out"):
            await hurried.reset(3, PROMPT)
        await shared.close(2)
        return score

    with running_server(tmp_path, sessions=1) as running:
        assert asyncio.run(share(running)).value == 1.0
    assert "start it with a greater max_concurrent_envs" in caplog.text


def test_a_server_is_looked_at_before_a_run(server, tmp_path, monkeypatch):
    assert environment_tools(guessing(server)) == []
    with pytest.raises(ConfigError, match=r"'word' is no field of the actions .* metadata, number, polite"):
        environment_tools(guessing(server, action_field="word"))
    with running_server(tmp_path, GUESS_TOKEN="open") as locked:
        with pytest.raises(DataError, match=r"no OpenEnv server answers .* 401"):
            environment_tools(guessing(locked))
        monkeypatch.setenv("GUESS_TOKEN", "open")
        config = guessing(locked, token_env="GUESS_TOKEN")
        assert environment_tools(config) == []
        _, score = asyncio.run(play(host(config), PROMPT, [str(SECRET)]))
        assert score.value == 1.0
        with pytest.raises(EnvironmentFailedError, match=r"no OpenEnv server answers .* 403"):
            asyncio.run(host(guessing(locked)).reset(0, PROMPT))


@pytest.mark.timeout(240)
def test_a_run_trains_on_the_tasks_of_a_server(server, tmp_path):
    options = {"url": server.url, "action_field": "number", "observation_field": "hint"}
    words = [
        f"--data.path=openenv:{server.url}",
        "--data.num_items=8",
        "--data.eval_size=0",
        '--data.task_options={observation_field = "message"}',
        "--environment.name=openenv",
        f"--environment.options={{{', '.join(f'{name} = {json.dumps(value)}' for name, value in options.items())}}}",
        "--environment.max_tokens=96",
        "--eval.every_updates=0",
        "--reward.name=",
        "--rollout.max_tokens=8",
        "--rollout.max_model_len=192",
        f"--rollout.stop={json.dumps(list(ascii_letters))}",  # a model with random weights seldom ends a turn itself
        "--engine.max_updates=2",
    ]
    config, run = small_grpo_run(tmp_path, tiny_model(tmp_path / "model")), tmp_path / "run"
    main = forked_main("grpo_async_app", "offbeat_engine_torch", "offbeat_rollout_torch")
    with RunningCommand(main, "train", config, "--out", run, *words) as process:
        assert process.wait(100.0) == 0, process.output
        output = process.output
    lines = [line.values for line in read_metrics(run / "metrics.jsonl") if "train/reward" in line.values]
    assert len(lines) == 2, output
    assert "samples left out" not in output
    # Text from random weights is mostly not a number; the server replies so, and its reply is in the training data.
    assert all(values["reward/refused_actions"] > 0 for values in lines)
    assert any("[user] error: number: " in line for line in (run / "generations" / "train.jsonl").open())

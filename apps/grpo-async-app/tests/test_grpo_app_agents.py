"""Runs whose samples are episodes of a program that knows OpenAI's client and nothing of offbeat."""

import asyncio
import json
import os
import re
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from string import ascii_letters
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from grpo_runs import Main, run_to_its_end, statistics_of, trained_prompts, values_of

from grpo_async_app._commands import quickstart
from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._fleet.agents import Agents
from grpo_async_app._preflight.preflight import check_run
from offbeat_core import GenerateRequest, RecordedSession, SamplingParams, load_config
from offbeat_data import Prompt
from offbeat_run import RunFolder, read_generations
from offbeat_testing import CommandLine, RunningCommand, wait_until_gone

NUM_TRAIN = 20

BRANCHING = """
import json
import sys

from openai import OpenAI

client = OpenAI(max_retries=0)
row = json.load(sys.stdin)
assert "answer" not in row, row


def ask(*messages):
    said = client.chat.completions.create(model="gpt-4o", messages=messages, temperature=0.3)
    return said.choices[0].message.content


question = {"role": "user", "content": row["prompt"]}
first = ask(question)
second = ask(question, {"role": "assistant", "content": first}, {"role": "user", "content": "and now?"})
helped = ask({"role": "system", "content": "a helper"}, {"role": "user", "content": "is it so?"})
compacted = ask({"role": "user", "content": f"{len(first + second + helped)} characters so far. go on"})
print(len(compacted))
"""

ODD = """
import json
import sys
import time

from openai import OpenAI

client = OpenAI(max_retries=0)
number = int(json.load(sys.stdin)["prompt"].split()[2])
if number % 4 != 1:
    client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hello"}])
if number % 4 == 2:
    sys.exit("no bread today")
if number % 4 == 3:
    time.sleep(600)
print(number)
"""


def settings(program: Path, *words: str) -> list[str]:
    return [
        f"--agent.command={json.dumps(['python', str(program)])}",
        '--agent.preload=["openai", "openai.resources.chat"]',
        "--agent.answer=stdout",
        f"--rollout.stop={json.dumps(list(ascii_letters))}",  # a model with random weights seldom ends a turn itself
        "--rollout.max_tokens=16",
        "--rollout.max_model_len=192",
        *words,
    ]


@pytest.fixture
def branching(tmp_path: Path) -> Path:
    program = tmp_path / "branching.py"
    program.write_text(BRANCHING)
    return program


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_sub_agent_and_a_compacted_context_are_trained_in_their_own_contexts(
    forked_main: Main, config: Path, tmp_path: Path, branching: Path
) -> None:
    run = tmp_path / "run"
    on_policy = ["--async.staleness_threshold=0", "--async.partial_rollout=false", "--algorithm.correction_form=bypass"]
    run_to_its_end(forked_main, "train", config, "--out", run, *settings(branching, *on_policy))
    assert sorted(trained_prompts(run).values()) == [1] * NUM_TRAIN
    # The ratio is of the trainer's probability of a token to the engine's: any other context would show here.
    assert values_of(run, "train/ratio_max")
    assert max(values_of(run, "train/ratio_max").values()) < 1.001
    assert set(values_of(run, "train/trajectories").values()) == {3.0}
    assert set(values_of(run, "train/turns").values()) == {4.0}
    assert values_of(run, "eval/turns")
    said = [each.completion for each in read_generations(RunFolder.open(run, write=False), "train")]
    assert all("and now?" in text for text in said)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_every_prompt_is_trained_once_whoever_is_killed(
    forked_main: Main, config: Path, tmp_path: Path, branching: Path
) -> None:
    """An engine, programs, the role that runs them, then the driver; and nothing of it is left."""
    run = tmp_path / "run"
    ahead = ["--data.epochs=3", "--async.staleness_threshold=1", "--checkpoint.every=1", "--rollout.num_engines=2"]
    words = [*settings(branching, *ahead), "--eval.every_updates=0"]
    with RunningCommand("grpo_async_app", "train", config, "--out", run, *words) as process:
        process.wait_until(lambda: bool(values_of(run, "train/reward")), "an update")
        started = set(process.descendants())
        os.kill(process_of(process, "rollout-1"), signal.SIGKILL)
        process.wait_until(lambda: len(values_of(run, "train/reward")) >= 3, "updates without the engine")
        started |= set(process.descendants())
        process.kill()
        process.wait()
    wait_until_gone(sorted(started), 20)
    run_to_its_end(forked_main, "resume", run, deadline_s=300)
    assert set(trained_prompts(run).values()) == {3}
    assert len(trained_prompts(run)) == NUM_TRAIN


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_programs_and_a_role_that_are_killed_cost_their_episodes_alone(
    config: Path, tmp_path: Path, branching: Path
) -> None:
    run = tmp_path / "run"
    words = [*settings(branching, "--data.epochs=4"), "--eval.every_updates=0", "--checkpoint.every=1"]
    with RunningCommand("grpo_async_app", "train", config, "--out", run, *words) as process:
        process.wait_until(lambda: bool(values_of(run, "train/reward")), "an update")
        os.kill(process_of(process, "agent-0"), signal.SIGKILL)
        assert process.wait(500) == 0, process.output
    statistics = statistics_of(run)
    assert statistics["trained"] + statistics["filtered"] == 4 * NUM_TRAIN
    assert max(trained_prompts(run).values()) <= 4
    assert statistics["trained"] >= 3 * NUM_TRAIN


def process_of(process: RunningCommand, role: str) -> int:
    def command(pid: int) -> str:
        try:
            return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        except OSError:
            return ""

    return next(pid for pid in process.descendants() if command(pid).rstrip().endswith(role))


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_episodes_without_an_end_are_counted_and_never_trained(forked_main: Main, config: Path, tmp_path: Path) -> None:
    run, program = tmp_path / "run", tmp_path / "odd.py"
    program.write_text(ODD)
    words = [*settings(program, "--agent.deadline_s=15"), "--eval.every_updates=0", "--checkpoint.every=1"]
    output = run_to_its_end(forked_main, "train", config, "--out", run, *words)
    assert "samples left out" in output
    statistics = statistics_of(run)
    assert statistics["trained"] + statistics["filtered"] == NUM_TRAIN
    for reason in ("silent", "failed", "timed_out"):
        assert max(values_of(run, f"agent/{reason}").values()) >= 2, reason
    assert all(int(prompt.split("what is ")[1].split()[0]) % 4 == 0 for prompt in trained_prompts(run))


def test_the_program_of_agents_md_is_trained(forked_main: Main, config: Path, tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "agents.md").read_text()
    [source] = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    run, program = tmp_path / "run", tmp_path / "my_agent.py"
    program.write_text(source)
    words = [*settings(program, "--engine.max_updates=1"), "--eval.every_updates=0"]
    run_to_its_end(forked_main, "train", config, "--out", run, *words)
    assert list(values_of(run, "train/reward")) == [1]
    with RunFolder.open(run, write=False) as folder:
        trained = read_generations(folder, "train")
    assert trained
    assert all(each.completion for each in trained)


@pytest.mark.timeout(300)
def test_a_run_whose_agents_all_fail_ends_so_and_keeps_no_model(
    forked_main: Main, config: Path, tmp_path: Path
) -> None:
    run, program = tmp_path / "run", tmp_path / "broken.py"
    program.write_text("import no_such_client\n")
    words = [f"--agent.command={json.dumps(['python', str(program)])}", "--eval.every_updates=0"]
    with RunningCommand(forked_main, "train", config, "--out", run, *words) as process:
        assert process.wait() == 3, process.output
        said = " ".join(process.output.split())
    assert "error: no update was made; left out: 40 agent/failed; the latest: " in said
    assert said.count("exit code 1: ModuleNotFoundError: No module named 'no_such_client'") == 2, "at first and at last"
    for wrong in ("learning signal", "Traceback", "resume with", "model card"):
        assert wrong not in said
    assert not list((run / "checkpoints").glob("step-*"))
    assert "Traceback" in (run / "logs" / "agent-0.log").read_text()


class Worker(threading.Thread):
    """An agent in a process of its own choosing: asks for sessions until the run is over."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url, self.rows, self.over = url, [], threading.Event()  # type: ignore[var-annotated]

    def run(self) -> None:
        with httpx.Client(base_url=self.url, timeout=60) as http:
            while not self.over.is_set():
                try:
                    offer = http.post("/v1/sessions")
                except httpx.HTTPError:
                    return
                if offer.status_code == 204:
                    time.sleep(0.02)
                else:
                    self.act(http, offer.json())

    def act(self, http: httpx.Client, offer: dict) -> None:
        client = openai.OpenAI(base_url=offer["base_url"], api_key=offer["session_key"], http_client=http)
        question = {"role": "user", "content": offer["row"]["prompt"]}
        said = client.chat.completions.create(model="policy", messages=[question])  # type: ignore[list-item]
        length = len(said.choices[0].message.content or "")
        headers = {"Authorization": f"Bearer {offer['reward_key']}"}
        http.post("/v1/sessions/end", json={"reward": length, "parts": {"length": length}}, headers=headers)
        self.rows.append(offer["row"])


@pytest.mark.timeout(300)
def test_agents_elsewhere_ask_for_sessions_and_post_rewards(forked_main: Main, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["--agent.is_outside=true", "--rollout.serve_port=0", "--reward.name=", "--eval.every_updates=0"]
    with RunningCommand(forked_main, "train", config, "--out", run, *words) as process:
        log = run / "logs" / "rollout-0.log"
        process.wait_until(lambda: log.exists() and "serves policy" in log.read_text(), "the address")
        worker = Worker(re.findall(r"serves policy at (\S+)/v1", log.read_text())[-1])
        worker.start()
        assert process.wait() == 0, process.output
        worker.over.set()
    assert sorted(trained_prompts(run).values()) == [1] * NUM_TRAIN
    assert len(worker.rows) == 2 * NUM_TRAIN
    assert all("answer" not in row for row in worker.rows)
    assert max(values_of(run, "train/reward").values()) > 0


class OpenedSessions:
    """Engines whose sessions are over at once; keeps the rows and the parameters that they were opened with."""

    def __init__(self) -> None:
        self.rows: list[Mapping[str, Any]] = []
        self.params: list[SamplingParams] = []

    async def call(self, name: str, method: str, *arguments: Any, **_: Any) -> Any:
        if method == "open_session":
            self.rows.append(arguments[0].row)
            self.params.append(arguments[0].params)
            return "http://127.0.0.1", "key", ""
        ended = {"ended_by": "call", "reward": None, "reward_parts": {}, "num_calls": 1, "num_aborted": 1}
        return RecordedSession(trajectories=(), answer="", **ended) if method == "take_session" else None  # type: ignore[arg-type]


@pytest.mark.parametrize("shows_answer", [False, True])
def test_an_agent_gets_the_row_without_the_answer_of_its_own_source(
    config: Path, tmp_path: Path, shows_answer: bool
) -> None:
    rows = {"solved": {"prompt": "3+4?", "solution": "7"}, "judged": {"prompt": "4+4?", "rule": {"truth": "8", "n": 1}}}
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
    words = [
        *("--data.path=", "--data.eval_size=0", "--engine.max_updates=1"),
        *("--agent.is_outside=true", "--rollout.serve_port=0", f"--agent.shows_answer={str(shows_answer).lower()}"),
        *(f"--data.mix.solved.path={tmp_path}/solved.jsonl", "--data.mix.solved.answer_column=solution"),
        *("--data.mix.drawn.path=reasoning-gym:chain_sum", "--data.mix.drawn.max_prompts=1"),
        *("--data.mix.drawn.answer_column=solution", "--rollout.max_model_len=512", "--data.max_prompt_tokens=400"),
        *(f"--eval.sets.judged.path={tmp_path}/judged.jsonl", "--eval.sets.judged.answer_column=rule.truth"),
    ]
    checked = check_run(load_config(config, GrpoConfig, words))
    engines = OpenedSessions()
    agents = Agents(checked.config, engines, None, lambda name: nullcontext())  # type: ignore[arg-type]

    async def play(prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            request = GenerateRequest(request_id="r", prompt_ids=prompt.ids, params=SamplingParams())
            await agents.play("rollout-0", prompt, request, 0)

    asyncio.run(play([*checked.prompts.train, *checked.run.sets[0].prompts]))
    drawn, *others = engines.rows
    if shows_answer:
        assert {"answer", "reasoning_gym"} <= drawn.keys()
        assert others == [rows["solved"], rows["judged"]]
    else:
        assert drawn.keys() == {"prompt"}
        assert others == [{"prompt": "3+4?"}, {"prompt": "4+4?", "rule": {"n": 1}}]


@pytest.mark.parametrize(("seed", "seeds"), [(40, [40, 41, 42]), (None, [None] * 3)])
def test_samples_of_a_group_draw_with_seeds_of_their_own(
    config: Path, seed: int | None, seeds: list[int | None]
) -> None:
    engines, prompt = OpenedSessions(), Prompt(index=0, ids=np.array([1], np.int32), text="")
    settings = load_config(config, GrpoConfig, ["--agent.is_outside=true", "--rollout.serve_port=0"])
    agents = Agents(settings, engines, None, lambda name: nullcontext())  # type: ignore[arg-type]
    request = GenerateRequest(request_id="r", prompt_ids=prompt.ids, num_samples=3, params=SamplingParams(seed=seed))

    async def play() -> None:
        for index in range(request.num_samples):
            await agents.play("rollout-0", prompt, request, index)

    asyncio.run(play())
    assert [params.seed for params in engines.params] == seeds


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--agent.max_calls=3"], "no effect without agent.command or agent.is_outside"),
        (['--agent.command=["true"]', "--agent.is_outside=true"], "set one"),
        (['--agent.command=["no-such-program"]'], "there is no program 'no-such-program'"),
        (["--agent.is_outside=true"], "set rollout.serve_port"),
        (['--agent.command=["true", "{prompt_file}"]'], "{prompt_file} must stand in agent.command"),
        (['--agent.command=["true"]', '--agent.preload=["json"]'], "agent.preload needs agent.command"),
        (
            ['--agent.command=["true"]', "--agent.may_post_reward=false", "--reward.name="],
            "leaves the reward to section",
        ),
        (['--agent.command=["true"]', "--environment.name=calculator"], "set one of them"),
        (['--agent.command=["true"]', "--cluster.launcher=ray"], "over loopback"),
    ],
)
def test_settings_that_cannot_be_are_refused(command: CommandLine, config: Path, words: list[str], text: str) -> None:
    ended = command("plan", config, *words)
    assert ended.code == 2
    assert text in ended.err


def test_a_plan_names_the_agent_and_its_limits(command: CommandLine, config: Path) -> None:
    ended = command("plan", config, '--agent.command=["true"]')
    assert ended.code == 0, ended.err
    assert "true: 300 s and 64 calls for each episode, 64 at once" in " ".join(ended.out.split())


@pytest.fixture
def short_lesson(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lesson's structure, without what it takes to learn."""
    monkeypatch.setattr(quickstart, "WARMUP_MAX_STEPS", 30)
    monkeypatch.setattr(quickstart, "WARMUP_BATCH", 32)
    return [
        "--engine.max_updates=2",
        "--engine.warmup_steps=0",
        "--async.mini_batch_size=2",
        "--rollout.samples_per_prompt=4",
        "--data.num_items=400",
        "--data.eval_size=8",
        "--algorithm.filter_groups=false",
        "--eval.every_updates=1",
    ]


@pytest.mark.timeout(300)
@pytest.mark.nightly
def test_the_agent_lesson_goes_from_end_to_end(forked_main: Main, tmp_path: Path, short_lesson: list[str]) -> None:
    run = tmp_path / "run"
    run_to_its_end(forked_main, "quickstart", "--lesson", "agent", "--out", run, *short_lesson)
    assert len(values_of(run, "train/reward")) == 2
    assert values_of(run, "eval/turns")


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_tiny_model_learns_to_call_the_calculator_through_openais_client(forked_main: Main, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_to_its_end(forked_main, "quickstart", "--lesson", "agent", "--out", run, deadline_s=1700)
    accuracy = values_of(run, "eval/accuracy")
    assert accuracy[max(accuracy)] > accuracy[min(accuracy)] + 0.3
    turns = values_of(run, "train/turns")
    assert turns[max(turns)] > turns[min(turns)]

"""`rollout.serve_port`: an agent outside rolls out on the policy in training, and learns which version it got."""

import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._roles.rollout import RolloutRole
from offbeat_core import RoleName, load_config
from offbeat_run import RunFolder
from offbeat_testing import RunningCommand, reference_logprobs, reference_model

Main = Callable[[], object]
DEADLINE_S = 90.0
ASK = {"prompt": "what is 2 and one?", "max_tokens": 6, "n": 2, "logprobs": 1, "return_token_ids": True}
RISE = 4
ENDLESS = ["--data.epochs=1000", "--checkpoint.every=1", "--checkpoint.keep=5000", "--rollout.serve_port=0"]


def address(log: Path) -> str:
    found = re.findall(r"serves policy at (http://127\.0\.0\.1:\d+)/v1", log.read_text() if log.is_file() else "")
    return found[-1] if found else ""


def ask_while_it_rises(url: str) -> list[dict]:
    """Answers of an agent that asks on and on, until the policy is some versions further."""
    answers, end_s = [], time.monotonic() + DEADLINE_S
    with httpx.Client(base_url=url, timeout=DEADLINE_S) as client:
        while not answers or answers[-1]["policy_version"] < answers[0]["policy_version"] + RISE:
            assert time.monotonic() < end_s, f"the policy did not rise by {RISE}: {answers[:1]} {answers[-1:]}"
            reply = client.post("/v1/completions", json=ASK)
            assert reply.status_code == 200, reply.text
            assert int(reply.headers["X-Policy-Version"]) == reply.json()["policy_version"]
            answers.append(reply.json())
    return answers


@pytest.mark.parametrize(
    "partial",
    [
        pytest.param("true", id="kept over syncs", marks=pytest.mark.nightly),
        pytest.param("false", id="waited for"),
    ],
)
def test_an_agent_outside_samples_the_policy_in_training(
    forked_main: Main, config: Path, model: Path, tmp_path: Path, partial: str
) -> None:
    run = tmp_path / "run"
    with RunningCommand(
        forked_main, "train", config, "--out", run, *ENDLESS, f"--async.partial_rollout={partial}"
    ) as training:
        log = run / "logs" / "rollout-0.log"
        training.wait_until(lambda: bool(address(log)), "the policy to be served")
        answers = ask_while_it_rises(address(log))
        training.press_ctrl_c()
        assert training.wait() == 130, training.output
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{address(log)}/health")
    versions = [answer["policy_version"] for answer in answers]
    assert versions == sorted(versions)
    assert_sampled_by(answers, {0: model, **checkpoints(run)})


def checkpoints(run: Path) -> dict[int, Path]:
    return {entry.step: entry.path for entry in RunFolder.open(run, write=False).checkpoints.all()}


def assert_sampled_by(answers: list[dict], folders: dict[int, Path]) -> None:
    """Every token's log-probability is that of the checkpoint of its version."""
    models: dict[int, Any] = {}
    for answer in answers:
        for choice in answer["choices"]:
            [segment, *more] = choice["version_segments"]
            version = segment["version"]
            if more or version not in folders:
                continue
            if version not in models:
                models[version] = reference_model(folders[version])
            ids = np.array(choice["prompt_token_ids"] + choice["token_ids"], np.int32)
            expected = reference_logprobs(models[version], ids)[len(choice["prompt_token_ids"]) :]
            np.testing.assert_allclose(choice["logprobs"]["token_logprobs"], expected, atol=1e-3)
    assert len(models) > 1, "a policy that never changed proves nothing"


def test_without_the_key_nothing_listens(forked_main: Main, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with RunningCommand(forked_main, "train", config, "--out", run, "--engine.max_updates=1") as training:
        assert training.wait() == 0, training.output
    assert address(run / "logs" / "rollout-0.log") == ""


@pytest.mark.nightly
def test_a_port_in_use_ends_the_run_with_one_clear_line(forked_main: Main, config: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with RunningCommand(
            forked_main, "train", config, "--out", tmp_path / "run", f"--rollout.serve_port={port}"
        ) as training:
            assert training.wait() == 2, training.output
            assert f"cannot listen on 127.0.0.1, port {port}" in training.output


def test_each_engine_has_a_port_of_its_own(config: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ports: list[int] = []
    monkeypatch.setattr("offbeat_serve.RolloutServer", lambda *given, **_: ports.append(given[3].port))
    settings = load_config(config, GrpoConfig, ["--rollout.serve_port=8100", "--rollout.num_engines=3"])
    for number in range(3):
        role: Any = RolloutRole(config=settings, role=RoleName("rollout", number), model_path=str(model), num_threads=1)
        role._engine = None
        role._endpoint()
    assert ports == [8100, 8101, 8102]

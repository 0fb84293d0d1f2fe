"""A policy with LoRA: engines get the adapter alone, or merged weights, and the run is the same."""

import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from grpo_runs import Main, run_to_its_end, trained_prompts, values_of
from role_faults import accounting_complaints, role_pids, signal_role, updates

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._config.weight_sync import choose_lora_sync, settle_lora_sync
from grpo_async_app._preflight.preflight import check_run
from grpo_async_app._roles.rollout import RolloutRole
from offbeat_core import ConfigError, RoleName, load_config
from offbeat_testing import RunningCommand

LORA = ("--engine.lora_rank=4", "--engine.learning_rate=3e-3", "--eval.every_updates=0")
SYNCHRONOUS = ("--async.staleness_threshold=0", "--async.partial_rollout=false")


def on_one_line(output: str) -> str:
    return " ".join(output.split())


VOWELS = """
def reward(prompt, completion):
    return sum(letter in "aeiou" for letter in completion) / 10
"""
"""Something that random weights are now better and now worse at."""


@pytest.fixture
def learns(own_module: Callable[[str, str], None]) -> tuple[str, ...]:
    """Settings of a run whose adapter changes with every update, and which says how far engine and trainer differ."""
    own_module("vowels", VOWELS)
    return (*LORA, "--reward.name=vowels:reward", "--algorithm.correction=token_tis", "--rollout.samples_per_prompt=4")


def test_what_is_sampled_with_the_adapter_alone_is_what_is_trained(
    forked_main: Main, config: Path, tmp_path: Path, learns: tuple[str, ...]
) -> None:
    words = [*learns, *SYNCHRONOUS, "--engine.max_updates=2"]
    said = on_one_line(run_to_its_end(forked_main, "train", config, "--out", tmp_path / "run", *words))
    assert "each sync brings the adapter alone: rollout.backend = 'torch' samples with adapters" in said
    assert max(values_of(tmp_path / "run", "correction/kl_rollout_train").values()) < 1e-6
    assert all(values_of(tmp_path / "run", "engine/grad_norm").values()), "nothing was learned"


@pytest.mark.nightly
def test_a_run_with_the_adapter_alone_is_that_with_merged_weights(
    forked_main: Main, config: Path, tmp_path: Path, learns: tuple[str, ...]
) -> None:
    runs = {}
    for sync, said in {
        "auto": "each sync brings the adapter alone: rollout.backend = 'torch' samples with adapters",
        "merged": "each sync brings merged weights",
    }.items():
        run = runs[sync] = tmp_path / sync
        words = [*learns, *SYNCHRONOUS, "--engine.max_updates=3", f"--rollout.lora_sync={sync}"]
        assert said in on_one_line(run_to_its_end(forked_main, "train", config, "--out", run, *words))
        assert max(values_of(run, "correction/kl_rollout_train").values()) < 1e-6
    for name in ("train/reward", "train/loss_policy", "engine/grad_norm"):
        alone, merged = (values_of(run, name) for run in runs.values())
        assert list(alone) == list(merged) == [1, 2, 3]
        assert list(alone.values()) == pytest.approx(list(merged.values()), rel=1e-3, abs=1e-5), name
        assert all(alone.values()), f"{name} is 0: nothing was learned"


@pytest.mark.nightly
def test_an_engine_that_dies_gets_the_base_and_the_adapter_anew(
    forked_main: Main, config: Path, tmp_path: Path, learns: tuple[str, ...]
) -> None:
    run, words = tmp_path / "run", [*learns, *SYNCHRONOUS, "--data.epochs=6", "--rollout.num_engines=2"]
    with RunningCommand(forked_main, "train", config, "--out", run, *words) as process:
        process.wait_until(lambda: len(updates(run)) >= 3, "3 updates")
        gone = signal_role(process, "rollout-1", signal.SIGKILL)
        process.wait_until(lambda: role_pids(process).get("rollout-1", gone) != gone, "a new engine")
        assert process.wait() == 0, process.output
    assert accounting_complaints(run, 20, 6, per_update=4) == []
    # What was sampled with another adapter than is trained would show.
    assert max(values_of(run, "correction/kl_rollout_train").values()) < 1e-5


@pytest.mark.nightly
def test_a_trainer_that_dies_and_a_resumed_run_go_on_with_adapters(
    forked_main: Main, config: Path, tmp_path: Path, learns: tuple[str, ...]
) -> None:
    run, words = tmp_path / "run", [*learns, "--data.epochs=4", "--checkpoint.every=1"]
    with RunningCommand(forked_main, "train", config, "--out", run, *words) as process:
        process.wait_until(lambda: len(updates(run)) >= 3, "3 updates")
        gone = signal_role(process, "trainer-0", signal.SIGKILL)
        process.wait_until(lambda: role_pids(process).get("trainer-0", gone) != gone, "a new trainer")
        process.wait_until(lambda: len(updates(run)) >= 8, "8 updates")
        process.press_ctrl_c()
        assert process.wait() == 130, process.output
    assert "the adapter alone" in on_one_line(run_to_its_end(forked_main, "resume", run))
    assert sorted(trained_prompts(run).values()) == [4] * 20


def choose(config: Path, *words: str) -> str:
    return str(choose_lora_sync(load_config(config, GrpoConfig, words)))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (LORA, "the adapter alone: rollout.backend = 'torch'"),
        ((*LORA, "--rollout.weight_format=fp8"), "the adapter alone"),
        ((*LORA, "--rollout.lora_sync=merged"), "merged weights: rollout.lora_sync"),
        (
            (*LORA, "--cluster.colocate=true", "--cluster.sleep_level=2"),
            "merged weights: .* give their weights back before every sync",
        ),
        ((*LORA, "--cluster.colocate=true", "--cluster.sleep_level=1"), "the adapter alone"),
        ((*LORA, "--rollout.backend=vllm"), "merged weights: .*enable_lora"),
        ((*LORA, "--rollout.backend=vllm", "--rollout.options={enable_lora = true}"), "the adapter alone"),
        ((*LORA, "--rollout.backend=trtllm"), "merged weights: rollout.backend = 'trtllm' takes no adapters"),
    ],
)
def test_auto_sends_the_adapter_where_the_engine_takes_it(config: Path, words: tuple[str, ...], said: str) -> None:
    assert re.search(said, choose(config, *words))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "needs a policy with adapters: set engine.lora_rank"),
        (
            (*LORA, "--cluster.colocate=true", "--cluster.sleep_level=2"),
            'give their weights back before every sync; set it to "merged"',
        ),
        ((*LORA, "--rollout.backend=trtllm"), "takes no adapters"),
    ],
)
def test_an_adapter_that_cannot_be_sent_is_refused(config: Path, words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        choose(config, "--rollout.lora_sync=adapter", *words)


def test_the_plan_says_what_is_sent(config: Path) -> None:
    assert "the adapter alone" in str(check_run(load_config(config, GrpoConfig, LORA)).lora_sync)
    assert not check_run(load_config(config, GrpoConfig)).lora_sync.why


def test_agents_outside_are_given_the_adapted_policy(config: Path, model: Path) -> None:
    wanted = load_config(config, GrpoConfig, [*LORA, "--rollout.serve_port=0"])
    role = RolloutRole(config=settle_lora_sync(wanted), role=RoleName("rollout"), model_path=str(model), num_threads=1)
    role._engine = None  # type: ignore[assignment]
    server: Any = role._endpoint()
    assert server is not None
    assert _served(server).adapter == "policy"
    plain = RolloutRole(
        config=settle_lora_sync(replace(wanted, engine=replace(wanted.engine, lora_rank=0))),
        role=RoleName("rollout"),
        model_path=str(model),
        num_threads=1,
    )
    plain._engine = None  # type: ignore[assignment]
    assert _served(plain._endpoint()).adapter == ""


def _served(server: Any) -> Any:
    return server._endpoint._model

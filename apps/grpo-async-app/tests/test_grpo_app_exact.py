"""Exact numerics: trainer and embedded engine find the same log-probabilities, to the bit, alone and in whole runs."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from grpo_runs import Main, run_to_its_end, values_of

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._preflight.preflight import check_run
from grpo_async_app._roles.rollout import RolloutRole
from grpo_async_app._run.log.mismatch_alarm import EXACT_METRIC, MismatchAlarm
from offbeat_core import (
    Completion,
    ConfigError,
    GenerateRequest,
    Metric,
    RolloutEngineConfig,
    SamplingParams,
    TrainEngineConfig,
    TrainSequence,
    load_config,
)
from offbeat_engine_torch import TorchTrainEngine
from offbeat_rollout_torch import TorchRolloutEngine
from offbeat_testing import tiny_model

EXACT: Final = '--engine.options.numerics="exact"'
ON_POLICY: Final = ("--async.staleness_threshold=0", "--async.partial_rollout=false")
MOVES: Final = ("--algorithm.entropy_coefficient=1", "--engine.learning_rate=1e-3")
"""Gives every update a gradient: a model with random weights earns no reward."""
SHORT: Final = ("--eval.every_updates=0", "--checkpoint.every=0")
LLAMA3: Final = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: Final[dict[str, tuple[Any, dict[str, Any]]]] = {
    "qwen3": ("qwen3", {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
    "llama3": ("llama", {"rope_parameters": LLAMA3, "attention_bias": True}),
}


def sample(folder: Path, dtype: str, temperature: float) -> list[TrainSequence]:
    """Return samples of prompts of many lengths; their `extras` hold what the engine has found."""
    draw, prompts = np.random.default_rng(0), {1: 1, 7: 3, 64: 1, 150: 2}
    options = {"numerics": "exact", "max_prefill_tokens": 48}

    def request(length: int, num_samples: int) -> GenerateRequest:
        params = SamplingParams(max_tokens=70, ignore_eos=True, seed=length, temperature=temperature)
        ids = draw.integers(3, 300, length).astype(np.int32)
        return GenerateRequest(request_id=str(length), prompt_ids=ids, num_samples=num_samples, params=params)

    async def generate() -> list[TrainSequence]:
        settings = {"model_path": str(folder), "dtype": dtype, "device": "cpu", "max_model_len": 256}
        engine = await TorchRolloutEngine.create(RolloutEngineConfig(**settings, num_threads=1, options=options))  # type: ignore[arg-type]
        requests = [request(*each) for each in prompts.items()]
        answers = await asyncio.gather(*(engine.generate(each) for each in requests))
        await engine.close()
        return [
            sequence(group, asked.prompt_ids, completion)
            for group, (asked, completions) in enumerate(zip(requests, answers, strict=True))
            for completion in completions
        ]

    def sequence(group: int, prompt: Any, completion: Completion) -> TrainSequence:
        ids = np.concatenate([prompt, completion.ids]).astype(np.int64)
        found = np.concatenate([np.zeros(len(prompt), np.float32), completion.logprobs])
        return TrainSequence(
            ids=ids, loss_mask=np.arange(len(ids)) >= len(prompt), group=group, extras={"sampled": found}
        )

    return asyncio.run(generate())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_the_trainer_finds_the_bits_that_the_engine_has_found(tmp_path: Path, name: str, dtype: str) -> None:
    family, config = MODELS[name]
    # Wide enough that some matrices are packed and some are not.
    folder = tiny_model(tmp_path, family, hidden_size=192, tied=not config, config=config)
    sequences = sample(folder, dtype, 0.7)
    for budget in (8192, 256):
        options = {"numerics": "exact", "temperature": 0.7}
        settings = {"model_path": str(folder), "dtype": dtype, "device": "cpu", "max_tokens_per_microbatch": budget}
        trainer = TorchTrainEngine.create(TrainEngineConfig(**settings, num_threads=1, options=options))  # type: ignore[arg-type]
        for found, each in zip(trainer.logprobs(sequences), sequences, strict=True):
            np.testing.assert_array_equal(found, each.extras["sampled"])


BFLOAT16: Final = ("--engine.dtype=bfloat16", "--rollout.dtype=bfloat16")
RUNS: Final = {
    "float32": (),
    "bfloat16": BFLOAT16,
    "two ranks": ("--engine.num_ranks=2", "--engine.max_tokens_per_microbatch=64"),
    "two ranks in bfloat16": ("--engine.num_ranks=2", *BFLOAT16),
    "adapters": ("--engine.lora_rank=4", *BFLOAT16),
}


@pytest.mark.parametrize("words", RUNS.values(), ids=RUNS)
def test_every_token_without_lag_has_a_ratio_of_one(
    forked_main: Main, config: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    output = run_to_its_end(
        forked_main, "train", config, "--out", run, *SHORT, *ON_POLICY, *MOVES, EXACT, *words, deadline_s=300
    )
    assert "mismatch alarm" not in output
    largest = values_of(run, "mismatch/abs_max_nats")
    assert set(largest) == set(values_of(run, "train/reward"))
    assert set(largest.values()) == {0.0}, "every token of an on-policy run is without lag"
    assert set(values_of(run, "mismatch/kl").values()) == {0.0}
    assert set(values_of(run, "mismatch/ess_share").values()) == {1.0}
    assert min(values_of(run, "engine/grad_norm").values()) > 0, "the weights have moved"


def test_a_run_says_when_log_probabilities_are_not_equal(
    forked_main: Main, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = RolloutRole.generate

    async def tampered(self: RolloutRole, request: GenerateRequest) -> list[Completion]:
        return [
            replace(each, logprobs=np.nextafter(each.logprobs, np.float32(-1e9)))
            for each in await generate(self, request)
        ]

    monkeypatch.setattr(RolloutRole, "generate", tampered)
    run = tmp_path / "run"
    words = (*SHORT, *ON_POLICY, EXACT, "--engine.max_updates=1")
    output = run_to_its_end(forked_main, "train", config, "--out", run, *words, deadline_s=300)
    assert output.count("mismatch alarm from the first update on (1)") == 1
    assert 'engine.options.numerics is "exact"' in output


def test_the_alarm_of_exact_numerics_looks_at_the_largest_difference() -> None:
    alarm = MismatchAlarm(0.0, exact=True)
    assert not alarm.look(1, {EXACT_METRIC: Metric(value=0.0)})
    assert "differ by 1e-07 nats (largest |log r|" in alarm.look(2, {EXACT_METRIC: Metric(value=1e-7)})


def test_engines_compute_in_the_trainers_format(config: Path) -> None:
    checked = check_run(load_config(config, GrpoConfig, [EXACT, "--rollout.dtype=auto", "--engine.dtype=auto"]))
    assert checked.config.rollout.dtype == checked.config.engine.dtype == "float32"
    assert checked.config.rollout_engine("", 0).options["numerics"] == "exact"
    assert any("that of the trainer" in choice for choice in checked.choices)
    adapters = check_run(load_config(config, GrpoConfig, [EXACT, "--engine.lora_rank=4"]))
    assert adapters.lora_sync.what == "merged"


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("--rollout.dtype=bfloat16", "rollout.dtype = bfloat16 and engine.dtype = float32"),
        ("--rollout.weight_format=fp8", "weight_format"),
        ("--rollout.options.numerics=native", "rollout.options.numerics is decided by"),
        ("--engine.options.tensor_parallel=2", "tensor_parallel"),
    ],
)
def test_what_cannot_be_exact_is_refused_before_the_start(config: Path, word: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_run(load_config(config, GrpoConfig, [EXACT, "--engine.dtype=float32", "--engine.num_ranks=2", word]))


def test_other_engines_are_refused_by_name(config: Path) -> None:
    from grpo_async_app._preflight.engines import check_numerics

    loaded = load_config(config, GrpoConfig, [EXACT, "--engine.dtype=float32", "--rollout.dtype=float32"])
    for section in ("engine", "rollout"):
        other = replace(loaded, **{section: replace(getattr(loaded, section), backend="another")})
        with pytest.raises(ConfigError, match=f'{section}.backend = "another": set it to torch'):
            check_numerics(other)

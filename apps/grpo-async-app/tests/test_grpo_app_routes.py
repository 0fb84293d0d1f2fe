"""Replayed routes: with them a mixture's trainer and sampler differ no more than those of a dense model do."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpo_runs import Main, run_to_its_end, values_of

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._preflight.correction import choose_correction, route_bytes
from grpo_async_app._roles.batches import build_batches
from grpo_async_app._roles.groups import SampledGroup, load_groups, save_groups
from offbeat_core import (
    Completion,
    ConfigError,
    Floats,
    GenerateRequest,
    Reply,
    RolloutEngineConfig,
    Routes,
    SamplingParams,
    TrainEngineConfig,
    TrainSequence,
    Trajectory,
    load_config,
)
from offbeat_engine_torch import TorchTrainEngine
from offbeat_objectives import AlgorithmConfig
from offbeat_rollout_torch import TorchRolloutEngine
from offbeat_testing import CommandLine, small_grpo_run, tiny_model

EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
BFLOAT16 = ("--rollout.dtype=bfloat16", "--engine.dtype=bfloat16")
ON_POLICY = ("--async.staleness_threshold=0", "--async.partial_rollout=false")
SHORT = ("--eval.every_updates=0", "--checkpoint.every=1")


def write_model(folder: Path, family: Any, **config: int) -> Path:
    """Weights large enough that bfloat16 moves some scores of experts past those of others."""
    return tiny_model(folder / family, family, num_layers=4, spread=0.2, config=config)


async def log_ratios(folder: Path) -> tuple[Floats, Floats]:
    """Log-ratios of trainer and sampler at sampled tokens, with the sampler's experts and with the trainer's own."""
    settings: dict[str, Any] = {"model_path": str(folder), "device": "cpu", "dtype": "bfloat16"}
    sampler = await TorchRolloutEngine.create(RolloutEngineConfig(**settings, return_routes=True, max_model_len=256))
    sequences, sampled = list[TrainSequence](), list[Completion]()
    for seed in range(8):
        prompt_ids = np.random.default_rng(seed).integers(5, 300, 30).astype(np.int32)
        params = SamplingParams(max_tokens=40, seed=seed, ignore_eos=True)
        request = GenerateRequest(request_id=str(seed), prompt_ids=prompt_ids, num_samples=4, params=params)
        completions = await sampler.generate(request)
        sampled += completions
        sequences += [Trajectory.of(each).to_sequence(prompt_ids) for each in completions]
    await sampler.close()
    trainer = TorchTrainEngine.create(TrainEngineConfig(**settings))

    def against(asked: Sequence[TrainSequence]) -> Floats:
        found = trainer.logprobs(asked)
        return np.concatenate(
            [array[s.loss_mask] - one.logprobs for array, s, one in zip(found, asked, sampled, strict=True)]
        )

    return against(sequences), against([replace(each, routes=()) for each in sequences])


def kl_nats(log_ratio_N: Floats) -> float:
    return float(np.mean(np.expm1(log_ratio_N) - log_ratio_N))


@pytest.mark.asyncio
async def test_with_the_samplers_experts_the_mismatch_of_a_mixture_is_that_of_a_dense_model(tmp_path: Path) -> None:
    replayed_N, own_N = await log_ratios(write_model(tmp_path, "qwen3_moe", **EXPERTS))
    dense_N, _ = await log_ratios(write_model(tmp_path, "qwen3"))
    assert kl_nats(own_N) > 2 * kl_nats(dense_N)  # measured: 2.4e-3, 9.7e-4
    assert kl_nats(replayed_N) < kl_nats(dense_N)  # 2.2e-4
    assert abs(own_N).max() > 2 * abs(dense_N).max() > 2 * abs(replayed_N).max()  # 0.73, 0.26, 0.11 nats


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    """A run of a mixture in bfloat16."""
    folder = tmp_path / "mixture"
    folder.mkdir()
    return small_grpo_run(folder, write_model(folder, "qwen3_moe", **EXPERTS))


def test_a_run_replays_by_default_and_measures_where_routes_differ(
    forked_main: Main, mixture: Path, tmp_path: Path
) -> None:
    kl = {}
    for how in ("auto", "measure"):
        run = tmp_path / how
        words = (*BFLOAT16, *SHORT, *ON_POLICY, "--engine.learning_rate=0", f"--rollout.replay_routes={how}")
        run_to_its_end(forked_main, "train", mixture, "--out", run, *words, "--algorithm.correction=none")
        assert all(0 < share < 0.5 for share in values_of(run, "mismatch/routes_differ").values())
        for tokens in ("same_routes", "other_routes"):
            assert values_of(run, f"mismatch/kl_{tokens}")
        kl[how] = float(np.mean(list(values_of(run, "mismatch/kl_lag0").values())))
    assert kl["auto"] < kl["measure"] / 2
    apart = tmp_path / "measure"
    same, other = (
        np.mean(list(values_of(apart, f"mismatch/kl_{each}").values())) for each in ("same_routes", "other_routes")
    )
    assert same < other


def test_a_resumed_run_replays(forked_main: Main, mixture: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_to_its_end(forked_main, "train", mixture, "--out", run, *SHORT, "--engine.max_updates=1")
    run_to_its_end(forked_main, "resume", run, "--engine.max_updates=2")
    assert set(values_of(run, "mismatch/routes_differ")) == {1, 2}


def test_what_can_be_replayed_is_and_a_wish_that_cannot_be_is_refused(mixture: Path, config: Path) -> None:
    def chosen(file: Path, *words: str) -> tuple[str, list[str]]:
        settled, said = choose_correction(load_config(file, GrpoConfig, ("--rollout.backend=torch", *words)))
        return settled.rollout.replay_routes, [line for line in said if "replay_routes" in line]

    same = "the trainer takes the experts that engines say tokens took, where both can"
    assert chosen(mixture) == ("auto", [f"rollout.replay_routes = auto ({same})"])
    assert chosen(mixture, "--rollout.replay_routes=measure")[0] == "measure"
    assert chosen(mixture, "--rollout.replay_routes=off") == chosen(config) == ("off", [])
    silent = "rollout.backend = trtllm does not say which experts tokens took"
    assert chosen(mixture, "--rollout.backend=trtllm") == ("off", [f"rollout.replay_routes = off ({silent})"])
    with pytest.raises(ConfigError, match=r"replay_routes = on, and rollout\.backend = trtllm does not say"):
        chosen(mixture, "--rollout.backend=trtllm", "--rollout.replay_routes=on")
    with pytest.raises(ConfigError, match="replay_routes = measure, and the model has no experts"):
        chosen(config, "--rollout.replay_routes=measure")


def test_a_plan_counts_the_bytes_of_routes(mixture: Path, config: Path, command: CommandLine) -> None:
    assert route_bytes(load_config(mixture, GrpoConfig).model.path) == 4 * 4
    assert "16 bytes a token, at most" in command("plan", mixture).out
    assert "bytes a token" not in command("plan", config).out


def group_of(*turns: Completion) -> SampledGroup:
    """Two samples that are alike, of these turns."""
    replies = (Reply(ids=np.array([6], np.int32)),) * (len(turns) - 1)
    return SampledGroup(
        group_id=0,
        item=0,
        prompt_ids=np.arange(3, dtype=np.int32),
        trajectories=[Trajectory(turns=turns, replies=replies)] * 2,
        rewards=[0.0, 1.0],
        parts=[{}, {}],
    )


def routed_turn(ids_TLK: Any, start: int = 0) -> Completion:
    return Completion.join([3, 4, 5], [-1.0] * 3, [(0, 3)], "eos", "", Routes.pack(ids_TLK, start=start))


def test_routes_survive_a_checkpoint_and_older_checkpoints_have_none(tmp_path: Path) -> None:
    ids_TLK = np.random.default_rng(0).integers(-1, 4, (5, 2, 2))
    turns = routed_turn(ids_TLK), routed_turn(ids_TLK, start=5)
    save_groups(tmp_path, [group_of(*turns)])
    for trajectory in load_groups(tmp_path)[0].trajectories:
        for old, new in zip(turns, trajectory.turns, strict=True):
            assert old.routes is not None
            assert new.routes is not None
            assert new.routes.unpack().tolist() == old.routes.unpack().tolist()
            assert (new.routes.start, new.routes.shape) == (old.routes.start, old.routes.shape)
    index = json.loads((tmp_path / "buffer.json").read_bytes())
    for described in (turn for trajectory in index[0]["trajectories"] for turn in trajectory["turns"]):
        del described["routes"]
    (tmp_path / "buffer.json").write_text(json.dumps(index))
    assert load_groups(tmp_path)[0].trajectories[0].turns[0].routes is None


def test_a_critic_is_given_no_routes_of_the_policy() -> None:
    seen: dict[str, list[bool]] = {}

    class Engine:
        def __init__(self, name: str) -> None:
            self.name = name

        def logprobs(self, sequences: list[TrainSequence], *, reference: bool = False) -> list[Floats]:
            seen[self.name] = [bool(sequence.routes) for sequence in sequences]
            return [-sequence.loss_mask.astype(np.float32) for sequence in sequences]

    group = group_of(routed_turn(np.zeros((5, 1, 1), int)))
    engine: Any = Engine("policy")
    critic: Any = Engine("critic")
    config = AlgorithmConfig(advantage="gae")
    for keeps in (True, False):
        [[first, _]], _ = build_batches([group], config, engine, 1, critic=critic, keeps_routes=keeps)
        assert seen == {"policy": [keeps] * 2, "critic": [False] * 2}
        assert bool(first.routes) is keeps

"""PPO with a critic: it learns, alone at first, on any number of ranks, and a resumed run has the one it left."""

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grpo_runs import Main, latest_checkpoint, run_to_its_end, values_of
from role_faults import signal_role
from safetensors.torch import load_file
from test_grpo_app_parts import FixedLogprobs, group

from grpo_async_app._config.resolved import resolve
from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._preflight.settings import check_settings
from grpo_async_app._roles.batches import build_batches
from grpo_async_app._roles.groups import SampledGroup
from offbeat_core import Completion, ConfigError, TrainEngineConfig, TrainSequence, Trajectory, load_config
from offbeat_engine_torch import TorchTrainEngine
from offbeat_objectives import AlgorithmConfig
from offbeat_testing import CommandLine, RunningCommand, tiny_model

GAE = ("--algorithm.advantage=gae", "--critic.learning_rate=1e-2", "--eval.every_updates=0")
# On policy and greedy enough to be the same run each time: the groups of an update are those of its prompts.
SYNCHRONOUS = ("--async.staleness_threshold=0", "--async.partial_rollout=false", "--rollout.seed=7")


class RisingValues:
    """A critic that says 0.1 at the first loss token, 0.2 at the second, and so on."""

    def logprobs(self, sequences: list[TrainSequence], *, reference: bool = False) -> list[Any]:
        return [0.1 * np.cumsum(each.loss_mask).astype(np.float32) * each.loss_mask for each in sequences]


def test_advantages_and_returns_are_those_of_the_values_before_each_token() -> None:
    config = AlgorithmConfig(advantage="gae", gae_lambda=0.5, options={"normalise": False})
    critic: Any = RisingValues()
    engine: Any = FixedLogprobs()
    [[first, second]], metrics = build_batches(
        [group(0, [3, 1], [1.0, 0.0])], config, engine, 1, critic=critic, critic_lambda=1.0
    )
    # δ = 0.1, 0.1, 0.7 with values 0.1, 0.2, 0.3 and a reward of 1 at the end
    np.testing.assert_allclose(first.extras["advantages"][first.loss_mask], [0.325, 0.45, 0.7], atol=1e-6)
    np.testing.assert_allclose(first.extras["returns"][first.loss_mask], [1.0, 1.0, 1.0], atol=1e-6)
    np.testing.assert_allclose(first.extras["values"][first.loss_mask], [0.1, 0.2, 0.3], atol=1e-6)
    np.testing.assert_allclose(second.extras["advantages"][second.loss_mask], [-0.1], atol=1e-6)
    left, wanted = np.array([0.9, 0.8, 0.7, -0.1]), np.array([1.0, 1.0, 1.0, 0.0])
    assert metrics["critic/explained_variance"].value == pytest.approx(1 - left.var() / wanted.var(), abs=1e-5)


def test_what_a_critic_explains_is_measured_where_it_learns() -> None:
    config = AlgorithmConfig(advantage="gae", gamma=0.9, mask_truncated=True)
    critic: Any = RisingValues()
    engine: Any = FixedLogprobs()
    whole, cut = branched(1.0, trajectory(3)), branched(0.0, trajectory(4, "cut_off"))
    _, alone = build_batches([whole], config, engine, 1, critic=critic)
    _, both = build_batches([whole, cut], config, engine, 1, critic=critic)
    assert both["critic/explained_variance"] == alone["critic/explained_variance"]
    _, nothing = build_batches([cut], config, engine, 1, critic=critic)
    assert "critic/explained_variance" not in nothing


def trajectory(num_tokens: int, ended: str = "done", prompt: list[int] | None = None) -> Trajectory:
    turn = Completion.join(list(range(5, 5 + num_tokens)), [-1.0] * num_tokens, [(0, num_tokens)], "eos", "x")
    own = None if prompt is None else np.array(prompt, np.int32)
    return Trajectory(turns=(turn,), prompt_ids=own, ended=ended)  # type: ignore[arg-type]


def branched(reward: float, *trajectories: Trajectory) -> SampledGroup:
    """One sample whose agent has branched."""
    return SampledGroup(
        group_id=0,
        item=0,
        prompt_ids=np.array([1, 2], np.int32),
        trajectories=list(trajectories),
        rewards=[reward],
        parts=[{}],
        sizes=[len(trajectories)],
    )


class SameValues:
    """A critic that says one number at every loss token, and another one at a token that is not of the trajectory."""

    def __init__(self, value: float, after: float = 0.0) -> None:
        self._value, self._after = value, after

    def logprobs(self, sequences: list[TrainSequence], *, reference: bool = False) -> list[Any]:
        found = [np.where(each.loss_mask, self._value, 0.0).astype(np.float32) for each in sequences]
        for values, sequence in zip(found, sequences, strict=True):
            if len(sequence.ids) > 1 and sequence.ids[-1] == sequence.ids[-2]:
                values[-1] = self._after
        return found


def looped(value: float, reward: float, length: int, gamma: float, lam: float, after: float = 0.0) -> list[float]:
    """Generalised advantages of one trajectory, by a loop over its tokens in float64."""
    found, running = [0.0] * length, 0.0
    for t in reversed(range(length)):
        is_last = t == length - 1
        delta = (reward if is_last else 0.0) + gamma * (after if is_last else value) - value
        running = delta + gamma * lam * running
        found[t] = running
    return found


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_every_branch_of_an_episode_ends_with_its_reward(value: float) -> None:
    """And the value after a branch is not that of the next conversation's first token."""
    config = AlgorithmConfig(advantage="gae", gamma=0.9, gae_lambda=0.8, options={"normalise": False})
    engine: Any = FixedLogprobs()
    critic: Any = SameValues(value)
    group = branched(1.0, trajectory(3), trajectory(4, prompt=[1, 2, 9]))
    [[first, second]], _ = build_batches([group], config, engine, 1, critic=critic, critic_lambda=1.0)
    for sequence, length in ((first, 3), (second, 4)):
        here = sequence.loss_mask
        np.testing.assert_allclose(sequence.extras["advantages"][here], looped(value, 1.0, length, 0.9, 0.8), atol=1e-6)
        np.testing.assert_allclose(sequence.extras["returns"][here], 0.9 ** np.arange(length - 1, -1, -1), atol=1e-6)


def test_every_branch_has_its_own_returns_without_a_critic() -> None:
    config = AlgorithmConfig(advantage="reinforce_plus_plus", gamma=0.9)
    engine: Any = FixedLogprobs()
    group = branched(1.0, trajectory(3), trajectory(4, prompt=[1, 2, 9]))
    [[first, second]], _ = build_batches([group], config, engine, 1)
    returns = np.array([0.81, 0.9, 1.0, 0.729, 0.81, 0.9, 1.0])
    wanted = (returns - returns.mean()) / returns.std()
    found = np.concatenate([each.extras["advantages"][each.loss_mask] for each in (first, second)])
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_a_penalty_in_the_reward_stays_within_its_branch() -> None:
    config = AlgorithmConfig(
        advantage="gae", gae_lambda=1.0, kl_coefficient=0.1, kl_in="reward", options={"normalise": False}
    )
    engine: Any = FixedLogprobs()  # log-probability -1, of the reference -2: k1 is 1 nat a token
    critic: Any = SameValues(0.0)
    group = branched(1.0, trajectory(2), trajectory(1, prompt=[1, 2, 9]))
    [[first, second]], _ = build_batches([group], config, engine, 1, critic=critic)
    np.testing.assert_allclose(first.extras["returns"][first.loss_mask], [0.8, 0.9], atol=1e-6)
    np.testing.assert_allclose(second.extras["returns"][second.loss_mask], [0.9], atol=1e-6)


@pytest.mark.parametrize("bootstraps", [False, True])
def test_what_was_cut_off_goes_on_with_the_critics_value(bootstraps: bool) -> None:
    config = AlgorithmConfig(advantage="gae", gamma=0.9, gae_lambda=0.8, options={"normalise": False})
    engine: Any = FixedLogprobs()
    critic: Any = SameValues(0.5, after=0.3)
    group = branched(0.0, trajectory(3, "cut_off"), trajectory(4, prompt=[1, 2, 9]))
    [[cut, ended]], _ = build_batches(
        [group], config, engine, 1, critic=critic, critic_lambda=1.0, bootstrap_truncated=bootstraps
    )
    after = 0.3 if bootstraps else 0.0
    here = cut.loss_mask
    np.testing.assert_allclose(cut.extras["advantages"][here], looped(0.5, 0.0, 3, 0.9, 0.8, after), atol=1e-6)
    np.testing.assert_allclose(cut.extras["returns"][here], after * 0.9 ** np.array([3, 2, 1]), atol=1e-6)
    of_ended = ended.extras["advantages"][ended.loss_mask]
    np.testing.assert_allclose(of_ended, looped(0.5, 0.0, 4, 0.9, 0.8), atol=1e-6)
    assert len(cut.ids) == len(cut.loss_mask) == 5, "what the critic is asked is not what is trained"


def test_the_value_after_the_last_token_is_the_heads_answer_at_that_token(model: Path) -> None:
    """A real critic gives it in the same pass: the values before each token stay what they are."""
    settings = TrainEngineConfig(model_path=str(model), head="score", device="cpu", dtype="float32", total_steps=1)
    critic, engine = TorchTrainEngine.create(settings), FixedLogprobs()
    config = AlgorithmConfig(advantage="gae", gae_lambda=1.0, options={"normalise": False})
    trainer: Any = engine
    group = branched(0.0, trajectory(3, "cut_off"), trajectory(4, "cut_off", prompt=[1, 2, 9]))
    [plain], _ = build_batches([group], config, trainer, 1, critic=critic)
    [cut], _ = build_batches([group], config, trainer, 1, critic=critic, bootstrap_truncated=True)
    for before, with_value in zip(plain, cut, strict=True):
        here = before.loss_mask
        np.testing.assert_allclose(with_value.extras["values"][here], before.extras["values"][here], atol=1e-6)
        longer = replace(
            before, ids=np.append(before.ids, np.int32(7)), loss_mask=np.append(before.loss_mask, True), extras={}
        )
        [answers] = critic.logprobs([longer])
        # γ = λ = 1 and no reward: every return is the value after the last token.
        np.testing.assert_allclose(with_value.extras["returns"][here], answers[-1], atol=1e-5)
        assert abs(answers[-1]) > 1e-3, "a head that says 0 shows nothing"


def test_a_critic_learns_alone_at_first_and_is_kept_in_checkpoints(
    forked_main: Main, config: Path, tmp_path: Path, model: Path
) -> None:
    run = tmp_path / "run"
    words = [*GAE, "--critic.warmup_updates=3", "--checkpoint.every=3", "--engine.learning_rate=1e-2"]
    printed = run_to_its_end(forked_main, "train", config, "--out", run, *words)
    assert "alone for 3 updates" in " ".join(printed.split())
    losses = values_of(run, "critic/loss")
    assert sorted(losses) == [1, 2, 3, 4, 5]
    assert sorted(values_of(run, "train/loss")) == [4, 5], "the policy was trained in the critic's warm-up"
    assert min(losses[4], losses[5]) < losses[1], losses
    assert sorted(values_of(run, "critic/explained_variance")) == sorted(losses)
    start = load_file(model / "model.safetensors")
    for number, trained in ((3, False), (5, True)):
        folder = run / "checkpoints" / f"step-{number:06d}"
        held = load_file(folder / "model.safetensors")
        same = all(torch.equal(held[name], start[name]) for name in start if name in held)
        assert same != trained, f"update {number}"
        assert "score.weight" in load_file(folder / "critic" / "model.safetensors")
    report = (run / "report.html").read_text()
    assert "What the critic explains" in report


def test_a_run_that_was_begun_without_a_critic_goes_on_without_one(
    forked_main: Main, command: CommandLine, config: Path, tmp_path: Path
) -> None:
    run_to_its_end(forked_main, "train", config, "--out", tmp_path / "run", "--engine.max_updates=1")
    ended = command("resume", tmp_path / "run", *GAE)
    assert ended.code == 2
    assert "needs the critic of the run" in ended.err
    assert 'advantage = "grpo"' in (tmp_path / "run" / "config.toml").read_text(), "the next resume is refused, too"


def test_two_ranks_train_the_critic_as_one_process_does(forked_main: Main, config: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        words = [*GAE, *SYNCHRONOUS, f"--engine.num_ranks={number}", "--critic.gae_lambda=1"]
        run_to_its_end(forked_main, "train", config, "--out", tmp_path / str(number), *words)
    one, two = (load_file(latest_checkpoint(tmp_path / n).path / "critic" / "model.safetensors") for n in ("1", "2"))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-4, msg=name)


@pytest.mark.nightly
def test_a_run_whose_trainer_is_killed_goes_on_with_the_critic_of_its_checkpoint(
    forked_main: Main, config: Path, tmp_path: Path
) -> None:
    words = [*GAE, *SYNCHRONOUS, "--checkpoint.every=1"]
    plain, killed = tmp_path / "plain", tmp_path / "killed"
    run_to_its_end(forked_main, "train", config, "--out", plain, *words)
    with RunningCommand(forked_main, "train", config, "--out", killed, *words) as process:
        process.wait_until(lambda: len(values_of(killed, "critic/loss")) >= 2, "two updates")
        signal_role(process, "trainer-0", signal.SIGKILL)
        assert process.wait() == 0, process.output
    for part in ("model.safetensors", "critic/model.safetensors"):
        first, second = (load_file(latest_checkpoint(run).path / part) for run in (plain, killed))
        for name, tensor in first.items():
            torch.testing.assert_close(second[name], tensor, rtol=0, atol=1e-5, msg=f"{part}: {name}")


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_the_quickstart_is_learned_with_a_critic(forked_main: Main, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["--algorithm.advantage=gae", "--critic.learning_rate=2e-3", "--critic.warmup_updates=40"]
    words += ["--algorithm.gae_lambda=1", "--algorithm.filter_groups=false", "--engine.max_updates=120"]
    words += ["--engine.learning_rate=2.5e-4", "--engine.min_learning_rate_ratio=0.1", "--eval.every_updates=20"]
    with RunningCommand(forked_main, "quickstart", "--out", run, *words) as process:
        assert process.wait(1200) == 0, process.output
    accuracy = values_of(run, "eval/accuracy")
    assert accuracy[0] == accuracy[20] <= 0.55, "the policy learns nothing while the critic does so alone"
    assert accuracy[120] >= 0.8, accuracy
    explained = list(values_of(run, "critic/explained_variance").values())
    assert explained[0] < 0.02 < 0.05 < np.mean(explained[20:40]), explained[:40]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--critic.clip=0.5"], 'section critic has no effect without algorithm.advantage = "gae"'),
        (["--algorithm.advantage=gae", "--critic.path=/nowhere"], "/nowhere"),
        (["--algorithm.advantage=gae", "--critic.warmup_updates=5"], "leaves nothing for the policy"),
        (["--algorithm.advantage=gae", "--critic.backend=nothing"], "nothing"),
        (["--algorithm.advantage=gae", "--critic.options={pages = 3}"], "pages"),
        (
            ["--algorithm.advantage=gae", "--critic.bootstrap_truncated=true", "--rollout.max_model_len=MOST"],
            "asks for a value after rollout.max_model_len",
        ),
    ],
)
def test_a_critic_that_cannot_be_is_refused_in_one_line(
    command: CommandLine, config: Path, model: Path, words: list[str], said: str
) -> None:
    most = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    ended = command("plan", config, *(word.replace("MOST", str(most)) for word in words))
    assert ended.code == 2
    assert said in ended.err
    assert "Traceback" not in ended.err


def test_a_critic_with_another_tokenizer_is_refused(command: CommandLine, config: Path, tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "other")
    held = json.loads((other / "tokenizer.json").read_text())
    vocabulary = held["model"]["vocab"]
    one, two = list(vocabulary)[20:22]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    (other / "tokenizer.json").write_text(json.dumps(held))
    ended = command("plan", config, "--algorithm.advantage=gae", f"--critic.path={other}")
    assert ended.code == 2
    assert "another tokenizer" in ended.err


def test_the_plan_counts_the_critic(command: CommandLine, config: Path) -> None:
    with_critic, without = (
        " ".join(command("plan", config, f"--algorithm.advantage={name}").out.split()) for name in ("gae", "grpo")
    )
    assert "critic from the policy's weights and a new head, on the trainer's ranks" in with_critic
    assert "+ critic" in with_critic
    assert "critic" not in without
    planned = json.loads(command("plan", config, "--algorithm.advantage=gae", "--json").out)
    trainer = planned["memory_bytes"]["trainer"]
    assert trainer["critic"] == sum(trainer[name] for name in ("weights", "gradients", "optimizer"))


def test_a_critic_without_effect_is_refused_wherever_the_run_will_be(config: Path) -> None:
    with pytest.raises(ConfigError, match="section critic has no effect"):
        check_settings(resolve(load_config(config, GrpoConfig, ["--critic.clip=0.5"])))

"""A loss and an advantage of one's own, as docs/losses.md has them, in real runs; rewards by name, which GDPO reads."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpo_runs import values_of

from grpo_async_app._roles.batches import build_batches
from grpo_async_app._roles.groups import SampledGroup
from offbeat_core import Completion, TrainSequence, Trajectory, VersionSegment
from offbeat_objectives import AlgorithmConfig
from offbeat_testing import CommandLine

PAGE = Path(__file__).parents[3] / "docs" / "losses.md"
FAULTY = """
from offbeat_objectives import Advantages, Surrogate


def not_masked(tokens, config):
    advantages_N = tokens.advantages_N - tokens.advantages_N.mean()
    return Surrogate(objective_N=advantages_N * tokens.logprobs_N, ratio_N=tokens.log_ratio().exp().detach())


def of_samples(samples, config):
    return Advantages(advantages_N=samples.rewards_S)
"""


def test_the_pages_examples_train_and_what_they_measure_is_in_the_metrics(
    command: CommandLine, config: Path, own_module: Callable[[str, str], None], tmp_path: Path
) -> None:
    examples = [code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "my_losses.py" in code]
    assert len(examples) == 2
    own_module("my_losses", "\n\n".join(examples))
    words = ["--algorithm.loss=my_losses:bounded", "--algorithm.advantage=my_losses:by_difficulty"]
    words += ["--algorithm.options", "{most = 1.5, off_policy_mask = 0.5}", "--engine.max_updates=2"]
    planned = command("plan", config, *words)
    assert planned.code == 0, planned.err
    output = " ".join(planned.out.split())
    assert "my_losses:bounded: finite, with a gradient, rejected tokens without influence" in output
    assert "my_losses:by_difficulty: finite, also for equal rewards" in output
    run = tmp_path / "run"
    ended = command("train", config, "--out", run, *words)
    assert ended.code == 0, ended.err
    for metric in ("objective/bounded", "objective/off_policy_mask", "advantage/hard"):
        values = values_of(run, metric)
        assert list(values) == [1, 2], metric
        assert all(0 <= value <= 1 for value in values.values()), metric


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--algorithm.loss=faulty:not_masked"], "failed the check 'rejected tokens without influence'"),
        (["--algorithm.advantage=faulty:of_samples"], "failed the check 'shape' on random data: advantages_N is (12,)"),
        (["--algorithm.advantage=gdpo"], "normalises each of several rewards by itself: name at least two"),
        (["--algorithm.advantage=pass_at_k", "--algorithm.options={k = 3}"], "more than the 2 samples of one prompt"),
    ],
)
def test_what_cannot_train_is_told_before_anything_starts(
    command: CommandLine, config: Path, own_module: Callable[[str, str], None], words: list[str], said: str
) -> None:
    own_module("faulty", FAULTY)
    ended = command("plan", config, *words)
    assert ended.code == 2, ended.out
    assert said in " ".join(ended.err.split())
    assert "Traceback" not in ended.err


class NotAsked:
    """An engine that is not asked."""

    def logprobs(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("the ratio is 1 by construction")


def _group(parts: list[dict[str, float]]) -> SampledGroup:
    completion = Completion(
        ids=np.arange(2, dtype=np.int32),
        logprobs=np.full(2, -1.0, np.float32),
        segments=(VersionSegment(version=0, num_tokens=2),),
        stop_reason="eos",
        text="",
    )
    return SampledGroup(
        group_id=0,
        item=0,
        prompt_ids=np.zeros(3, np.int32),
        trajectories=[Trajectory.of(completion) for _ in parts],
        rewards=[sum(each.values()) for each in parts],
        parts=parts,
    )


def _advantages(sequences: list[TrainSequence]) -> list[float]:
    return [float(sequence.extras["advantages"][sequence.loss_mask][0]) for sequence in sequences]


def test_gdpo_sees_every_reward_of_a_sample_by_its_name() -> None:
    """Better in the narrow reward and better in the wide one get the same advantage; the sum would not say so."""
    parts = [{"wide": wide, "narrow": narrow} for wide, narrow in ((100.0, 0.0), (0.0, 1.0), (0.0, 0.0))]
    config, weights = AlgorithmConfig(advantage="gdpo"), {"wide": 1.0, "narrow": 1.0}
    [sequences], _ = build_batches(
        [_group(parts)],
        config,
        NotAsked(),  # type: ignore[arg-type]
        1,
        single_step=True,
        reward_weights=weights,
    )
    first, second, third = _advantages(sequences)
    assert first == pytest.approx(second, rel=1e-4)
    assert third < 0 < first

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for pictured_sequences

import numpy as np
import pytest
import torch

from offbeat_core import TrainSequence
from offbeat_testing import tiny_model

torch.set_num_threads(1)


def groups(num_prompts=3, samples=4, *, seed=0, vocabulary=300, prompt=(2, 14), completion=(1, 9)):
    """Sequences in groups of one prompt; some completions are one token, one prompt stands alone."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(num_prompts):
        head = rng.integers(3, vocabulary, rng.integers(*prompt))
        for _ in range(samples if number else 1):
            ids = np.concatenate([head, rng.integers(3, vocabulary, rng.integers(*completion))]).astype(np.int32)
            mask = np.arange(len(ids)) >= len(head)
            mask[len(head) + 1 :: 3] = False  # holes, as after a tool's answer
            extras = {"advantage": rng.normal(size=len(ids)).astype(np.float32)}
            made.append(TrainSequence(ids=ids, loss_mask=mask, extras=extras))
    return [made[i] for i in rng.permutation(len(made))]


def weighted(tokens):
    """A loss of a policy gradient's shape, with a constant of its own per token."""
    return -(tokens.logprobs_N * tokens.extras["advantage"]).sum() / tokens.total_tokens, {}


@pytest.fixture(scope="session")
def make_groups():
    return groups


@pytest.fixture(scope="session")
def weighted_loss():
    return weighted


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("engine-torch") / "qwen3", "qwen3", hidden_size=32)

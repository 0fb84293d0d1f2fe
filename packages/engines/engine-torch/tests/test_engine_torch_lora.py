"""Adapters of the running policy: their scale, and the first policy beside them."""

import numpy as np

from offbeat_core import TrainEngineConfig
from offbeat_engine_torch import TorchTrainEngine


def trained(folder, make_groups, loss, **changes):
    """An engine after two steps."""
    settings = {"learning_rate": 1e-2, "lora_rank": 4, **changes}
    engine = TorchTrainEngine.create(TrainEngineConfig(model_path=str(folder), device="cpu", **settings))
    for seed in range(2):
        engine.forward_backward(make_groups(num_prompts=2, seed=seed), loss)
        engine.step()
    return engine


def test_the_scale_is_twice_the_rank_over_the_rank_unless_set(model_folder, make_groups, weighted_loss):
    asked = make_groups(num_prompts=2, seed=9)
    usual, same, other = (
        trained(model_folder, make_groups, weighted_loss, **changes).logprobs(asked)
        for changes in ({}, {"lora_alpha": 8.0}, {"lora_alpha": 4.0})
    )
    for one, another, third in zip(usual, same, other, strict=True):
        np.testing.assert_array_equal(one, another)
        assert np.abs(one - third).max() > 1e-4


def test_the_first_policy_is_the_base_without_adapters(model_folder, make_groups, weighted_loss):
    asked = make_groups(num_prompts=2, seed=9)
    engine = trained(model_folder, make_groups, weighted_loss)
    base = TorchTrainEngine.create(TrainEngineConfig(model_path=str(model_folder), device="cpu"))
    answers = (engine.logprobs(asked, reference=True), base.logprobs(asked), engine.logprobs(asked))
    for reference, wanted, now in zip(*answers, strict=True):
        np.testing.assert_array_equal(reference, wanted)
        assert np.abs(reference - now).max() > 1e-4


def test_new_adapters_are_those_of_the_seed(model_folder):
    def drawn(seed):
        config = TrainEngineConfig(model_path=str(model_folder), device="cpu", lora_rank=4, seed=seed)
        return dict(TorchTrainEngine.create(config).weights(part="adapter"))

    first, same, other = drawn(1), drawn(1), drawn(2)
    for name, tensor in first.items():
        np.testing.assert_array_equal(tensor, same[name])
        assert bool((tensor != other[name]).any()) == ("lora_A" in name), name

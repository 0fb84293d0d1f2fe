"""Options of OpenRLHF keep what they mean there, or it is reported; read in its source at the commit named."""

import pytest
from import_meaning import holds

from grpo_async_app._imports.openrlhf import import_openrlhf


@pytest.mark.parametrize(
    ("options", "expected", "remarks"),
    [
        ({"train.max_epochs": 2}, {"algorithm.num_passes": 2}, {"train.max_epochs": "keep their order"}),
        ({"algo.kl.use_loss": True}, {"algorithm.kl_in": "loss", "algorithm.kl_ratio_weight": False}, {}),
        (
            {"algo.kl.use_loss": True, "algo.kl.estimator": "k2", "algo.kl.unbiased_gradient": True},
            {"algorithm.kl_estimator": "k2", "algorithm.kl_ratio_weight": True},
            {},
        ),
        ({}, {"algorithm.kl_in": "reward", "algorithm.kl_ratio_weight": None, "algorithm.num_passes": 1}, {}),
        (
            {"algo.advantage.estimator": "reinforce", "algo.advantage.gamma": 0.9},
            {"algorithm.advantage": "reinforce_plus_plus", "algorithm.gamma": 0.9},
            {},
        ),
        (
            {"algo.advantage.estimator": "group_norm", "algo.advantage.gamma": 0.9},
            {"algorithm.gamma": None},
            {"algo.advantage.gamma": "set to 1 there too"},
        ),
        (
            {"algo.advantage.estimator": "reinforce_baseline"},
            {"algorithm.advantage": "reinforce_plus_plus_baseline"},
            {},
        ),
        (
            {"algo.advantage.estimator": "reinforce_baseline", "algo.advantage.no_std_norm": True},
            {"algorithm.advantage": "dr_grpo"},
            {"algo.advantage.no_std_norm": "mean over the batch"},
        ),
        (
            {"algo.advantage.estimator": "group_norm", "algo.advantage.no_std_norm": True},
            {"algorithm.advantage": "grpo"},
            {"algo.advantage.no_std_norm": "no effect"},
        ),
        (
            {"algo.advantage.no_std_norm": True},
            {"algorithm.advantage": "gae", "algorithm.options": {"normalise": False}},
            {"algo.advantage.no_std_norm": "mean over the batch"},
        ),
        (
            {"algo.advantage.estimator": "reinforce", "algo.advantage.no_std_norm": True},
            {"algorithm.advantage": "reinforce_plus_plus", "algorithm.options": None},
            {"algo.advantage.no_std_norm": "divided by"},
        ),
    ],
)
def test_passes_discounts_and_the_weight_of_the_penalty_come_from_openrlhf(
    options: dict[str, object], expected: dict[str, object], remarks: dict[str, str]
) -> None:
    holds(import_openrlhf(options), expected, remarks)


@pytest.mark.parametrize(
    ("options", "expected", "remarks"),
    [
        (
            {"reward.model_name_or_path": "/judge", "data.max_len": 4096},
            {"reward.name": "reward_model", "reward.reward_model.path": "/judge", "critic.path": "/judge"}
            | {"reward.reward_model.dtype": "bfloat16", "reward.reward_model.max_tokens": 4096},
            {"reward.model_name_or_path": "reads the policy's tokens there"},
        ),
        (
            {"reward.model_name_or_path": "/judge", "critic.model_name_or_path": "/critic"},
            {"reward.name": "reward_model", "critic.path": "/critic"},
            {},
        ),
        (
            {"reward.model_name_or_path": "/judge", "reward.remote_url": "f.py"},
            {"reward.name": "f.py:reward_func", "reward.reward_model.path": None, "critic.path": None},
            {"reward.model_name_or_path": "not read there"},
        ),
    ],
)
def test_a_reward_model_of_openrlhf_is_ours_and_what_the_critic_starts_from(
    options: dict[str, object], expected: dict[str, object], remarks: dict[str, str]
) -> None:
    holds(import_openrlhf(options), expected, remarks)

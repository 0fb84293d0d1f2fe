"""What is refused before a run, and what is let through with a word."""

from dataclasses import fields, replace

import pytest

from offbeat_core import METADATA_KEY, ConfigError
from offbeat_objectives import AlgorithmConfig, check_algorithm
from offbeat_objectives._config.algorithm import COMPARING_ADVANTAGES, CORRECTIONS, LOSS_KINDS

TAUGHT = {"advantage": "none", "distillation_coefficient": 1.0}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"advantage": "gpro"}, "one of grpo"),
        ({"gamma": 0.9}, "gamma = 0.9 has no effect"),
        ({"gae_lambda": 0.9}, "gae_lambda has no effect"),
        ({"loss": "ppo"}, "a function as module:function: got 'ppo'; nearest: "),
        ({"loss": "no_such_module:loss"}, "importing no_such_module failed"),
        ({"loss": "math:sine"}, "has no function 'sine'; nearest: sin"),
        ({"loss": "sapo", "clip_low": 0.2}, "soft gates"),
        ({"loss": "sapo", "clip_high": 0.2}, "soft gates"),
        ({"loss": "kl_cov", "clip_low": 0.2}, "holds back by a penalty"),
        ({"loss": "gpg", "clip_high": 0.2}, "gpg has no ratio"),
        ({"loss": "clip_cov", "clip_low": 1.5}, "at most 1"),
        ({"loss": "dppo_tv", "fixed_length": 9, "clip_high": 1.0}, "bound a probability"),
        ({"loss": "dppo_kl"}, "that of dppo_kl, needs fixed_length"),
        ({"advantage": "no_such_module:advantage"}, "importing no_such_module failed"),
        ({"advantage": "math:sine"}, "has no function 'sine'; nearest: sin"),
        ({"advantage": "gdpo", "overlong_buffer_tokens": 8}, "one of reward.weights"),
        ({"advantage": "gdpo", "kl_coefficient": 0.1, "kl_in": "reward"}, "use kl_in = loss"),
        ({"clip_low": 1.5}, "at most 1"),
        ({"loss": "gspo", "dual_clip": 3.0}, "dual_clip has no effect"),
        ({"dual_clip": 0.5}, "> 1"),
        ({"options": {"tau_positive": 1.0}}, "tau_positive has no effect with loss = ppo_clip and advantage = grpo"),
        ({"loss": "sapo", "options": {"tau_positive": "1"}}, "tau_positive must be float, got '1'"),
        ({"loss": "sapo", "options": {"tau_negative": 0.0}}, "option tau_negative must be "),
        ({"loss": "clip_cov", "options": {"cov_low": 6.0}}, "cov_low must be below cov_high"),
        ({"loss": "clip_cov", "options": {"cov_low": 2.0, "cov_high": 2.0}}, "cov_low must be below cov_high"),
        ({"loss": "kl_cov", "options": {"cov_share": 0.0}}, "option cov_share must be "),
        ({"advantage": "pass_at_k", "options": {"k": 9}}, "k = 9 of pass_at_k is more than the 8 samples"),
        ({"advantage": "pass_at_k", "options": {"k": 8}}, "every advantage is then 0"),
        ({"advantage": "pass_at_k", "options": {"k": "9"}}, "option k must be int"),
        ({"options": {"off_policy_mask": -1.0}}, "option off_policy_mask must be "),
        ({"aggregation": "fixed_length"}, "needs fixed_length"),
        ({"fixed_length": 100}, "fixed_length has no effect"),
        ({"kl_estimator": "k2"}, "kl_coefficient is 0"),
        ({"kl_in": "reward"}, "kl_coefficient is 0"),
        ({"kl_ratio_weight": True}, "kl_coefficient is 0"),
        ({"kl_coefficient": 0.1, "kl_in": "reward", "kl_ratio_weight": False}, "with kl_in = reward"),
        ({"num_passes": 0}, "num_passes"),
        ({"kl_coefficient": 0.1, "kl_estimator": "k1"}, "0 on average"),
        ({"kl_coefficient": float("nan")}, "finite"),
        ({"kl_coefficient": -1.0}, ">= 0"),
        ({"overlong_penalty_factor": 0.5}, "overlong_buffer_tokens is 0"),
        ({"overlong_buffer_tokens": 513}, "512: got 513"),
        ({"correction": "sequence_tis_token_tis"}, "one of auto, none, token_tis"),
        ({"correction": "none", "tis_cap": 2.0}, "tis_cap has no effect"),
        ({"correction": "geometric_rs", "tis_cap": 2.0}, "tis_cap has no effect"),
        ({"correction": "icepop", "tis_cap": 2.0}, "tis_cap has no effect"),
        ({"correction": "token_tis", "tis_cap": 1e9}, "never cuts"),
        ({"correction": "token_tis", "tis_cap": 1e-9}, "every weight the same"),
        ({"correction": "token_tis_token_rs", "tis_cap": 2.5}, "never cuts"),
        ({"correction": "sequence_tis_sequence_rs", "tis_cap": 2.0}, "never cuts"),
        ({"correction": "token_tis", "rs_low": 0.5}, "token_tis_geometric_rs"),
        ({"rs_high": 2.0}, "rejects nothing"),
        ({"correction": "none", "normalise_weights": True}, "no weights"),
        ({"correction": "token_rs", "normalise_weights": True}, "no weights"),
        ({"correction": "token_rs", "rs_low": 0.0, "rs_high": 1e9}, "holds every r"),
        ({"correction": "geometric_rs", "rs_low": 0.0, "rs_high": 1e9}, "holds every r"),
        ({"correction": "icepop", "rs_low": 0.0, "rs_high": 1e9}, "holds every r"),
        ({"correction": "token_rs", "rs_low": 1.5}, "enclose 1"),
        ({"correction": "token_rs", "rs_high": 0.9, "rs_low": 0.1}, "enclose 1"),
        ({"correction": "geometric_rs", "rs_low": 1.0, "rs_high": 1.0}, "enclose 1"),
        ({"distillation_discount": 1.0}, "distillation_discount has no effect"),
        ({"distillation_coefficient": -1.0}, ">= 0"),
        ({"advantage": "none"}, "set one of them"),
        ({**TAUGHT, "filter_groups": True}, "does not learn from"),
        ({**TAUGHT, "overlong_buffer_tokens": 8}, "it changes rewards"),
        ({**TAUGHT, "kl_coefficient": 0.1, "kl_in": "reward"}, "use kl_in = loss"),
    ],
)
def test_what_cannot_work_or_does_nothing_is_refused_with_its_reason(changes, words):
    with pytest.raises(ConfigError) as error:
        check_algorithm(AlgorithmConfig(**changes), samples_per_prompt=8, max_tokens=512)
    assert words in str(error.value)
    assert str(error.value).startswith("algorithm.")
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"clip_low": 1.0},
        {"overlong_buffer_tokens": 512},
        {"advantage": "pass_at_k", "options": {"k": 7}},
        {"loss": "dppo_tv", "fixed_length": 512, "clip_high": 0.999},
        {"correction": "token_rs", "rs_low": 1.0},
        {"correction": "token_rs", "rs_high": 1.0},
        {"correction": "token_tis_token_rs", "tis_cap": 1.999},
    ],
    ids=str,
)
def test_a_value_on_its_bound_is_taken(changes):
    assert check_algorithm(AlgorithmConfig(**changes), samples_per_prompt=8, max_tokens=512) == ()


@pytest.mark.parametrize("name", COMPARING_ADVANTAGES)
def test_one_sample_per_prompt_is_refused_where_samples_are_compared(name):
    with pytest.raises(ConfigError, match="at least 2: got 1"):
        check_algorithm(AlgorithmConfig(advantage=name), samples_per_prompt=1)


def test_one_sample_per_prompt_is_enough_elsewhere_but_not_for_filtering():
    for name in ("reinforce_plus_plus", "remax"):
        assert check_algorithm(AlgorithmConfig(advantage=name), samples_per_prompt=1) == ()
        with pytest.raises(ConfigError, match="filter_groups"):
            check_algorithm(AlgorithmConfig(advantage=name, filter_groups=True), samples_per_prompt=1)


@pytest.mark.parametrize("loss", LOSS_KINDS)
@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_bypass_form_takes_rejections_and_refuses_weights_that_would_count_twice(name, loss):
    length = 9 if loss.startswith("dppo") else None
    aggregation = "fixed_length" if length else "sequence_mean"
    config = AlgorithmConfig(
        loss=loss, correction=name, correction_form="bypass", aggregation=aggregation, fixed_length=length
    )
    if "tis" in name or name == "icepop":
        why = "are not computed" if loss == "gpg" else f"ratio of {loss} is already against the rollout policy"
        with pytest.raises(ConfigError, match=why):
            check_algorithm(config, samples_per_prompt=4)
    else:
        assert check_algorithm(config, samples_per_prompt=4) == ()


@pytest.mark.parametrize("name", CORRECTIONS)
def test_every_preset_works_with_its_defaults(name):
    assert check_algorithm(AlgorithmConfig(correction=name), samples_per_prompt=2) == ()


def test_the_two_parameter_sets_of_the_reference_recipe_pass():
    first = AlgorithmConfig(correction="sequence_tis_geometric_rs")
    assert check_algorithm(first, samples_per_prompt=8) == ()
    second = AlgorithmConfig(
        correction="sequence_tis_token_rs",
        tis_cap=2.0,
        normalise_weights=True,
        rs_low=0.6,
        rs_high=1.6,
        kl_coefficient=0.01,
    )
    assert check_algorithm(second, samples_per_prompt=4, max_tokens=2048) == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"correction": "sequence_tis_geometric_rs", "rs_low": 0.6, "rs_high": 1.6}, "usual for token_rs"),
        ({"correction": "token_rs", "rs_low": 0.999, "rs_high": 1.001}, "usual for geometric_rs"),
        ({"loss": "gspo", "aggregation": "token_mean"}, "sequence_mean"),
        ({"loss": "dppo_tv", "aggregation": "token_mean"}, "defined with fixed_length"),
        ({"advantage": "dr_grpo"}, "fixed_length"),
        ({"advantage": "reinforce_plus_plus", "filter_groups": True}, "could still learn"),
    ],
)
def test_what_works_but_is_probably_not_meant_is_said(changes, words):
    (notice,) = check_algorithm(AlgorithmConfig(**changes), samples_per_prompt=4)
    assert words in notice


@pytest.mark.parametrize("loss", LOSS_KINDS)
def test_a_loss_has_the_aggregation_of_its_paper(loss):
    of_papers = dict.fromkeys(("gspo", "sapo", "gmpo"), "sequence_mean")
    of_papers |= dict.fromkeys(("dppo_tv", "dppo_kl"), "fixed_length")
    config = AlgorithmConfig(loss=loss, fixed_length=9 if loss.startswith("dppo") else None)
    assert config.resolved_aggregation == of_papers.get(loss, "token_mean")
    assert check_algorithm(config, samples_per_prompt=4) == ()


def test_the_cap_is_that_of_the_weight_of_the_penalty_too():
    capped = AlgorithmConfig(kl_coefficient=0.1, tis_cap=3.0, correction="none")
    assert check_algorithm(capped, samples_per_prompt=4) == ()
    with pytest.raises(ConfigError, match="tis_cap has no effect"):
        check_algorithm(replace(capped, kl_ratio_weight=False), samples_per_prompt=4)


def test_k3_is_capped_only_where_it_is_asked_for():
    assert AlgorithmConfig(kl_coefficient=0.1).resolved_kl_estimator == "k3"
    capped = AlgorithmConfig(kl_coefficient=0.1, kl_estimator="k3_capped")
    assert (capped.resolved_kl_estimator, check_algorithm(capped, samples_per_prompt=4)) == ("k3_capped", ())


def test_all_complaints_come_at_once():
    with pytest.raises(ConfigError) as error:
        check_algorithm(
            AlgorithmConfig(gae_lambda=0.9, correction="none", tis_cap=2.0, kl_in="reward"), samples_per_prompt=4
        )
    assert len(str(error.value).splitlines()) == 3


def test_settings_are_few_and_documented():
    settings = [field.metadata[METADATA_KEY] for field in fields(AlgorithmConfig)]
    assert len(settings) <= 29
    assert all(len(setting.doc) > 20 for setting in settings)
    for field in fields(AlgorithmConfig):
        assert field.metadata[METADATA_KEY].complaint(getattr(AlgorithmConfig(), field.name)) is None


@pytest.mark.parametrize(
    ("needed", "settings"),
    [
        (False, {}),
        (False, {"kl_coefficient": 0.1}),
        (True, {"kl_coefficient": 0.1, "kl_in": "reward"}),
        (False, {"correction": "token_tis"}),
        (True, {"correction": "token_tis", "normalise_weights": True}),
        (True, {"distillation_coefficient": 1.0}),
        (False, {"correction": "token_tis", "correction_form": "bypass"}),
    ],
)
def test_the_only_step_of_an_update_recomputes_what_is_compared_alone(needed, settings):
    assert AlgorithmConfig(**settings).needs_train_logprobs(single_step=True) == needed


def test_a_configuration_says_what_it_needs():
    assert not AlgorithmConfig().needs_reference
    assert AlgorithmConfig(kl_coefficient=0.1).needs_reference
    assert AlgorithmConfig().needs_train_logprobs()
    assert not AlgorithmConfig(correction_form="bypass").needs_train_logprobs()
    assert AlgorithmConfig(entropy_coefficient=0.01).needs_entropy_gradient
    assert AlgorithmConfig(advantage="remax").needs_greedy_reward
    assert AlgorithmConfig(kl_coefficient=0.1).resolved_kl_estimator == "k3"
    assert AlgorithmConfig(kl_coefficient=0.1, kl_in="reward").resolved_kl_estimator == "k1"

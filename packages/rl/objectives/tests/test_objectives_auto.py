"""Resolve `auto`: by the loss, by what is written out, and by how tokens are sampled."""

import pytest

from offbeat_core import ConfigError
from offbeat_objectives import AlgorithmConfig, build_loss, check_algorithm, resolve_correction
from offbeat_objectives._config.algorithm import CORRECTIONS, DPPO_LOSSES, LOSS_KINDS

LAG = "async.staleness_threshold = 0.5: some samples are of older weights"
ONE_STEP = f"{LAG}, and one step an update"


def resolved(off_policy, unclipped="", **settings):
    length = {"fixed_length": 8} if settings.get("loss") in DPPO_LOSSES else {}
    config, said = resolve_correction(AlgorithmConfig(**settings, **length), off_policy, unclipped)
    check_algorithm(config, samples_per_prompt=4)
    return config.correction, config.correction_form, said


@pytest.mark.parametrize("loss", LOSS_KINDS)
def test_every_loss_has_a_correction_off_policy_and_none_on_policy(loss):
    if loss in DPPO_LOSSES:
        assert resolved(LAG, loss=loss)[:2] == resolved("", loss=loss)[:2] == ("none", "bypass")
    else:
        assert resolved(LAG, loss=loss)[:2] == ("token_tis", "decoupled")
        assert resolved("", loss=loss)[:2] == ("none", "decoupled")


def test_where_no_other_clip_acts_ppo_clips_around_the_sampler():
    correction, form, said = resolved(LAG, ONE_STEP)
    assert (correction, form) == ("none", "bypass")
    assert said[1] == f"algorithm.correction_form = bypass ({ONE_STEP})"
    assert "the ratio of ppo_clip corrects by itself" in said[0]
    assert resolved("", "")[:2] == ("none", "decoupled")


@pytest.mark.parametrize("loss", [loss for loss in LOSS_KINDS if loss not in ("ppo_clip", *DPPO_LOSSES)])
def test_other_losses_are_weighed_also_with_one_step(loss):
    assert resolved(LAG, ONE_STEP, loss=loss)[:2] == ("token_tis", "decoupled")


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", *DPPO_LOSSES])
@pytest.mark.parametrize(
    ("compared", "settings"),
    [
        ("the teacher", {"distillation_coefficient": 1.0}),
        ("the KL penalty in the reward", {"kl_coefficient": 0.1, "kl_in": "reward"}),
    ],
)
def test_what_is_compared_with_the_policy_in_training_keeps_the_decoupled_form(loss, compared, settings):
    correction, form, said = resolved(LAG, ONE_STEP, loss=loss, **settings)
    assert (correction, form) == ("token_tis", "decoupled")
    assert said[1].startswith(f"algorithm.correction_form = decoupled ({compared} is compared with the policy")
    assert resolved("", "", loss=loss, **settings)[:2] == ("none", "decoupled")
    assert resolved(LAG, ONE_STEP, loss=loss, correction_form="bypass", **settings)[0] == "none", "written out"


@pytest.mark.parametrize(
    "written", [{"tis_cap": 3.0}, {"normalise_weights": True}, {"correction": "token_tis"}, {"correction": "none"}]
)
def test_one_step_leaves_weights_that_are_asked_for_and_none_that_is_written_out(written):
    found, form, _ = resolved(LAG, ONE_STEP, **written)
    assert (found, form) == (written.get("correction", "token_tis"), "decoupled")


def test_a_choice_says_its_reason():
    *_, said = resolved(LAG)
    assert said[0] == f"algorithm.correction = token_tis ({LAG})"
    assert said[1].startswith("algorithm.correction_form = decoupled (")
    *_, said = resolved(LAG, correction_form="bypass")
    assert said == [
        "algorithm.correction = none (with algorithm.correction_form = bypass the ratio of ppo_clip corrects by itself)"
    ]
    *_, said = resolved(LAG, correction_form="bypass", loss="gpg")
    assert "nothing is corrected" in said[0]


@pytest.mark.parametrize("form", ["decoupled", "bypass"])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_what_is_written_out_stays(correction, form):
    for off_policy in (LAG, ""):
        config = AlgorithmConfig(correction=correction, correction_form=form)
        assert resolve_correction(config, off_policy) == (config, [])


@pytest.mark.parametrize("loss", ["ppo_clip", "dppo_tv"])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_one_key_written_out_gives_a_pair_that_works(correction, loss):
    found, form, said = resolved(LAG, loss=loss, correction=correction)
    assert found == correction
    assert len(said) == 1
    assert form in ("decoupled", "bypass")
    for off_policy, expected in ((LAG, "token_tis"), ("", "none")):
        assert resolved(off_policy, loss=loss, correction_form="decoupled")[:2] == (expected, "decoupled")


def test_unresolved_it_is_none_in_the_decoupled_form():
    auto, written = AlgorithmConfig(), AlgorithmConfig(correction="none", correction_form="decoupled")
    assert (auto.correction, auto.correction_form) == ("auto", "auto")
    for single_step in (True, False):
        losses = [build_loss(config, single_step=single_step) for config in (auto, written)]
        assert losses[0].required_extras == losses[1].required_extras
        needs = [config.needs_train_logprobs(single_step=single_step) for config in (auto, written)]
        assert needs[0] == needs[1]


def test_settings_of_a_correction_are_judged_once_it_is_resolved():
    config = AlgorithmConfig(tis_cap=3.0)
    assert check_algorithm(config, samples_per_prompt=4) == ()
    assert check_algorithm(resolve_correction(config, LAG)[0], samples_per_prompt=4) == ()
    with pytest.raises(ConfigError, match="tis_cap has no effect with correction = none"):
        check_algorithm(resolve_correction(config, "")[0], samples_per_prompt=4)

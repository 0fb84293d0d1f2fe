"""The rollout correction that a run has by default: chosen before it starts, with its reason, and what that costs."""

import json
from pathlib import Path
from typing import Any

import pytest
from grpo_runs import Main, run_to_its_end, values_of

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._preflight.correction import choose_correction
from grpo_async_app._preflight.preflight import check_run
from grpo_async_app._roles.batches import build_batches
from offbeat_core import load_config
from offbeat_objectives import AlgorithmConfig
from offbeat_run import RunFolder
from offbeat_testing import CommandLine

ON_POLICY = ("--async.staleness_threshold=0", "--async.partial_rollout=false")
VLLM = ("--rollout.backend=vllm",)
CACHE_IN_FP8 = '--rollout.options={kv_cache_dtype = "fp8"}'
TRTLLM = ("--rollout.backend=trtllm", "--rollout.options.server=engine.example:8000")
WEIGHTS_IN_FP8 = "--rollout.options.weights=fp8_blocks"
TWO_STEPS = "--algorithm.num_passes=2"
STALE = "async.staleness_threshold = 0.5: some samples are of older weights"
BETWEEN_SYNCS = "async.trigger_parameter_sync_step = 2: the engines sample with older weights between two syncs"
CLIPS = ", and with one optimizer step an update only a clip around the policy that sampled acts"


@pytest.mark.parametrize(
    ("words", "lag"), [((), STALE), ((*ON_POLICY, "--async.trigger_parameter_sync_step=2"), BETWEEN_SYNCS)]
)
def test_one_step_on_tokens_of_older_weights_is_clipped_around_them(
    config: Path, words: tuple[str, ...], lag: str
) -> None:
    chosen, said = choose_correction(load_config(config, GrpoConfig, words))
    assert (chosen.algorithm.correction, chosen.algorithm.correction_form) == ("none", "bypass")
    assert f"algorithm.correction_form = bypass ({lag}{CLIPS})" in said


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((TWO_STEPS,), STALE),
        (("--async.require_batches=2",), STALE),
        (("--algorithm.loss=gspo",), STALE),
        (("--rollout.weight_format=fp8",), STALE),
        ((TWO_STEPS, *ON_POLICY, "--async.trigger_parameter_sync_step=2"), BETWEEN_SYNCS),
        (
            (*ON_POLICY, "--rollout.weight_format=fp8"),
            "rollout.weight_format = fp8: the engines sample with rounded weights",
        ),
        ((*VLLM, CACHE_IN_FP8), STALE),
        ((*ON_POLICY, *VLLM, CACHE_IN_FP8), "rollout.options: the engines hold keys and values in FP8"),
        ((*TRTLLM, WEIGHTS_IN_FP8), STALE),
        ((*ON_POLICY, *TRTLLM, WEIGHTS_IN_FP8), "rollout.options: the engines hold weights in FP8"),
        (
            (*ON_POLICY, "--rollout.dtype=bfloat16"),
            "rollout.dtype = bfloat16, engine.dtype = float32: two number formats",
        ),
        (
            (*ON_POLICY, "--rollout.backend=vllm"),
            "rollout.backend = vllm, engine.backend = torch: two implementations",
        ),
    ],
)
def test_tokens_of_another_policy_are_weighed_and_the_reason_is_said(
    config: Path, words: tuple[str, ...], reason: str
) -> None:
    chosen, said = choose_correction(load_config(config, GrpoConfig, words))
    assert (chosen.algorithm.correction, chosen.algorithm.correction_form) == ("token_tis", "decoupled")
    assert said[0] == f"algorithm.correction = token_tis ({reason})"


def test_tokens_of_the_same_policy_are_not_corrected(config: Path) -> None:
    chosen, said = choose_correction(load_config(config, GrpoConfig, ON_POLICY))
    assert chosen.algorithm.correction == "none"
    assert "the engines sample with the trainer's weights, number format and kind of engine" in said[0]


@pytest.mark.parametrize(
    ("words", "bound_nats"),
    [
        (("--rollout.dtype=float32",), 0.05),
        (("--rollout.dtype=bfloat16",), 0.5),
        (("--rollout.dtype=float32", "--engine.dtype=bfloat16"), 0.5),
        (("--rollout.dtype=bfloat16", "--engine.dtype=bfloat16"), 0.5),
        (("--rollout.dtype=float32", "--rollout.weight_format=fp8"), 2.0),
        ((*VLLM, "--rollout.dtype=bfloat16", CACHE_IN_FP8), 2.0),
        ((*TRTLLM, "--rollout.dtype=bfloat16", WEIGHTS_IN_FP8), 2.0),
        (("--rollout.dtype=float32", "--algorithm.mismatch_alarm_nats=0.3"), 0.3),
    ],
)
def test_the_alarm_allows_what_rounding_does_in_the_coarser_of_two_formats(
    config: Path, words: tuple[str, ...], bound_nats: float
) -> None:
    chosen, said = choose_correction(load_config(config, GrpoConfig, words))
    assert chosen.algorithm.mismatch_alarm_nats == bound_nats
    assert any("mismatch_alarm_nats" in line for line in said) == (bound_nats != 0.3), "what is written is not chosen"


@pytest.mark.parametrize(
    ("sizes", "bound_nats"),
    [
        ({"num_local_experts": 8}, 2.0),
        ({"text_config": {"n_routed_experts": 64}}, 2.0),
        ({"num_experts": 0, "num_experts_per_tok": 2}, 0.5),
        ({"num_experts": None, "text_config": None}, 0.5),
    ],
)
def test_the_alarm_allows_a_token_other_experts_in_a_rounded_format(
    config: Path, tmp_path: Path, sizes: dict[str, Any], bound_nats: float
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "some", **sizes}))
    words = (f"--model.path={tmp_path}", "--rollout.dtype=bfloat16")
    chosen, said = choose_correction(load_config(config, GrpoConfig, words))
    assert chosen.algorithm.mismatch_alarm_nats == bound_nats
    assert any("other experts" in each for each in said) == (bound_nats == 2.0)
    in_float32, _ = choose_correction(load_config(config, GrpoConfig, (*words, "--rollout.dtype=float32")))
    assert in_float32.algorithm.mismatch_alarm_nats == 0.05, "routers agree there"


def test_plan_prints_the_choice_and_its_reason(command: CommandLine, config: Path) -> None:
    here = command("plan", config)
    elsewhere = command("plan", config, "--cluster", "2x8")
    for planned in (here, elsewhere):
        assert planned.code == 0, planned.err
        text = " ".join(planned.out.split())
        assert "algorithm.correction_form = bypass (async.staleness_threshold = 0.5" in text
    written = command("plan", config, "--algorithm.correction=none", "--algorithm.correction_form=decoupled")
    assert "algorithm.correction" not in written.out


def test_a_setting_without_effect_under_the_choice_is_refused(command: CommandLine, config: Path) -> None:
    assert command("plan", config, "--algorithm.tis_cap=3").code == 0
    refused = command("plan", config, "--algorithm.tis_cap=3", *ON_POLICY)
    assert refused.code == 2
    assert "algorithm.tis_cap has no effect with correction = none" in refused.err


@pytest.mark.parametrize("correction", ["token_tis", "sequence_tis_geometric_rs"])
def test_a_correction_of_the_only_step_asks_the_engine_for_nothing(correction: str) -> None:
    from test_grpo_app_parts import FixedLogprobs, group

    class NotAsked:
        def logprobs(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("the loss corrects by its own log-probabilities")

    groups = [group(0, [3, 2], [1.0, 0.0])]
    config = AlgorithmConfig(correction=correction)
    [sequences], _ = build_batches(groups, config, NotAsked(), 1, single_step=True)  # type: ignore[arg-type]
    assert all(not {"old_logprobs", "correction_weights", "keep"} & each.extras.keys() for each in sequences)
    [sequences], metrics = build_batches(groups, config, FixedLogprobs(), 1)  # type: ignore[arg-type]
    assert all({"old_logprobs", "correction_weights", "keep"} <= each.extras.keys() for each in sequences)
    assert "correction/weight_mean" in metrics


def test_a_run_clips_around_its_sampler_by_default_and_a_resume_under_other_settings_chooses_anew(
    forked_main: Main, config: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    output = run_to_its_end(forked_main, "train", config, "--out", run, "--eval.every_updates=0")
    updates = set(values_of(run, "train/reward"))
    for measured in ("mismatch/kl", "train/ratio_mean", "train/ratio_max", "train/clip_fraction"):
        assert set(values_of(run, measured)) == updates, measured
    resumed = run_to_its_end(forked_main, "resume", run, TWO_STEPS)
    for said, form in ((output, "bypass"), (resumed, "decoupled")):
        assert f"algorithm.correction_form = {form}" in " ".join(said.split())
    assert f"algorithm.correction = token_tis ({STALE})" in (run / "plan.txt").read_text()
    assert 'correction = "auto"' in (run / "config.toml").read_text()
    assert 'correction = "token_tis"' in (run / "settled.toml").read_text()


@pytest.mark.parametrize(
    ("begun", "more", "chosen"),
    [
        (ON_POLICY, "--async.staleness_threshold=0.5", {"correction": "none", "correction_form": "bypass"}),
        ((), "--async.require_batches=2", {"correction": "token_tis", "correction_form": "decoupled"}),
        ((*ON_POLICY, "--rollout.dtype=float32"), "--rollout.dtype=bfloat16", {"mismatch_alarm_nats": 0.5}),
        ((), "--rollout.weight_format=fp8", {"correction": "token_tis", "mismatch_alarm_nats": 2.0}),
    ],
)
def test_what_was_left_open_is_chosen_anew_for_a_run_folder_under_other_settings(
    config: Path, tmp_path: Path, begun: tuple[str, ...], more: str, chosen: dict[str, object]
) -> None:
    with RunFolder.create(tmp_path / "run", required_bytes=0) as run:
        run.write_config(check_run(load_config(config, GrpoConfig, begun)).written)
        again = check_run(load_config(run.config, GrpoConfig, (more,))).config
        fresh = check_run(load_config(config, GrpoConfig, (*begun, more))).config
    assert {key: getattr(again.algorithm, key) for key in chosen} == chosen
    assert (again.algorithm, again.rollout) == (fresh.algorithm, fresh.rollout)


def test_a_run_with_weights_shows_them_and_no_ratio_that_is_always_one(
    forked_main: Main, config: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = ("--eval.every_updates=0", "--algorithm.correction=token_tis")
    run_to_its_end(forked_main, "train", config, "--out", run, *words)
    updates = set(values_of(run, "train/reward"))
    assert set(values_of(run, "correction/weight_mean")) == updates
    assert set(values_of(run, "mismatch/kl")) == updates
    for constant in ("train/ratio_mean", "train/ratio_max", "train/clip_fraction", "train/kl_old"):
        assert not values_of(run, constant), f"{constant} is 1 or 0 by construction with one step an update"


def test_a_run_folder_from_before_the_choice_goes_on_as_it_was_written(config: Path, tmp_path: Path) -> None:
    older = ("--algorithm.correction=none", "--algorithm.correction_form=decoupled")
    checked = check_run(load_config(config, GrpoConfig, older))
    with RunFolder.create(tmp_path / "run", required_bytes=0) as run:
        run.write_config(checked.written)
        again = check_run(load_config(run.config, GrpoConfig, ()))
    assert (again.config.algorithm.correction, again.config.algorithm.correction_form) == ("none", "decoupled")
    assert not [choice for choice in again.choices if "correction" in choice]

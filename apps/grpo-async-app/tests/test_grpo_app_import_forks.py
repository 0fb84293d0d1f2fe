"""Scripts of forks, and of versions with other names of options, become configurations; what is lost comes first."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from import_meaning import holds

from grpo_async_app._imports.openrlhf import import_openrlhf
from grpo_async_app._imports.prime_rl import import_prime_rl
from grpo_async_app._imports.trl import import_trl
from grpo_async_app._imports.verl import import_verl
from offbeat_recipes import RecipeBuilder
from offbeat_testing import CommandLine

ACTOR, ROLLOUT, AGENT = (f"actor_rollout_ref.{part}." for part in ("actor", "rollout", "agent"))
GRPO = {"algorithm.adv_estimator": "grpo"}
IS = "algo.advantage.is_correction_"


@pytest.mark.parametrize(
    ("options", "expected", "remarks"),
    [
        pytest.param(
            {**GRPO, "actor_rollout_ref.model.lora.rank": 32, "actor_rollout_ref.model.lora.alpha": 64},
            {"engine.lora_rank": 32, "engine.lora_alpha": 64.0},
            {},
            id="adapters of rLLM",
        ),
        pytest.param(
            {**GRPO, "data.apply_chat_template_kwargs.enable_thinking": False, "env.rollout.n": 8},
            {"data.template_options": {"enable_thinking": False}, "rollout.samples_per_prompt": 8},
            {"env.rollout.n": "8 samples of each prompt"},
            id="verl-agent's thinking and group size",
        ),
        pytest.param(
            {**GRPO, f"{ROLLOUT}n_agent": 5, f"{ROLLOUT}n": 1, "data.shuffle_train_dataloader": True, "max_turns": 2}
            | {f"{ACTOR}state_masking": True},
            {"rollout.samples_per_prompt": 5, "data.shuffle": True, "environment.max_turns": 2},
            {"max_turns": "set environment.name", f"{ACTOR}state_masking": "never trained on"},
            id="Search-R1's group size and turns",
        ),
        pytest.param(
            {**GRPO, f"{ACTOR}state_masking": False},
            {},
            {f"{ACTOR}state_masking": "never trained on"},
            id="tokens of the environment that are learned from there",
        ),
        pytest.param(
            {**GRPO, "data.train_batch_size": 16, f"{ACTOR}ppo_mini_batch_size": 64},
            {"async.mini_batch_size": 16, "async.require_batches": 1},
            {f"{ACTOR}ppo_mini_batch_size": "larger than data.train_batch_size = 16"},
            id="a mini batch above the train batch",
        ),
        pytest.param(
            {**GRPO, f"{ACTOR}loss_mode": "kl_cov", f"{ACTOR}k_percent": 0.02, f"{ACTOR}ppo_kl_coef": 1},
            {"algorithm.loss": "kl_cov", "algorithm.options": {"cov_share": 0.0002, "kl_weight": 1}},
            {},
            id="losses by the names of the paper's repository",
        ),
        pytest.param(
            {**GRPO, f"{AGENT}enable_agent": True, f"{AGENT}max_turns": 3, f"{AGENT}mask_observations": True},
            {"environment.max_turns": 3},
            {f"{AGENT}enable_agent": "see section environment", f"{AGENT}mask_observations": "never trained on"},
            id="turns of verl-tool",
        ),
        pytest.param(
            {**GRPO, f"{AGENT}enable_agent": False, f"{AGENT}max_turns": 3},
            {"environment.max_turns": None},
            {f"{AGENT}max_turns": "needs no environment"},
            id="turns of verl-tool without its agent",
        ),
        pytest.param(
            {**GRPO, "data.filter_overlong_prompts": True, "data.truncation": "left"},
            {},
            {"data.truncation": "left out there too"},
            id="a truncation of prompts that are left out before",
        ),
        pytest.param(
            {**GRPO, "data.train_batch_size": 0, "async_training.require_batches": 2},
            {"async.require_batches": 2},
            {"data.train_batch_size": "streamed one by one"},
            id="no train batch in the asynchronous trainer",
        ),
    ],
)
def test_options_of_forks_of_verl_are_those_that_are_here(
    options: dict[str, Any], expected: dict[str, object], remarks: dict[str, str]
) -> None:
    holds(import_verl(options), expected, remarks)


VALIDATION = f"{ROLLOUT}val_kwargs."


@pytest.mark.parametrize(
    ("options", "expected", "remarks"),
    [
        ({"data.val_files": "/d/t.parquet"}, {"data.eval_path": "/d/t.parquet", "eval.sets": None}, {}),
        (
            {
                "data.val_files": ["/d/t.parquet"],
                f"{VALIDATION}n": 1,
                f"{VALIDATION}top_k": -1,
                f"{VALIDATION}temperature": 0.6,
            },
            {"data.eval_path": "/d/t.parquet", "eval.temperature": 0.6, "eval.sets": None},
            {},
        ),
        (
            {"data.val_files": "/d/aime.parquet", f"{VALIDATION}n": 16, f"{VALIDATION}top_p": 0.7}
            | {f"{VALIDATION}temperature": 0.6, "data.val_max_samples": 9, "trainer.test_freq": 5},
            {
                "eval.sets": {
                    "aime": {"path": "/d/aime.parquet", "temperature": 0.6, "n": 16, "top_p": 0.7, "max_prompts": 9}
                }
            }
            | {"data.eval_path": None, "eval.max_prompts": None, "eval.every_updates": 5},
            {},
        ),
        (
            {"data.val_files": "/d/aime.parquet", f"{VALIDATION}n": 16, f"{VALIDATION}top_p": 0.7},
            {"eval.sets": {"aime": {"path": "/d/aime.parquet", "top_p": 0.7}}},
            {f"{VALIDATION}n": "all samples are the same"},
        ),
        (
            {"data.val_files": ["/a/test.parquet", "/b/test.parquet", "/b/math-500.parquet"]},
            {
                "eval.sets": {"a_test": {"path": "/a/test.parquet"}, "b_test": {"path": "/b/test.parquet"}}
                | {"math_500": {"path": "/b/math-500.parquet"}}
            },
            {},
        ),
    ],
)
def test_verls_validation_becomes_held_out_prompts_or_sets(
    options: dict[str, Any], expected: dict[str, object], remarks: dict[str, str]
) -> None:
    draft = import_verl({**GRPO, **options})
    holds(draft, expected, remarks)
    assert not set(options) & set(draft.lost)


@pytest.mark.parametrize(
    ("translate", "options", "name", "key"),
    [
        (import_verl, GRPO, f"{ROLLOUT}tensor_model_parallel_size", "rollout.tensor_parallel"),
        (import_verl, GRPO, f"{ACTOR}ppo_epochs", "algorithm.num_passes"),
        (
            import_verl,
            {**GRPO, "rollout.total_rollout_steps": 9},
            "async_training.require_batches",
            "async.require_batches",
        ),
        (import_trl, {"max_steps": 5}, "num_iterations", "algorithm.num_passes"),
        (import_openrlhf, {}, "max_epochs", "algorithm.num_passes"),
    ],
)
def test_a_count_of_zero_is_told_and_crashes_nothing(
    translate: Callable[[dict[str, Any]], RecipeBuilder], options: dict[str, Any], name: str, key: str
) -> None:
    draft = translate({**options, name: 0})
    assert draft.entries[key].value >= 1
    assert any("at least 1 was required" in text for text in draft.lost.values())


def test_an_asynchronous_trainer_needs_no_train_batch() -> None:
    draft = import_verl({**GRPO, "data.train_batch_size": 0, "async_training.require_batches": 2})
    assert "data.train_batch_size" not in draft.lost


def test_a_path_that_is_an_argument_of_the_script_is_left_to_the_user() -> None:
    draft = import_verl({**GRPO, "actor_rollout_ref.model.path": "${2}"})
    holds(draft, {"model.path": "~/verl"}, {"actor_rollout_ref.model.path": "an argument of the script"})


def test_what_is_always_so_changes_the_result_where_the_source_says_otherwise() -> None:
    name = f"{ACTOR}state_masking"
    assert name in import_verl({**GRPO, name: True}).always
    assert name in import_verl({**GRPO, name: False}).lost


@pytest.mark.parametrize(
    ("options", "expected", "remarks"),
    [
        (
            {f"{IS}level": "token", f"{IS}gating": "binary_kl", f"{IS}threshold": 5e-3}
            | {"algo.advantage.estimator": "flash_reinforce"},
            {"algorithm.advantage": "reinforce_plus_plus", "algorithm.correction": None, "algorithm.rs_high": None},
            {f"{IS}gating": "not a divergence", "algo.advantage.estimator": "divided by the standard deviation"},
        ),
        (
            {f"{IS}level": "token", f"{IS}threshold": 5.0},
            {"algorithm.correction": "icepop", "algorithm.rs_low": 0.0, "algorithm.rs_high": 5.0},
            {},
        ),
        (
            {f"{IS}level": "token", f"{IS}mode": "clip", f"{IS}threshold": [0.5, 4.0]},
            {"algorithm.correction": "token_tis", "algorithm.tis_cap": 4.0},
            {f"{IS}threshold": "cuts from above only"},
        ),
        (
            {f"{IS}level": "seq", f"{IS}threshold": [0.9, 1.1]},
            {"algorithm.correction": "token_tis_geometric_rs", "algorithm.rs_low": 0.9, "algorithm.rs_high": 1.1},
            {},
        ),
        (
            {"pretrain": "/m", "actor_learning_rate": 5e-7, "n_samples_per_prompt": 8, "train_batch_size": 128}
            | {"prompt_max_len": 512, "generate_max_len": 3000, "init_kl_coef": 0.02, "use_kl_estimator_k3": True}
            | {"use_kl_loss": True, "advantage_estimator": "group_norm", "vllm_num_engines": 4, "l2": 0.1},
            {"model.path": "/m", "engine.learning_rate": 5e-7, "rollout.samples_per_prompt": 8}
            | {"async.mini_batch_size": 16, "data.max_prompt_tokens": 512, "rollout.max_tokens": 3000}
            | {"rollout.max_model_len": 3512, "algorithm.kl_coefficient": 0.02, "algorithm.kl_estimator": "k3"}
            | {"algorithm.advantage": "grpo", "rollout.num_engines": 4, "engine.weight_decay": 0.1},
            {},
        ),
    ],
)
def test_openrlhfs_newest_options_and_its_old_names_are_read(
    options: dict[str, Any], expected: dict[str, object], remarks: dict[str, str]
) -> None:
    holds(import_openrlhf(options), expected, remarks)


def test_openrlhfs_forks_name_a_warm_up_in_steps_and_the_estimator_of_grpo() -> None:
    draft = import_openrlhf({"pretrain": "/m", "lr_warmup_steps": 10, "advantage_estimator": "grpo"})
    holds(draft, {"engine.warmup_steps": 10, "algorithm.advantage": "grpo"}, {})
    assert not {"actor.lr_warmup_ratio", "algo.advantage.estimator"} & set(draft.lost)


def test_old_names_are_told_as_the_script_has_them() -> None:
    draft = import_openrlhf({"pretrain": "/m", "normalize_reward": True})
    assert draft.entries["model.path"].source == "pretrain"
    assert draft.value("reward.normalize_enable") == "normalize_reward = true"
    assert "reward.normalize_enable" in draft.lost


OLD_PRIME_RL = {
    "model.name": "/m",
    "orchestrator.batch_size": 128,
    "orchestrator.rollouts_per_example": 16,
    "orchestrator.sampling.max_tokens": 700,
    "orchestrator.sampling.temperature": 0.9,
    "orchestrator.sampling.extra_body.chat_template_kwargs.enable_thinking": False,
    "orchestrator.buffer.online_difficulty_filtering": True,
    "orchestrator.buffer.easy_threshold": 0.95,
    "orchestrator.env": [{"id": "ifeval", "args": {"rows": 5}}, {"id": "judge", "name": "the judge"}],
    "orchestrator.eval.env": [{"id": "math500", "num_examples": 30, "rollouts_per_example": 4}],
    "orchestrator.eval.sampling.max_tokens": 900,
    "inference.model.max_model_len": 4096,
    "inference.parallel.tp": 2,
}


def test_old_names_of_prime_rl_are_read() -> None:
    mix = {
        "ifeval": {"path": "verifiers:ifeval", "weight": 1.0, "task_options": {"rows": 5}},
        "the_judge": {"path": "verifiers:judge", "weight": 1.0},
    }
    sets = {"math500": {"path": "verifiers:math500", "temperature": 1.0, "max_prompts": 30, "n": 4, "max_tokens": 900}}
    expected = {
        "async.mini_batch_size": 8,
        "rollout.samples_per_prompt": 16,
        "rollout.max_tokens": 700,
        "rollout.temperature": 0.9,
        "rollout.max_model_len": 4096,
        "rollout.tensor_parallel": 2,
        "data.template_options": {"enable_thinking": False},
        "algorithm.filter_groups": True,
        "curriculum.high": 0.95,
        "data.mix": mix,
        "data.path": None,
        "eval.sets": sets,
    }
    draft = import_prime_rl(OLD_PRIME_RL)
    holds(draft, expected, {"orchestrator.batch_size": "128 are 8 prompts"})
    assert "generation_config.json" in draft.changed["orchestrator.eval.sampling.temperature"]
    assert set(draft.lost) == {"trainer.loss.kl_tau"}


BOUNDS = "trainer.loss."
FILTERS = "orchestrator.pre_batch_filters"
HARNESS = {
    "orchestrator.train.env": [{"taskset": {"id": "a"}, "harness": {"id": "null", "runtime": {"type": "docker"}}}]
}
PROGRAM = {"orchestrator.train.env": [{"taskset": {"id": "a"}, "harness": {"id": "mini-swe", "env": {"A": "b"}}}]}


@pytest.mark.parametrize(
    ("options", "expected", "lost"),
    [
        (
            {},
            {"algorithm.loss": "dppo_tv", "algorithm.clip_low": 0.2, "algorithm.correction_form": "bypass"},
            {"kl_tau"},
        ),
        (
            {f"{BOUNDS}dppo_mask_low": 0.1, f"{BOUNDS}dppo_mask_high": 0.3, f"{BOUNDS}kl_tau": 0},
            {"algorithm.loss": "dppo_tv", "algorithm.clip_low": 0.1, "algorithm.clip_high": 0.3},
            set(),
        ),
        (
            {f"{BOUNDS}type": "ipo", f"{BOUNDS}ipo_threshold": 0.05, f"{BOUNDS}kl_tau": 0},
            {"algorithm.loss": "dppo_tv", "algorithm.clip_low": 0.05, "algorithm.clip_high": 0.05},
            {"type"},
        ),
        ({f"{BOUNDS}ipo_mask_low": 0.3, f"{BOUNDS}kl_tau": 0}, {"algorithm.clip_low": 0.3}, {"type"}),
        (
            {f"{BOUNDS}token_mask_low": 0.1, f"{BOUNDS}kl_tau": 0},
            {"algorithm.loss": "ppo_clip", "algorithm.clip_low": None},
            {"type", "token_mask_low"},
        ),
        (
            {"trainer.model.experimental.lora": {"rank": 16, "alpha": 8, "use_rslora": True}, f"{BOUNDS}kl_tau": 0},
            {"engine.lora_rank": 16, "engine.lora_alpha": 32.0},
            set(),
        ),
        ({FILTERS: [{"type": "zero_advantage"}], f"{BOUNDS}kl_tau": 0}, {"algorithm.filter_groups": True}, set()),
        (
            {FILTERS: [{"type": "gibberish"}, {"type": "zero_advantage", "enforce": False}], f"{BOUNDS}kl_tau": 0},
            {"algorithm.filter_groups": False},
            set(),
        ),
        (
            {FILTERS: [{"type": "gibberish", "token_id_threshold": 9}, {"type": "repetition", "enforce": True}]}
            | {f"{BOUNDS}kl_tau": 0},
            {"algorithm.filter_groups": None},
            {f"{FILTERS}.1.type"},
        ),
        ({**HARNESS, f"{BOUNDS}kl_tau": 0}, {"data.path": "verifiers:a"}, set()),
        ({**PROGRAM, f"{BOUNDS}kl_tau": 0}, {"data.path": "verifiers:a"}, {"orchestrator.train.source.0.harness.id"}),
    ],
)
def test_loss_filters_adapters_and_harnesses_of_prime_rl(
    options: dict[str, Any], expected: dict[str, object], lost: set[str]
) -> None:
    draft = import_prime_rl(
        {"orchestrator.env": [{"id": "e"}], **options} if "orchestrator.train.env" not in options else options
    )
    holds(draft, expected, {})
    assert {name.removeprefix(BOUNDS) for name in draft.lost} == lost


def test_two_environments_of_one_name_are_two_tables() -> None:
    draft = import_prime_rl({"orchestrator.env": [{"id": "a", "args": {"x": 1}}, {"id": "a", "args": {"x": 2}}]})
    mix = draft.entries["data.mix"].value
    assert {name: table["task_options"] for name, table in mix.items()} == {"a": {"x": 1}, "a_2": {"x": 2}}


def test_a_batch_of_single_samples_is_not_said_to_be_of_prompts() -> None:
    assert "orchestrator.batch_size" not in import_prime_rl({"orchestrator.batch_size": 128}).changed


@pytest.mark.parametrize(
    ("options", "expected", "remarks"),
    [
        ({"torch_dtype": "bfloat16"}, {"engine.dtype": "bfloat16"}, {}),
        ({"torch_dtype": "float32"}, {"engine.dtype": "float32"}, {}),
        ({"save_only_model": True}, {"checkpoint.save_optimizer": False}, {}),
        ({"dataset_id_or_path": "/d"}, {"data.path": "/d"}, {}),
        ({"report_to": ["wandb", "swanlab"]}, {"log.trackers": ["wandb"]}, {"report_to": "swanlab: no such tracker"}),
        (
            {
                "use_peft": True,
                "lora_target_modules": ["v_proj", "q_proj", "k_proj", "o_proj", "down_proj", "up_proj", "gate_proj"],
            },
            {"engine.lora_rank": 16},
            {"lora_target_modules": "every linear layer"},
        ),
        ({"use_peft": True, "lora_r": 16, "lora_alpha": 8, "use_rslora": True}, {"engine.lora_alpha": 32.0}, {}),
        ({"chat_template": "{{ messages }}"}, {}, {"chat_template": "chat_template.jinja in the model's folder"}),
        ({"hub_model_id": "a/b"}, {}, {"hub_model_id": "--push-to hub:OWNER/NAME"}),
    ],
)
def test_options_of_open_r1_are_those_that_are_here(
    options: dict[str, Any], expected: dict[str, object], remarks: dict[str, str]
) -> None:
    draft = import_trl(options)
    holds(draft, expected, remarks)
    assert not set(options) & set(draft.lost) - {"chat_template"}


SCRIPT = """
python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=/m data.train_files=/d \\
    custom_reward_function.path=a.py trainer.experiment_name=x actor_rollout_ref.rollout.n={samples} {more}
"""


@pytest.mark.parametrize(
    ("more", "code", "first"),
    [
        ("", 0, "has another meaning here:"),
        ("algorithm.use_pf_ppo=True", 4, "not supported here, and changes the result:"),
        ("some.option_of_a_fork=3", 4, "not supported here, and changes the result:"),
        ("actor_rollout_ref.rollout.repetition_penalty=1.1", 4, "not supported here, and changes the result:"),
        ("actor_rollout_ref.rollout.repetition_penalty=1.0", 0, "has another meaning here:"),
        ("algorithm.use_pf_ppo=False", 0, "has another meaning here:"),
    ],
)
def test_what_changes_the_result_comes_first_and_decides_the_exit_code(
    command: CommandLine, tmp_path: Path, more: str, code: int, first: str
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT.format(more=more, samples=8))
    lenient = command("import", "verl", script, "--out", tmp_path / "a.toml")
    strict = command("import", "verl", script, "--out", tmp_path / "b.toml", "--strict")
    assert (lenient.code, strict.code) == (0, code)
    assert strict.out.splitlines()[0] == first
    assert (tmp_path / "b.toml").exists()
    if code:
        lost = strict.out.partition("\n\n")[0].splitlines()
        assert len(lost) == 2, "what changes the result stands alone"
        assert more.partition("=")[0] in lost[1]
    assert "trainer.experiment_name" in strict.out.partition("not supported here, but harmless:")[2]


def test_something_to_put_right_decides_the_exit_code_too(command: CommandLine, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT.format(more="", samples=1))
    lenient = command("import", "verl", script, "--out", tmp_path / "a.toml")
    strict = command("import", "verl", script, "--out", tmp_path / "b.toml", "--strict")
    assert (lenient.code, strict.code) == (0, 4)
    assert "needs at least 2: got 1" in strict.out


def test_a_plain_mean_of_prime_rl_is_no_mistake_to_put_right(command: CommandLine, tmp_path: Path) -> None:
    source = tmp_path / "rl.toml"
    source.write_text('[model]\nname = "/m"\n[orchestrator]\ngroup_size = 8\n[[orchestrator.env]]\nid = "e"\n')
    ended = command("import", "prime-rl", source, "--out", tmp_path / "mine.toml")
    assert ended.code == 0
    assert "corrected" not in ended.out
    assert "length bias" in ended.out.partition("worth a look:")[2]


def test_a_command_whose_output_goes_to_a_program_is_read(command: CommandLine, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("python -m openrlhf.cli.train_ppo_ray --pretrain /m \\\n  --max_len 512 > >(tee a.log) 2>&1 &\n")
    ended = command("import", "openrlhf", script, "--out", tmp_path / "mine.toml")
    assert ended.code == 0, ended.err
    assert "max_model_len = 512" in (tmp_path / "mine.toml").read_text()

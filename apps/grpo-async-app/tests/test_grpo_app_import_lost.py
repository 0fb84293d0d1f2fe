"""Options that have a key here are not lost by an import, and counts in another unit are converted."""

from pathlib import Path
from typing import Any

import pytest
from import_meaning import holds

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._imports.command import import_command
from grpo_async_app._imports.openrlhf import import_openrlhf
from grpo_async_app._imports.prime_rl import import_prime_rl
from grpo_async_app._imports.trl import import_trl
from grpo_async_app._imports.verl import import_verl
from offbeat_core import ConfigError, load_config
from offbeat_recipes import read_command_line, read_options
from offbeat_run import CommandWords

VERL = {"data.train_files": "/data", "actor_rollout_ref.model.path": "/model", "algorithm.adv_estimator": "grpo"}


@pytest.mark.parametrize(
    ("group", "mini", "batch", "prompts", "steps"),
    [
        ("actor_rollout_ref.rollout.n_agent", 256, 512, 51, 10),  # Search-R1
        ("agent_grpo.n", 4096, 256, 819, 1),  # DeepResearcher, with a group of 5
        ("env.rollout.n", 64, 16, 12, 1),  # verl-agent
        ("actor_rollout_ref.rollout.n", 256, 512, 256, 2),  # verl itself
    ],
)
def test_a_mini_batch_of_a_fork_that_repeats_prompts_itself_counts_samples(
    group: str, mini: int, batch: int, prompts: int, steps: int
) -> None:
    draft = import_verl(
        {**VERL, group: 5, "actor_rollout_ref.actor.ppo_mini_batch_size": mini, "data.train_batch_size": batch}
    )
    expected = min(prompts, batch)
    holds(draft, {"async.mini_batch_size": expected, "async.require_batches": steps}, {})
    remark = "counts samples" if group != "actor_rollout_ref.rollout.n" else ""
    assert remark in draft.changed.get("actor_rollout_ref.actor.ppo_mini_batch_size", "")


@pytest.mark.parametrize(
    "name", ["trainer.max_turns", "agent_proxy.max_turn", "actor_rollout_ref.rollout.agent.max_steps"]
)
def test_turns_of_forks_are_turns_here(name: str) -> None:
    holds(import_verl({**VERL, name: 5}), {"environment.max_turns": 5}, {name: "set environment.name"})


def flags(text: str, folder: Path) -> dict[str, Any]:
    (folder / "run.sh").write_text(f"python -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path /m {text}")
    return read_command_line(folder / "run.sh").options


def test_an_empty_value_is_no_switch_that_is_on(tmp_path: Path) -> None:
    options = flags('--logger.wandb.key "" --eval.dataset "" --ckpt.save_hf --algo.x 0 1 --a=b', tmp_path)
    assert (options["logger.wandb.key"], options["eval.dataset"], options["ckpt.save_hf"]) == (None, None, True)
    assert (options["algo.x"], options["a"]) == ([0, 1], "b")
    holds(import_openrlhf(options), {"log.trackers": None, "data.eval_path": None}, {})


def test_arguments_of_the_engine_of_early_trl_are_handed_on() -> None:
    options = {"model_name_or_path": "/m", "use_vllm": True, "vllm_enforce_eager": True, "num_generations": 8}
    holds(import_trl(options), {"rollout.options": {"enforce_eager": True}}, {})


def test_a_step_of_trl_that_is_no_whole_number_of_prompts_says_what_is_taken() -> None:
    options = {"model_name_or_path": "/m", "num_generations": 6, "per_device_train_batch_size": 4}
    remarks = {"per_device_train_batch_size": "4 of a step are 0.666667 prompts, and 1 here"}
    holds(import_trl(options), {"async.mini_batch_size": 1}, remarks)


def test_a_prompt_with_a_dollar_sign_is_a_text(tmp_path: Path) -> None:
    (tmp_path / "grpo.yaml").write_text(
        "model_name_or_path: /m\ndataset_name: /d\nnum_generations: 8\n"
        "system_prompt: 'Answer as $x$, not ${y}, in LaTeX.'\n"
    )
    target = tmp_path / "new.toml"
    import_command(CommandWords(options={"out": str(target)}), "trl", str(tmp_path / "grpo.yaml"))
    assert load_config(target, GrpoConfig).data.system_prompt == "Answer as $x$, not ${y}, in LaTeX."


def prime_rl(**changes: Any) -> Any:
    return import_prime_rl({"model.name": "/m", "orchestrator.group_size": 8, **changes})


def test_the_template_of_the_server_is_that_of_the_data_and_its_other_options_keep_their_tables() -> None:
    draft = prime_rl(
        **{
            "inference.vllm_extra.default_chat_template_kwargs.enable_thinking": False,
            "inference.vllm_extra.compilation_config.level": 3,
        }
    )
    options = {"gpu_memory_utilization": 0.9, "compilation_config": {"level": 3}}
    holds(draft, {"data.template_options": {"enable_thinking": False}, "rollout.options": options}, {})


def test_what_a_renderer_has_beside_the_variables_of_a_template_is_told() -> None:
    draft = prime_rl(**{"orchestrator.renderer.name": "qwen3", "orchestrator.renderer.preserve_all_thinking": True})
    assert "data.template_options" not in draft.entries
    assert "chat template" in draft.lost["orchestrator.renderer.preserve_all_thinking"]


def test_a_teacher_by_its_names_of_spring_is_learned_from() -> None:
    draft = prime_rl(**{"orchestrator.training_mode": "opd", "orchestrator.teacher.model.name": "/teacher"})
    expected = {"teacher.path": "/teacher", "algorithm.advantage": "none", "algorithm.distillation_coefficient": 1.0}
    holds(draft, expected, {})
    assert "orchestrator.training_mode" not in draft.lost


@pytest.mark.parametrize(
    "changes",
    [
        {"orchestrator.training_mode": "sft", "orchestrator.teacher.model.name": "/teacher"},
        {"orchestrator.use_sft_loss": True, "orchestrator.teacher_rollout_model.model.name": "/teacher"},
    ],
)
def test_learning_the_answers_of_a_teacher_is_for_the_other_application(changes: dict[str, Any]) -> None:
    draft = prime_rl(**changes)
    assert "train on them with sft-app" in draft.lost[next(iter(changes))]
    assert "teacher.path" not in draft.entries


def test_a_loss_that_is_not_known_is_called_so() -> None:
    assert "cispo is not known here" in prime_rl(**{"trainer.loss.type": "cispo"}).lost["trainer.loss.type"]


@pytest.mark.parametrize("made", ["run_$(date +%F)/data", "$(python where.py)/data", "${A[1]}/data", "${A%%x}"])
def test_a_path_that_a_command_makes_is_asked_for(
    made: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = import_verl({**VERL, "actor_rollout_ref.model.path": made, "data.val_files": [made, "/b"]})
    assert not {"model.path", "eval.sets"} & set(draft.entries)
    assert "none is run: set model.path" in draft.lost["actor_rollout_ref.model.path"]
    assert "set eval.sets" in draft.lost["data.val_files"]


def test_a_path_below_the_script_is_found_and_one_below_the_current_folder_stays_so(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "run.sh"
    script.write_text(
        'ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"\n'
        "python -m verl.trainer.main_ppo data.train_files=$ROOT/train.parquet data.val_files=$(pwd)/val.parquet"
    )
    options = read_options(script, is_hydra=True).options
    assert options == {"data.train_files": f"{tmp_path}/train.parquet", "data.val_files": "${PWD}/val.parquet"}


def test_files_that_a_file_of_hydra_begins_with_are_read_or_told(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "base.yaml").write_text("defaults: [ppo_trainer, first]\na: {x: 1, y: 1, z: 1}\n")
    (tmp_path / "first.yaml").write_text("defaults: [base]\na: {x: 0, w: 0}\n")  # each names the other
    (tmp_path / "part" / "small.yaml").write_text("a: {z: 3}\n")
    (tmp_path / "run.yaml").write_text("defaults: [base, gone, _self_, {part: small}]\na: {y: 2, z: 2}\n")
    source = read_options(tmp_path / "run.yaml", is_hydra=True)
    assert source.options == {"a.x": 1, "a.w": 0, "a.y": 2, "a.z": 3}
    assert any("defaults: gone: there is no gone.yaml beside run.yaml" in line for line in source.not_understood)


@pytest.mark.parametrize(
    ("framework", "text", "said"),
    [
        ("verl", "python -m verl.trainer.main worker.actor.model.model_path=/m algorithm.adv_estimator=grpo", "EasyR1"),
        ("verl", "export N=1\nbash other/template.sh", "bash other/template.sh: another script, not read: import that"),
        (
            "openrlhf",
            "python -m openrlhf.cli.multi_agent_train_ppo_ray --prompt_data /d",
            "starts openrlhf.cli.multi_agent",
        ),
    ],
)
def test_what_is_not_imported_says_what_it_is(framework: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(text)
    with pytest.raises(ConfigError, match=said):
        import_command(CommandWords(options={"out": str(tmp_path / "new.toml")}), framework, str(tmp_path / "run.sh"))

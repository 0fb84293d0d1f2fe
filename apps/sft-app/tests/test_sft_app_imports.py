"""Options of verl's and TRL's supervised trainers become a configuration that loads; what is no such run is refused."""

import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from offbeat_recipes import RecipeBuilder, Source
from offbeat_testing import CommandLine
from sft_app._imports.trl import import_preferences, import_supervised

# Options of verl b178a3cd (2026-01-29), of a script of examples/sft/gsm8k that trains adapters.
VERL = """
nproc_per_node=$1
torchrun --standalone --nnodes=1 --nproc_per_node=$nproc_per_node -m verl.trainer.fsdp_sft_trainer \\
    data.train_files=$HOME/data/gsm8k/train.parquet \\
    data.prompt_key=extra_info \\
    data.response_key=extra_info \\
    optim.lr=1e-4 \\
    data.prompt_dict_keys=['question'] \\
    +data.response_dict_keys=['answer'] \\
    data.micro_batch_size_per_gpu=64 \\
    model.partial_pretrain=Qwen/Qwen3-8B \\
    trainer.total_epochs=2 \\
    model.lora_rank=32 \\
    model.lora_alpha=16 \\
    ulysses_sequence_parallel_size=2
"""
# Options of TRL f2cd5771 (2026-07-24), examples/cli_configs/example_config.yaml, and of SFTConfig.
TRL = """
model_name_or_path: Qwen/Qwen2.5-0.5B
dataset_name: stanfordnlp/imdb
learning_rate: 0.0001
lr_scheduler_type: cosine
gradient_accumulation_steps: 4
packing: true
max_steps: 500
"""


def imported(command: CommandLine, framework: str, name: str, text: str, folder: Path) -> tuple[dict[str, dict], str]:
    """Sections of what was written, and what was said."""
    (folder / name).write_text(text)
    ended = command("import", framework, folder / name, "--out", folder / "mine.toml")
    assert ended.code == 0, ended.err
    assert "corrected" not in ended.out
    return tomllib.loads((folder / "mine.toml").read_text()), ended.out


@pytest.mark.parametrize(
    ("more", "code"),
    [("", 0), ("optim: adafactor\n", 4), ("some_option_of_a_fork: 3\n", 4), ("neftune_noise_alpha: 0\n", 0)],
)
def test_what_changes_the_result_decides_the_exit_code(
    command: CommandLine, tmp_path: Path, more: str, code: int
) -> None:
    (tmp_path / "sft.yaml").write_text(TRL + more)
    lenient = command("import", "trl", tmp_path / "sft.yaml", "--out", tmp_path / "a.toml")
    strict = command("import", "trl", tmp_path / "sft.yaml", "--out", tmp_path / "b.toml", "--strict")
    assert (lenient.code, strict.code) == (0, code)
    assert strict.out.startswith("not supported here, and changes the result:") is (code == 4)


def test_a_script_of_verl_becomes_a_configuration(command: CommandLine, tmp_path: Path) -> None:
    held, said = imported(command, "verl", "run.sh", VERL, tmp_path)
    assert held["data"]["prompt_column"] == "extra_info.question"
    assert held["data"]["completion_column"] == "extra_info.answer"
    assert (held["engine"]["lora_rank"], held["engine"]["lora_alpha"]) == (32, 16.0)
    assert (held["engine"]["batch_size"], held["engine"]["learning_rate"]) == (256, 1e-4)
    assert held["engine"]["options"] == {"context_parallel": 2}
    assert "optim.lr_warmup_steps_ratio: 0.1 of all steps" in said.partition("\n\n")[0]


def test_several_nodes_of_verl_are_those_of_a_ray_cluster(command: CommandLine, tmp_path: Path) -> None:
    held, _ = imported(command, "verl", "run.sh", VERL.replace("epochs=2", "epochs=2 trainer.nnodes=2"), tmp_path)
    assert (held["engine"]["num_ranks"], held["cluster"]["launcher"]) == (16, "ray")


def test_a_configuration_of_trl_becomes_ours(command: CommandLine, tmp_path: Path) -> None:
    held, said = imported(command, "trl", "sft.yaml", TRL, tmp_path)
    assert (held["engine"]["batch_size"], held["engine"]["max_updates"], held["data"]["epochs"]) == (32, 500, 0)
    assert held["engine"]["learning_rate"] == 1e-4
    assert held["engine"]["dtype"] == "bfloat16"
    assert "packing = true: sequences are always packed" in said


@pytest.mark.parametrize(
    ("trainer", "options", "section", "learning_rate"),
    [
        ("dpo", "loss_type: [ipo]\nbeta: 0.3\n", {"loss": "ipo", "beta": 0.3}, 1e-4),
        ("dpo", "loss_type: sigmoid\n", {"loss": "dpo", "beta": 0.1}, 1e-4),
        (
            "kto",
            "desirable_weight: 1.3\n",
            {"loss": "kto", "beta": 0.1, "desirable_weight": 1.3, "undesirable_weight": 1.0},
            1e-4,
        ),
        ("orpo", "beta: 0.2\n", {"loss": "orpo", "beta": 0.2}, 1e-4),
        (
            "cpo",
            "loss_type: simpo\nbeta: 2\ncpo_alpha: 0\n",
            {"loss": "simpo", "beta": 2.0, "target_margin": 0.5, "label_smoothing": 0.0},
            1e-4,
        ),
        ("reward", "center_rewards_coefficient: 0.01\n", {"loss": "reward", "center_rewards": 0.01}, 1e-4),
    ],
)
def test_options_of_trls_preference_trainers_become_ours(
    command: CommandLine, tmp_path: Path, trainer: str, options: str, section: dict[str, object], learning_rate: float
) -> None:
    held, said = imported(command, f"trl-{trainer}", "run.yaml", TRL + options, tmp_path)
    assert held["preference"] == section
    assert held["engine"]["learning_rate"] == learning_rate
    assert held["engine"]["batch_size"] == 32
    assert "changes the result" not in said, said


def test_names_of_the_hub_keep_their_revision_and_part(tmp_path: Path) -> None:
    options = {"model_name_or_path": "Qwen/Qwen3-0.6B", "model_revision": "v1", "dataset_config": "main"}
    draft = import_supervised(Source(options={**options, "dataset_name": "openai/gsm8k"}))
    written = {key: draft.entries[key].value for key in ("model.path", "data.path")}
    assert written == {"model.path": "Qwen/Qwen3-0.6B@v1", "data.path": "openai/gsm8k:main"}
    assert not {"model_revision", "dataset_config"} & draft.changed.keys()
    draft = import_supervised(Source(options={**options, "dataset_name": str(tmp_path)}))
    assert draft.entries["data.path"].value == str(tmp_path)
    assert "no main is looked for" in str(draft.changed)


@pytest.mark.parametrize("read", [import_supervised, partial(import_preferences, "dpo")])
def test_no_longest_sequence_of_trl_is_none_here(read: Callable[[Source], RecipeBuilder]) -> None:
    draft = read(Source(options={"max_length": None}))
    held = {key: entry.value for key, entry in draft.entries.items()}
    assert held["data.max_sequence_tokens"] >= 10**6
    assert held["data.too_long"] == "filter"
    assert "no limit" in draft.changed["max_length"]


def test_shares_of_all_steps_and_a_least_rate_are_not_lost(command: CommandLine, tmp_path: Path) -> None:
    more = "warmup_ratio: 0.1\nsave_steps: 0.2\neval_strategy: no\nlr_scheduler_kwargs: {min_lr_rate: 0.1}\n"
    held, said = imported(command, "trl", "sft.yaml", TRL + more, tmp_path)
    assert (held["engine"]["warmup_steps"], held["checkpoint"]["every"]) == (50, 100)
    assert held["engine"]["min_learning_rate_ratio"] == 0.1
    assert "eval_strategy" not in said.partition("has no effect here:")[0]


@pytest.mark.parametrize(
    ("framework", "name", "text", "said"),
    [
        ("trl", "dpo.yaml", "model_name_or_path: m\nbeta: 0.1\n", "learns from preferences (beta): name its trainer"),
        ("trl-dpo", "dpo.yaml", "loss_type: [hinge]\n", "loss_type = 'hinge' is not supported"),
        ("trl-cpo", "cpo.yaml", "beta: 0.1\n", "preference.loss has TRL's simpo"),
        ("trl", "grpo.yaml", "reward_funcs: accuracy\n", "import it with grpo-async-app"),
        (
            "trl",
            "mine.toml",
            '[data]\npath = "x"\n',
            "holds no option of trl that is known here, but data.path: give a",
        ),
        ("verl", "config.json", '{"hidden_size": 8, "vocab_size": 9}', "holds no option of verl that is known here"),
        (
            "verl",
            "grpo.sh",
            "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo",
            "of reinforcement learning",
        ),
        (
            "openrlhf",
            "sft.sh",
            "",
            "import knows verl, trl, trl-dpo, trl-kto, trl-orpo, trl-cpo, trl-reward: got 'openrlhf'",
        ),
    ],
)
def test_what_is_no_supervised_run_is_refused(
    command: CommandLine, tmp_path: Path, framework: str, name: str, text: str, said: str
) -> None:
    (tmp_path / name).write_text(text)
    ended = command("import", framework, tmp_path / name)
    assert ended.code == 2
    assert said in ended.err

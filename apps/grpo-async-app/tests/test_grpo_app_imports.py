"""Options of verl and TRL become a configuration that loads, and what does not carry over is reported."""

import json
from pathlib import Path

import pytest

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._imports.trl import import_trl
from grpo_async_app._imports.verl import import_verl
from offbeat_core import ConfigError, load_config, parse_config
from offbeat_recipes._imports.options import read_options, read_value
from offbeat_testing import CommandLine

SCRIPT = r"""
#!/usr/bin/env bash
set -xeuo pipefail
# A run on one machine: half of it samples.
ENGINE=${1:-vllm}
MODEL_PATH=${MODEL_PATH:-"${MODELS_ROOT}/Qwen3-VL-8B-Instruct"}
train_path=$HOME/data/geo3k/train.parquet
NGPUS=${NGPUS:-8}
n_rollout=4
n_train=$((NGPUS - n_rollout))
total=$(((512*10)))
mode="async"
if [ "$mode" = "async" ]; then
    export VLLM_USE_V1=1
    chat="True"
fi
CORRECTION=(
    algorithm.rollout_correction.rollout_is=sequence   # the weight
    algorithm.rollout_correction.rollout_is_threshold=2.0
    algorithm.rollout_correction.rollout_is_batch_normalize=True
    algorithm.rollout_correction.rollout_rs=token_k1
    algorithm.rollout_correction.rollout_rs_threshold="0.6_1.6"
    algorithm.rollout_correction.bypass_mode=True
)

python3 -m verl.experimental.fully_async_policy.fully_async_main \
    --config-name='fully_async_ppo_trainer.yaml' \
    algorithm.adv_estimator=grpo \
    data.train_files="$train_path" \
    data.val_files="['$HOME/data/geo3k/test.parquet']" \
    data.max_prompt_length=1024 \
    data.max_response_length=2048 \
    data.filter_overlong_prompts=True \
    data.image_key=images \
    data.return_raw_chat=${chat} \
    actor_rollout_ref.model.path=$MODEL_PATH \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.01 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.fsdp_config.param_offload=False \
    actor_rollout_ref.rollout.name=$ENGINE \
    actor_rollout_ref.rollout.n=4 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.8 \
    +actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache=True \
    "${CORRECTION[@]}" \
    trainer.logger='["console","wandb"]' \
    trainer.total_epochs=15 \
    trainer.test_freq=5 \
    trainer.save_freq=-1 \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node="${n_train}" \
    rollout.nnodes=1 \
    rollout.n_gpus_per_node="${n_rollout}" \
    rollout.total_rollout_steps="${total}" \
    async_training.staleness_threshold=0.1 \
    async_training.trigger_parameter_sync_step=4 \
    async_training.require_batches=2 \
    async_training.partial_rollout=True \
    trainer.device=cuda $@
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MODELS_ROOT", "/models")
    path = tmp_path / "run_geo3k.sh"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def imported(command: CommandLine, script: Path, tmp_path: Path) -> tuple[Path, str]:
    """What the script becomes, and what was said."""
    ended = command("import", "verl", script, "--out", tmp_path / "geo3k.toml")
    assert ended.code == 0, ended.err
    return tmp_path / "geo3k.toml", " ".join(ended.out.split())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("64", 64),
        ("True", True),
        ("null", None),
        ("'error'", "error"),
        ('["console","wandb"]', ["console", "wandb"]),
        ("[0.9, 0.999]", [0.9, 0.999]),
        ("0.6_1.6", "0.6_1.6"),
    ],
)
def test_values_are_read_as_hydra_reads_them(text: str, value: object) -> None:
    assert read_value(text) == value


def test_a_script_of_verl_becomes_a_configuration_that_plans(
    command: CommandLine, imported: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, _ = imported
    monkeypatch.setenv("HOME", "/home/user")
    config = load_config(target, GrpoConfig)
    assert config.model.path == "/models/Qwen3-VL-8B-Instruct"
    assert config.data.path == "/home/user/data/geo3k/train.parquet"
    assert config.data.eval_path == "/home/user/data/geo3k/test.parquet"
    assert config.data.answer_column == "reward_model.ground_truth", "where verl's rows have it"
    policy = config.async_
    assert (policy.staleness_threshold, policy.trigger_parameter_sync_step, policy.require_batches) == (0.1, 4, 2)
    assert (policy.mini_batch_size, policy.partial_rollout, policy.max_admitted) == (64, True, 563)
    assert (config.engine.num_ranks, config.rollout.num_engines, config.rollout.tensor_parallel) == (4, 2, 2)
    sampling = config.rollout
    assert (sampling.max_tokens, sampling.max_model_len, sampling.samples_per_prompt) == (2048, 3072, 4)
    assert config.rollout.options == {"disable_mm_preprocessor_cache": True, "gpu_memory_utilization": 0.8}
    assert (config.algorithm.kl_coefficient, config.algorithm.kl_estimator) == (0.01, "k3_capped")
    assert (config.engine.weight_decay, config.engine.adam_beta2) == (0.01, 0.999)
    assert config.engine.max_updates == 40
    assert config.eval.every_updates == 20
    assert config.log.trackers == ("wandb",)
    assert command("plan", target, "--cluster", "1x8").code == 0


def test_a_correction_that_would_have_no_effect_is_given_one_and_told(imported: tuple[Path, str]) -> None:
    target, output = imported
    algorithm = load_config(target, GrpoConfig).algorithm
    assert (algorithm.correction, algorithm.correction_form) == ("sequence_tis_token_rs", "decoupled")
    assert (algorithm.tis_cap, algorithm.rs_low, algorithm.rs_high) == (2.0, 1 / 1.6, 1 / 0.6), "k1 is -log r"
    assert algorithm.normalise_weights
    assert "a weight has no effect or counts it twice" in output


def test_what_has_no_counterpart_is_listed_in_both_places(imported: tuple[Path, str]) -> None:
    text, output = imported[0].read_text(), imported[1]
    option = "actor_rollout_ref.actor.fsdp_config.param_offload"
    assert option in text
    assert option in output
    assert "data.image_key" not in text, "its images are read, from the column that it names"
    assert "always the case here" in output
    assert "# actor_rollout_ref.actor.optim.lr" in text
    assert "# default of actor_rollout_ref.actor.optim.betas" in text


def test_every_option_of_a_script_is_accounted_for(script: Path) -> None:
    options = read_options(script, is_hydra=True).options
    draft = import_verl(options)
    sources = " ".join(entry.source for entry in draft.entries.values())
    silent = {"data.image_key", "actor_rollout_ref.actor.use_kl_loss", "algorithm.rollout_correction.bypass_mode"}
    for name in options:
        is_mentioned = name in sources or any(name in found for found in draft.messages().values())
        assert is_mentioned or name in silent or name == "trainer.logger", name


def test_verls_yaml_is_read_with_what_it_refers_to(tmp_path: Path) -> None:
    path = tmp_path / "ppo.yaml"
    path.write_text("""
defaults: [ppo_trainer, _self_]
data:
  train_files: ${oc.env:DATA_ROOT,/data}/train.parquet
  train_batch_size: 256
  max_prompt_length: 512
  max_response_length: 1024
actor_rollout_ref:
  model: {path: /models/Qwen3-8B}
  actor:
    strategy: megatron
    ppo_mini_batch_size: 64
    optim: {lr: 1e-6}
    megatron: {tensor_model_parallel_size: 4, pipeline_model_parallel_size: 2}
    policy_loss: {loss_mode: gspo}
    clip_ratio_low: 3e-4
    clip_ratio_high: 4e-4
    loss_agg_mode: seq-mean-token-mean
  rollout:
    name: sglang
    n: 8
    prompt_length: ${data.max_prompt_length}
algorithm: {adv_estimator: rloo}
trainer: {nnodes: 2, n_gpus_per_node: 8, total_epochs: 3}
""")
    options = read_options(path, is_hydra=True).options
    assert options["actor_rollout_ref.rollout.prompt_length"] == 512
    draft = import_verl(options)
    held = {key: entry.value for key, entry in draft.entries.items()}
    assert held["data.path"] == "${DATA_ROOT:-/data}/train.parquet"
    assert (held["engine.backend"], held["engine.dtype"]) == ("megatron", "bfloat16")
    assert held["engine.options"] == {"tensor_parallel": 4, "pipeline_parallel": 2}
    assert (held["engine.num_ranks"], held["cluster.colocate"], held["rollout.num_engines"]) == (16, True, 8)
    assert (held["async.require_batches"], held["async.staleness_threshold"]) == (4, 0)
    assert (held["algorithm.advantage"], held["algorithm.loss"]) == ("rloo", "gspo")
    assert (held["algorithm.clip_low"], held["algorithm.aggregation"]) == (3e-4, "sequence_mean")
    assert "actor_rollout_ref.rollout.name" in draft.changed
    (tmp_path / "ppo.toml").write_text(draft.as_toml("head", {}))
    assert load_config(tmp_path / "ppo.toml", GrpoConfig).async_.groups_per_update == 256


TRL = {
    "model_name_or_path": "/models/Qwen3-1.7B",
    "dataset_name": "/data/math",
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "num_processes": 2,
    "num_generations": 8,
    "max_completion_length": 512,
    "max_prompt_length": 256,
    "use_vllm": True,
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_cap": 2.0,
    "learning_rate": 1e-6,
    "beta": 0.04,
    "epsilon_high": 0.28,
    "loss_type": "dr_grpo",
    "scale_rewards": False,
    "num_iterations": 2,
    "mask_truncated_completions": True,
    "max_steps": 100,
    "save_steps": 20,
    "report_to": ["wandb", "tensorboard"],
    "chat_template_kwargs": {"enable_thinking": False},
}


@pytest.mark.parametrize("form", ["json", "yaml"])
def test_a_configuration_of_trl_becomes_ours(command: CommandLine, tmp_path: Path, form: str) -> None:
    path, target = tmp_path / f"grpo.{form}", tmp_path / "ours.toml"
    lines = [f"{name}: {json.dumps(value)}" for name, value in TRL.items()]
    path.write_text(json.dumps(TRL) if form == "json" else "\n".join(lines))
    ended = command("import", "trl", path, "--out", target)
    assert ended.code == 0, ended.err
    config = load_config(target, GrpoConfig)
    assert (config.async_.mini_batch_size, config.rollout.samples_per_prompt, config.engine.num_ranks) == (8, 8, 2)
    assert (config.async_.staleness_threshold, config.rollout.backend) == (0, "vllm")
    assert (config.algorithm.advantage, config.algorithm.aggregation) == ("dr_grpo", "fixed_length")
    assert (config.algorithm.fixed_length, config.algorithm.clip_low, config.algorithm.clip_high) == (512, 0.2, 0.28)
    assert (config.algorithm.kl_coefficient, config.algorithm.correction) == (0.04, "token_tis")
    assert (config.engine.schedule, config.engine.max_updates, config.engine.adam_beta2) == ("linear", 50, 0.999)
    assert (config.algorithm.num_passes, config.checkpoint.every) == (2, 10), "100 steps, 2 of an update"
    assert (config.algorithm.mask_truncated, config.algorithm.kl_ratio_weight) == (True, False)
    assert config.data.template_options == {"enable_thinking": False}
    assert config.log.trackers == ("wandb",)
    output = " ".join(ended.out.split())
    assert "mask_truncated_completions = true: sequences that were cut off count among those" in output
    assert "64 of a step are 8 prompts" in output
    assert "but it has to be corrected before it runs" not in output


def test_what_stays_open_is_something_to_put_right(command: CommandLine, tmp_path: Path) -> None:
    path, target = tmp_path / "run.sh", tmp_path / "ours.toml"
    path.write_text("python -m verl.main data.train_files=/d trainer.nnodes=$NODES algorithm.adv_estimator=mine\n")
    ended = command("import", "verl", path, "--out", target)
    assert ended.code == 0, ended.err
    output = " ".join(ended.out.split())
    assert "${NODES} is unknown here: using 1" in output
    assert "mine is not supported: using grpo instead" in output
    assert "but it has to be corrected before it runs" in output
    assert "model.path" in output


@pytest.mark.parametrize(
    ("option", "remark"),
    [
        ("data.max_prompt_length=many", "many is unknown here: using 512"),
        ("actor_rollout_ref.actor.optim.lr=fast", "fast is unknown here: using 1e-06"),
        ("actor_rollout_ref.actor.optim.lr=1e400", "inf is unknown here: using 1e-06"),
        (f"data.max_prompt_length={'9' * 5000}", "is unknown here: using 512"),
        ("actor_rollout_ref.rollout.update_weights_bucket_megabytes=1e400", "inf is unknown here"),
        ("data.train_files=[]", "keys written"),
    ],
    ids=lambda each: each[:40],
)
def test_a_value_of_another_kind_than_its_option_is_told(
    command: CommandLine, tmp_path: Path, option: str, remark: str
) -> None:
    path, target = tmp_path / "run.sh", tmp_path / "ours.toml"
    path.write_text(f"python -m verl.main actor_rollout_ref.model.path=/m {option}\n")
    ended = command("import", "verl", path, "--out", target)
    assert ended.code == 0, ended.err
    assert remark in " ".join(ended.out.split())


def test_of_two_names_for_one_option_that_of_today_is_read_and_the_other_told(
    command: CommandLine, tmp_path: Path
) -> None:
    path, target = tmp_path / "run.sh", tmp_path / "ours.toml"
    path.write_text(
        "python -m openrlhf.cli.train_ppo_ray --pretrain /old --actor.model_name_or_path /new --prompt_data /rows "
        "--data.prompt_dataset /rows\n"
    )
    ended = command("import", "openrlhf", path, "--out", target)
    assert ended.code == 0, ended.err
    output = " ".join(ended.out.split())
    assert 'pretrain = "/old": not read beside actor.model_name_or_path, which is the name of today' in output
    assert "prompt_data = " not in output, "two that agree are one"
    assert 'path = "/new"' in target.read_text()


def test_dates_and_numbered_names_of_a_yaml_file_are_texts(command: CommandLine, tmp_path: Path) -> None:
    path, target = tmp_path / "grpo.yaml", tmp_path / "ours.toml"
    path.write_text("model_name_or_path: /m\ndataset_name: 2026-11-28\nmax_completion_length: 64\n1: one\n")
    ended = command("import", "trl", path, "--out", target)
    assert ended.code == 0, ended.err
    assert 'path = "2026-11-28"' in target.read_text()
    assert '1 = "one"' in " ".join(ended.out.split())


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
@pytest.mark.parametrize("levels", [100, 100_000])
def test_a_file_of_too_many_levels_is_one_clear_error(
    command: CommandLine, tmp_path: Path, suffix: str, levels: int
) -> None:
    path = tmp_path / f"deep{suffix}"
    path.write_text('{"a": ' + "[" * levels + "]" * levels + "}")
    ended = command("import", "trl", path)
    assert ended.code == 2
    assert "at most 64 levels of tables and lists are read" in ended.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nemo", "x.sh"], "import knows verl, trl, openrlhf, prime-rl: got 'nemo'"),
        (["verl", "/nowhere.sh"], "/nowhere.sh cannot be read: No such file or directory; give a file of options"),
        (["verl", "/"], "/ cannot be read: Is a directory; give a file of options"),
        (["verl"], "import takes 2 arguments, FRAMEWORK FILE, got 1 (verl)"),
    ],
)
def test_wrong_words_are_one_clear_error(command: CommandLine, words: list[str], said: str) -> None:
    ended = command("import", *words)
    assert ended.code == 2
    assert said in ended.err


def test_a_file_that_is_there_is_not_written_over(command: CommandLine, script: Path, tmp_path: Path) -> None:
    target = tmp_path / "mine.toml"
    target.write_text("mine")
    ended = command("import", "verl", script, "--out", target)
    assert ended.code == 2
    assert "exists already" in ended.err
    assert target.read_text() == "mine"


def test_a_script_without_options_and_a_script_for_trl_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.sh"
    path.write_text("echo nothing\n")
    with pytest.raises(ConfigError, match="holds no options"):
        read_options(path, is_hydra=True)
    with pytest.raises(ConfigError, match=r"\.yaml"):
        read_options(path, is_hydra=False)


@pytest.mark.parametrize("text", ["", "# all of it is commented out\n"])
def test_an_empty_yaml_file_is_refused_as_one_without_options(text: str, tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text(text)
    for is_hydra in (True, False):
        with pytest.raises(ConfigError, match=r"empty\.yaml holds no options"):
            read_options(path, is_hydra=is_hydra)


PREFIX = "actor_rollout_ref."


def test_options_that_refer_to_options_that_refer_to_others_are_put_in(tmp_path: Path) -> None:
    path = tmp_path / "verl.yaml"
    path.write_text("data:\n  a: ${data.b}\n  b: ${data.c}\n  c: 512\n  d: ${data.e}\n  e: ${data.d}\n")
    options = read_options(path, is_hydra=True).options
    assert (options["data.a"], options["data.b"]) == (512, 512)
    assert str(options["data.d"]).startswith("${")


def test_a_value_of_several_lines_leaves_a_file_that_loads() -> None:
    draft = import_verl({"data.max_prompt_length": "$(count\n[data]\npath = 1)", f"{PREFIX}model.path": "m"})
    assert "data.max_prompt_length" in draft.changed
    parse_config(draft.as_toml("head", {}), GrpoConfig, ["--data.path=x"])


def test_a_format_that_was_not_asked_for_is_not_spoken_of() -> None:
    assert "fp16" not in import_trl({"fp16": False, "bf16": True}).changed
    assert "fp16" in import_trl({"fp16": True}).lost


def test_a_folder_that_is_not_there_is_one_clear_error(command: CommandLine, script: Path, tmp_path: Path) -> None:
    ended = command("import", "verl", script, "--out", tmp_path / "nowhere" / "mine.toml")
    assert ended.code == 2
    assert "cannot be written" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(("mode", "loss"), [("gspo", "gspo"), ("sapo", "sapo"), ("geo_mean", "gmpo")])
def test_verl_takes_the_mean_over_sequences_for_losses_of_sequences_whatever_it_is_told(mode: str, loss: str) -> None:
    options = {f"{PREFIX}actor.policy_loss.loss_mode": mode, f"{PREFIX}actor.tau_neg": 1.1}
    for given in ({}, {f"{PREFIX}actor.loss_agg_mode": "token-mean"}):
        draft = import_verl(options | given)
        assert draft.entries["algorithm.loss"].value == loss
        assert draft.entries["algorithm.aggregation"].value == "sequence_mean"
        assert (f"{PREFIX}actor.loss_agg_mode" in draft.changed) == bool(given)
    assert ("algorithm.options" in draft.entries) == (loss == "sapo")
    if loss == "sapo":
        assert draft.entries["algorithm.options"].value == {"tau_positive": 1.0, "tau_negative": 1.1}

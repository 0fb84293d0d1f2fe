"""`import verl` keeps what a script leaves to the environment, and says what it sets there."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._imports.command import import_command
from offbeat_run import CommandWords, load_config

# As verl's scripts of fully asynchronous runs are written (verl/experimental/fully_async_policy/shell), with the keys
# of its document: a part.
SCRIPT = """
export CUDA_DEVICE_MAX_CONNECTIONS=1
export VLLM_USE_V1=1
export NCCL_BUFFSIZE=300
export DATA_DIR=$HOME/data/geo3k
HF_MODEL_PATH=${HF_MODEL_PATH:-"${RAY_DATA_HOME}/models/Qwen3-VL-8B-Instruct"}
NNODES=${NNODES:-2}
TOKENIZERS_PARALLELISM=true python3 -m verl.experimental.fully_async_policy.fully_async_main \\
    data.train_files=$HOME/data/geo3k/train.parquet \\
    data.val_files=$DATA_DIR/test.parquet \\
    actor_rollout_ref.model.path=$HF_MODEL_PATH \\
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \\
    actor_rollout_ref.rollout.name=sglang \\
    actor_rollout_ref.rollout.quantization=fp8 \\
    +actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=fa3 \\
    algorithm.adv_estimator=grpo \\
    trainer.nnodes=$NNODES \\
    trainer.log_val_generations=10 \\
    async.staleness_threshold=10 \\
    async.trigger_parameter_sync_step=5 \\
    async.require_batches=2 \\
    async.partial_rollout=True \\
    async.use_rollout_log_probs=True \\
    async.rollout_correction=sequence_tis_geometric_rs
"""


@dataclass(frozen=True)
class Imported:
    target: Path
    told: str

    @property
    def text(self) -> str:
        return self.target.read_text()


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Imported:
    for name in ("HF_MODEL_PATH", "RAY_DATA_HOME", "OFFBEAT_DATA", "OFFBEAT_MODELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("NNODES", "4")
    (tmp_path / "run.sh").write_text(SCRIPT)
    target = tmp_path / "run.toml"
    assert import_command(CommandWords(options={"out": str(target)}), "verl", str(tmp_path / "run.sh")) == 0
    return Imported(target, capsys.readouterr().out)


def test_keys_of_section_async_are_those_of_async_training(imported: Imported) -> None:
    config = load_config(imported.target, GrpoConfig)
    policy = config.async_
    assert (policy.staleness_threshold, policy.trigger_parameter_sync_step, policy.require_batches) == (10, 5, 2)
    assert policy.partial_rollout
    assert config.algorithm.correction == "sequence_tis_geometric_rs"
    assert config.algorithm.correction_form == "decoupled"
    assert "async_training." not in imported.told.partition("has no counterpart")[2]


def test_a_variable_with_a_default_stays_a_variable(imported: Imported, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 'path = "${HF_MODEL_PATH:-~/verl/models/Qwen3-VL-8B-Instruct}"' in imported.text
    assert load_config(imported.target, GrpoConfig).model.path == "/home/somebody/verl/models/Qwen3-VL-8B-Instruct"
    monkeypatch.setenv("HF_MODEL_PATH", "/models/q")
    assert load_config(imported.target, GrpoConfig).model.path == "/models/q"
    assert "RAY_DATA_HOME is set nowhere: ~/verl stands in its place" in imported.told


def test_paths_below_the_home_folder_are_portable_and_said(imported: Imported, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 'path = "${OFFBEAT_DATA:-~/data}/geo3k/train.parquet"' in imported.text
    assert 'eval_path = "${OFFBEAT_DATA:-~/data}/geo3k/test.parquet"' in imported.text
    assert load_config(imported.target, GrpoConfig).data.path == "/home/somebody/data/geo3k/train.parquet"
    monkeypatch.setenv("OFFBEAT_DATA", "/mnt")
    assert load_config(imported.target, GrpoConfig).data.path == "/mnt/geo3k/train.parquet"
    assert "OFFBEAT_DATA names the folder of data" in imported.told


def test_a_variable_of_the_environment_that_a_number_depends_on_is_said(imported: Imported) -> None:
    assert load_config(imported.target, GrpoConfig).engine.num_ranks == 16
    assert "NNODES = 2 stands, the default of the script; it is 4 here: --set NNODES=4" in imported.told


def test_what_is_set_at_import_goes_into_a_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imported: Imported
) -> None:
    monkeypatch.setenv("RAY_DATA_HOME", "/mnt/ray")
    target = tmp_path / "second.toml"
    assert import_command(CommandWords(options={"out": str(target)}), "verl", str(tmp_path / "run.sh")) == 0
    assert load_config(target, GrpoConfig).model.path == "/mnt/ray/models/Qwen3-VL-8B-Instruct"


def test_what_the_script_exports_is_said_with_what_to_do(imported: Imported) -> None:
    for place in (imported.told, imported.text):
        assert "VLLM_USE_V1 = 1: not needed" in place
        assert "CUDA_DEVICE_MAX_CONNECTIONS = 1: set it yourself before the run" in place
        assert "NCCL_BUFFSIZE = 300: set it yourself before the run" in place
        assert "TOKENIZERS_PARALLELISM = true: not needed" in place
    assert "DATA_DIR" not in imported.told, "the script uses it itself"


def test_quantized_rollouts_and_generations_of_a_validation_are_taken_over(imported: Imported) -> None:
    config = load_config(imported.target, GrpoConfig)
    assert (config.rollout.backend, config.rollout.weight_format) == ("vllm", "fp8")
    assert config.log.generations == 10
    assert "vllm takes its place" in imported.told
    assert "attention_backend" in imported.told
    assert "SGLang's own" in imported.told

"""`import verl` keeps what a script leaves to the environment, and says what it sets there."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from grpo_async_app._config.reward_model import reward_model_of
from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._imports.command import import_command
from offbeat_core import load_config
from offbeat_run import CommandWords

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
    output: str

    @property
    def text(self) -> str:
        return self.target.read_text()


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Imported:
    for name in ("HF_MODEL_PATH", "RAY_DATA_HOME", "OFFBEAT_DATA", "OFFBEAT_MODELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/user")
    monkeypatch.setenv("NNODES", "4")
    (tmp_path / "run.sh").write_text(SCRIPT)
    target = tmp_path / "run.toml"
    assert import_command(CommandWords(options={"out": str(target)}), "verl", str(tmp_path / "run.sh")) == 0
    return Imported(target, capsys.readouterr().out)


def lines_under(title: str, output: str) -> list[str]:
    """Return the lines that an import prints under headings that begin so."""
    found, heading = [], ""
    for line in output.splitlines():
        if not line.startswith("  "):
            heading = line
        elif heading.startswith(title):
            found.append(line)
    assert found
    return found


def test_keys_of_section_async_are_those_of_async_training(imported: Imported) -> None:
    config = load_config(imported.target, GrpoConfig)
    policy = config.async_
    assert (policy.staleness_threshold, policy.trigger_parameter_sync_step, policy.require_batches) == (10, 5, 2)
    assert policy.partial_rollout
    assert config.algorithm.correction == "sequence_tis_geometric_rs"
    assert config.algorithm.correction_form == "decoupled"
    assert "async_training." in imported.output
    assert not [line for line in lines_under("not supported here, ", imported.output) if "async_training." in line]


def test_a_variable_with_a_default_stays_a_variable(imported: Imported, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 'path = "${HF_MODEL_PATH:-~/verl/models/Qwen3-VL-8B-Instruct}"' in imported.text
    assert load_config(imported.target, GrpoConfig).model.path == "/home/user/verl/models/Qwen3-VL-8B-Instruct"
    monkeypatch.setenv("HF_MODEL_PATH", "/models/q")
    assert load_config(imported.target, GrpoConfig).model.path == "/models/q"
    assert "RAY_DATA_HOME is not set: using ~/verl" in imported.output


def test_paths_below_the_home_folder_are_portable_and_said(imported: Imported, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 'path = "${OFFBEAT_DATA:-~/data}/geo3k/train.parquet"' in imported.text
    assert 'eval_path = "${OFFBEAT_DATA:-~/data}/geo3k/test.parquet"' in imported.text
    assert load_config(imported.target, GrpoConfig).data.path == "/home/user/data/geo3k/train.parquet"
    monkeypatch.setenv("OFFBEAT_DATA", "/mnt")
    assert load_config(imported.target, GrpoConfig).data.path == "/mnt/geo3k/train.parquet"
    assert "OFFBEAT_DATA names the folder of data" in imported.output


def test_a_variable_of_the_environment_that_a_number_depends_on_is_said(imported: Imported) -> None:
    assert load_config(imported.target, GrpoConfig).engine.num_ranks == 16
    assert "NNODES = 2 stands, the default of the script; it is 4 here: --set NNODES=4" in imported.output


def test_what_is_set_at_import_goes_into_a_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imported: Imported
) -> None:
    monkeypatch.setenv("RAY_DATA_HOME", "/mnt/ray")
    target = tmp_path / "second.toml"
    assert import_command(CommandWords(options={"out": str(target)}), "verl", str(tmp_path / "run.sh")) == 0
    assert load_config(target, GrpoConfig).model.path == "/mnt/ray/models/Qwen3-VL-8B-Instruct"


def test_what_the_script_exports_is_said_with_what_to_do(imported: Imported) -> None:
    for place in (imported.output, imported.text):
        assert "VLLM_USE_V1 = 1: not needed" in place
        assert "CUDA_DEVICE_MAX_CONNECTIONS = 1: set it yourself before the run" in place
        assert "NCCL_BUFFSIZE = 300: set it yourself before the run" in place
        assert "TOKENIZERS_PARALLELISM = true: not needed" in place
    assert "DATA_DIR" not in imported.output, "the script uses it itself"


def test_quantized_rollouts_and_generations_of_a_validation_are_taken_over(imported: Imported) -> None:
    config = load_config(imported.target, GrpoConfig)
    assert (config.rollout.backend, config.rollout.weight_format) == ("vllm", "fp8")
    assert config.log.generations == 10
    assert "using vllm instead" in imported.output
    assert "attention_backend" in imported.output
    assert "belongs to SGLang" in imported.output


def written(lines: str, options: str, tmp_path: Path) -> dict[str, str]:
    """Paths of the file that a script becomes, as its text has them.

    Args:
        lines: of the script, before the command.
        options: of the command, beside the least.
    """
    command = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo"
    (tmp_path / "paths.sh").write_text(f"{lines}\n{command} {options}\n")
    target = tmp_path / "paths.toml"
    target.unlink(missing_ok=True)
    assert import_command(CommandWords(options={"out": str(target)}), "verl", str(tmp_path / "paths.sh")) == 0
    held = tomllib.loads(target.read_text())
    held["reward.reward_model"] = held.get("reward", {}).pop("reward_model", {})
    keys = {f"{section}.{key}": value for section, table in held.items() for key, value in table.items()}
    return {key: str(value) for key, value in keys.items() if key.endswith("path")}


SAME = "TRAIN_FILE=${TRAIN_FILE:-/data/a.parquet}\nTEST_FILE=${TEST_FILE:-/data/a.parquet}"
MODEL = "actor_rollout_ref.model.path"
UNUSED = "HF_MODEL=${HF_MODEL:-$HOME/models/q}"


@pytest.mark.parametrize(
    ("lines", "options", "expected"),
    [
        pytest.param(
            SAME,
            "data.train_files=$TRAIN_FILE data.val_files=\"['$TEST_FILE']\"",
            {"data.path": "${TRAIN_FILE:-/data/a.parquet}", "data.eval_path": "${TEST_FILE:-/data/a.parquet}"},
            id="two with the same default",
        ),
        pytest.param(
            SAME,
            "data.train_files=/data/a.parquet data.val_files=$TEST_FILE",
            {"data.path": "/data/a.parquet", "data.eval_path": "${TEST_FILE:-/data/a.parquet}"},
            id="one as it is written and one by its variable",
        ),
        pytest.param(UNUSED, f"{MODEL}=/models/q", {"model.path": "/models/q"}, id="a path as it is written"),
        pytest.param(
            UNUSED,
            f"{MODEL}=$HOME/models/q",
            {"model.path": "${OFFBEAT_MODELS:-~/models}/q"},
            id="below the home folder, beside a variable that is not used",
        ),
        pytest.param(
            UNUSED, f"{MODEL}=$HF_MODEL", {"model.path": "${HF_MODEL:-~/models/q}"}, id="with the home folder in it"
        ),
        pytest.param(
            "MODEL=${HF_MODEL:-/models/q}\nWORDS=(\n  actor_rollout_ref.model.path=$MODEL\n)",
            '"${WORDS[@]}"',
            {"model.path": "${HF_MODEL:-/models/q}"},
            id="by way of another variable and of an array",
        ),
        pytest.param(
            "ROOT=${ROOT:-/mnt}\nACTOR=${ACTOR:-$ROOT/q}\nTEACHER=${TEACHER:-$ROOT/q}",
            f"{MODEL}=$ACTOR distillation.enabled=True data.train_files=$ROOT/q/train.parquet "
            "distillation.teacher_models.teacher_model.model_path=$TEACHER",
            {"model.path": "${ACTOR:-/mnt/q}", "teacher.path": "${TEACHER:-/mnt/q}"}
            | {"data.path": "${ROOT:-/mnt}/q/train.parquet"},
            id="a default that has a variable in it",
        ),
        pytest.param(
            "ROOT=${ROOT:-/mnt}\nROOT=/own",
            f"{MODEL}=$ROOT/q",
            {"model.path": "/own/q"},
            id="a variable that the script sets later",
        ),
        pytest.param(
            "MODEL=${MODEL:-/models/Qwen3-8B}\nTEST_FILE=${TEST_FILE:-/data/a.parquet}",
            f"{MODEL}=/other/$(basename $MODEL) data.train_files=/data/a.parquet",
            {"model.path": "/other/Qwen3-8B", "data.path": "/data/a.parquet"},
            id="a part of a variable",
        ),
        pytest.param(
            "",
            f"{MODEL}=m reward_model.enable=True reward_model.model.path=$HOME/models/judge",
            {"reward.reward_model.path": "${OFFBEAT_MODELS:-~/models}/judge"},
            id="of a reward model",
        ),
        pytest.param(
            "CRITIC=${CRITIC:-/models/critic}",
            f"{MODEL}=m algorithm.adv_estimator=gae critic.model.path=$CRITIC",
            {"critic.path": "${CRITIC:-/models/critic}"},
            id="of a critic",
        ),
        pytest.param(
            "",
            f"{MODEL}=m algorithm.adv_estimator=gae critic.model.path=$HOME/models/critic",
            {"critic.path": "${OFFBEAT_MODELS:-~/models}/critic"},
            id="of a critic below the home folder",
        ),
        pytest.param(
            "A=${A:-/models/q}\nB=${B:-$A}",
            f"{MODEL}=$B",
            {"model.path": "${B:-/models/q}"},
            id="two, one of which stands for the other",
        ),
    ],
)
def test_a_path_has_the_variable_that_its_option_refers_to_and_no_other(
    lines: str, options: str, expected: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TRAIN_FILE", "TEST_FILE", "HF_MODEL", "ROOT", "ACTOR", "TEACHER"):
        monkeypatch.delenv(name, raising=False)
    found = written(lines, options, tmp_path)
    assert {key: found.get(key) for key in expected} == expected


def test_a_reward_model_is_one_of_the_run(tmp_path: Path) -> None:
    written("", f"{MODEL}=m reward_model.enable=True reward_model.model.path=/models/judge", tmp_path)
    model = reward_model_of(load_config(tmp_path / "paths.toml", GrpoConfig).reward)
    assert model is not None
    assert (model.path, model.dtype, model.max_tokens) == ("/models/judge", "bfloat16", 1024)

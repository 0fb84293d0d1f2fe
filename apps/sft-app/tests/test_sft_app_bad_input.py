"""Each mistake a user can make: one clear error, exit code 2, no traceback, nothing made."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import pytest

from offbeat_testing import CommandConformance, CommandLine


class TestBadInput(CommandConformance):
    mistakes: ClassVar = {
        "no such choice": (["--engine.schedule", "cosin"], "cosine"),
        "missing column": (["--data.messages_column", "chat"], "data.messages_column"),
        "every row too long": (["--data.max_sequence_tokens", "4"], "data.max_sequence_tokens"),
        "scale of adapters that are not there": (["--engine.lora_alpha", "8"], "engine.lora_alpha has no effect"),
        "option that no loss here reads": (
            ["--engine.options", "{entropy_gradient = true}"],
            "engine.options.entropy_gradient has no effect",
        ),
        "copies for a rank that dies": (
            ["--engine.num_ranks", "2", "--engine.options", "{peer_copies = true}"],
            "sft-app replaces no single rank",
        ),
        "no such engine option": (["--engine.options", "{sharing = true}"], "sharing"),
        "option of another command": (["--serve", "8000"], "takes no --serve"),
        "ranks that do not divide": (
            ["--engine.num_ranks", "3", "--engine.options", "{tensor_parallel = 2}"],
            "engine.num_ranks = 2 or a multiple of it",
        ),
        "no ranks": (["--engine.num_ranks", "0"], "engine.num_ranks"),
        "one device for two ranks": (["--engine.num_ranks", "2", "--engine.device", "cpu:0"], "engine.device = cpu:0"),
        "no such launcher": (
            ["--cluster.launcher", "slurm"],
            "'slurm' is not installed (installed adapters: local, ray, torchrun)",
        ),
        "several nodes without Ray": (
            ["--cluster.num_nodes", "2", "--cluster.accelerators_per_node", "8"],
            "launcher 'local' starts everything on 1",
        ),
        "no patience": (["--liveness.stall_after_s", "0"], "liveness.stall_after_s"),
        "profile backwards": (["--profile.steps", "6:3"], "FIRST:LAST"),
        "profile without numbers": (["--profile.steps", "some"], "FIRST:LAST"),
        "profile after the end": (["--profile.steps", "8:9"], "8 updates"),
    }


@pytest.mark.skipif(find_spec("megatron") is not None, reason="megatron-core is installed here")
def test_a_trainer_that_is_not_installed_is_told_with_its_install_line(command: CommandLine, config: Path) -> None:
    ended = command("plan", config, "--engine.backend=megatron", "--engine.num_ranks=4")
    assert ended.code == 2
    assert 'pip install "offbeat-engine-megatron[engine]"' in ended.err


FACTORS = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("max_position_embeddings", 16, "16 positions"),
        ("vocab_size", 100, "100 rows"),
        (
            "rope_parameters",
            {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, **FACTORS},
            "tokens and may have 16: with rope_type 'longrope'",
        ),
    ],
)
def test_sequences_the_model_cannot_take_are_refused(
    command: CommandLine, config: Path, model: Path, tmp_path: Path, key: str, value: object, said: str
) -> None:
    small = shutil.copytree(model, tmp_path / "small")
    settings = small / "config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), key: value}))
    ended = command("plan", config, "--model.path", small)
    assert ended.code == 2
    assert said in " ".join(ended.err.split())


def test_unusual_roles_and_rows_of_several_forms_are_said(command: CommandLine, config: Path, tmp_path: Path) -> None:
    rows = tmp_path / "mixed.jsonl"
    said = [{"role": "critic", "content": "go on"}, {"role": "assistant", "content": "yes"}]
    mixed = [{"messages": said}, {"prompt": "one", "completion": "two"}]
    rows.write_text("".join(json.dumps(row) + "\n" for row in mixed))
    ended = command("plan", config, "--data.path", rows, "--data.eval_size=0", "--eval.every_updates=0")
    assert ended.code == 0, ended.err
    text = " ".join(ended.out.split())
    assert "rows of several forms: 1 by column messages, 1 by column completion" in text
    assert "messages of unusual roles: 1 of 'critic'" in text


def test_a_batch_larger_than_the_data_is_noticed(command: CommandLine, config: Path) -> None:
    planned = command("plan", config, "--engine.batch_size=1000")
    assert planned.code == 0, planned.err
    text = " ".join(planned.out.split())
    assert "engine.batch_size = 1000: an epoch has 20 to train on, so that an update takes all of them" in text
    assert "an epoch has" not in command("plan", config).out


def test_a_conversation_without_an_assistant_is_named_by_its_row(
    command: CommandLine, config: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "asked.jsonl"
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}]}) + "\n")
    ended = command("plan", config, "--data.path", rows, "--data.eval_size=0", "--eval.every_updates=0")
    assert ended.code == 2
    assert "row 1" in ended.err
    assert "assistant" in ended.err


def test_values_that_do_not_fit_hide_no_missing_file_and_mistakes_are_said_at_once(
    command: CommandLine, config: Path
) -> None:
    missing = ["--model.path=nowhere", "--data.path=none.jsonl"]
    said = command.refused("train", config, *missing, "--engine.batch_size=0", "--preference.beta=0.1")
    for part in ("engine.batch_size: must be", "model.path: no such folder", "none.jsonl does not exist", "beta"):
        assert part in said
    said = command.refused(
        "train", config, *missing, "--data.epochs=0", "--engine.max_updates=0", "--eval.every_updates=1"
    )
    for part in ("model.path: no such folder", "none.jsonl does not exist", "would never end"):
        assert part in said

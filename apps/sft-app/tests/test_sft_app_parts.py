"""The configuration, the order of the data, the loss mask, and the plan."""

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from offbeat_core import check_limits, dump_config, load_config, parse_config
from offbeat_data import EpochOrder, load_tokenizer
from offbeat_placement import ClusterView, grid_nodes
from offbeat_run import RunFolder
from offbeat_testing import CommandLine, large_model_configs
from sft_app._config import EVERYDAY, SftConfig
from sft_app._preflight import Progress, batch_positions, check_run, settle_format


def test_the_configuration_keeps_to_its_limits() -> None:
    check_limits(SftConfig)


def test_a_dumped_configuration_loads_back(config: Path) -> None:
    words = ["--profile.steps=3:6", "--engine.lora_rank=4", "--data.template_options={enable_thinking = false}"]
    first = load_config(config, SftConfig, words)
    assert parse_config(dump_config(first), SftConfig) == first


@given(st.integers(1, 30), st.integers(1, 12), st.integers(1, 4))
def test_every_epoch_serves_every_sequence_once(num_sequences: int, batch_size: int, epochs: int) -> None:
    order = EpochOrder(num_sequences, seed=1)
    num_positions = order.num_positions(epochs)
    num_updates = -(-num_positions // batch_size)
    batches = [batch_positions(update, batch_size, num_positions) for update in range(num_updates)]
    assert all(len(batch) == batch_size for batch in batches[:-1])
    assert len(batches[-1]) >= 1
    served = Counter(order(position) for batch in batches for position in batch)
    assert served == Counter({(epoch, item): 1 for epoch in range(epochs) for item in range(num_sequences)})


@given(st.integers(1, 30), st.integers(1, 12), st.integers(1, 3), st.integers(1, 3))
def test_a_finished_run_goes_on_where_its_data_ended(
    num_sequences: int, batch_size: int, epochs: int, more_epochs: int
) -> None:
    """Its last batch may have been smaller than the others."""
    end, later_end = epochs * num_sequences, (epochs + more_epochs) * num_sequences
    done = -(-end // batch_size)
    num_updates = done - (-(later_end - end) // batch_size)
    begun = Progress(updates=done, position=end)
    batches = [batch_positions(update, batch_size, later_end, begun) for update in range(done, num_updates)]
    assert [position for batch in batches for position in batch] == list(range(end, later_end))


@pytest.mark.parametrize(
    ("words", "reserves", "dtype"),
    [
        ([], True, "bfloat16"),
        (["--engine.device=cpu"], True, "float32"),
        (["--engine.device=cuda"], False, "bfloat16"),
        (["--engine.device=cuda", "--engine.dtype=float32"], False, "float32"),
    ],
)
def test_the_device_decides_the_number_format(config: Path, words: list[str], reserves: bool, dtype: str) -> None:
    view = ClusterView(nodes=tuple(grid_nodes(1, 8)) if reserves else (), reserves=reserves)
    plain = load_config(config, SftConfig, ["--engine.device=auto", "--engine.dtype=auto", *words])
    assert settle_format(plain, view).engine.dtype == dtype


def test_a_run_keeps_what_was_left_open(config: Path) -> None:
    checked = check_run(load_config(config, SftConfig, ["--engine.dtype=auto"]))
    assert (checked.written.engine.dtype, checked.config.engine.dtype) == ("auto", "float32")


OPEN = "--engine.max_tokens_per_microbatch=0"


def test_a_resumed_run_keeps_the_micro_batches_it_was_begun_with(config: Path, tmp_path: Path) -> None:
    begun = check_run(load_config(config, SftConfig, [OPEN]))
    said = "engine.max_tokens_per_microbatch = 8192, activation_checkpointing = false (trains on CPUs)"
    assert ("chosen", said) in begun.plan()
    with RunFolder.create(tmp_path / "run", required_bytes=0) as run:
        run.write_config(begun.written)
        again = check_run(load_config(run.config, SftConfig))
        anew = check_run(load_config(run.config, SftConfig, [OPEN]))
    for engine in (begun.config.engine, again.written.engine, again.config.engine):
        assert (engine.max_tokens_per_microbatch, engine.activation_checkpointing) == (8192, False)
    assert again.choices == ()
    assert anew.choices == ("engine.max_tokens_per_microbatch = 8192 (trains on CPUs)",)


@pytest.mark.parametrize(
    ("memory", "words", "said"),
    [
        ("accelerator_memory_gib = 80", [], "32768, activation_checkpointing = true (trainer 46.6 of 68 GiB)"),
        ("accelerator_memory_gib = 141", [], "8192, activation_checkpointing = false (trainer 85.6 of 120 GiB)"),
        ("", [], "8192, activation_checkpointing = true (the memory of the devices is not known: recomputing makes"),
        (
            "accelerator_memory_gib = 80",
            ["--model.path=gone"],
            "8192, activation_checkpointing = true (the memory of the model",
        ),
    ],
)
def test_a_plan_for_a_cluster_says_what_its_devices_have_room_for(
    command: CommandLine, config: Path, tmp_path: Path, memory: str, words: list[str], said: str
) -> None:
    model, nodes = large_model_configs(tmp_path / "large") / "Qwen3-8B", tmp_path / "nodes.toml"
    nodes.write_text(f'[[nodes]]\nname = "one"\naccelerators = 8\n{memory}\n')
    on_devices = ["--engine.device=auto", "--engine.dtype=auto", "--engine.num_ranks=8", OPEN]
    ended = command("plan", config, "--cluster", nodes, f"--model.path={model}", *on_devices, *words)
    assert ended.code == 0, ended.err
    assert f"chosen engine.max_tokens_per_microbatch = {said}" in " ".join(ended.out.split())


def test_a_plan_estimates_a_model_whose_layers_have_the_gated_delta_rule(
    command: CommandLine, config: Path, model: Path, tmp_path: Path
) -> None:
    """Plan a tiny one here, and one of 9B parameters on a cluster, for whose devices the budget is chosen."""
    sizes = {"key_head_dim": 8, "value_head_dim": 8, "num_key_heads": 2, "num_value_heads": 4}
    tiny = Qwen3_5TextConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        **{f"linear_{name}": size for name, size in sizes.items()},
    )
    shutil.copytree(model, folder := tmp_path / "tiny")
    AutoModelForCausalLM.from_config(tiny).save_pretrained(folder)
    here = command("plan", config, f"--model.path={folder}")
    assert here.code == 0, here.err
    assert re.search(r"model qwen3_5_text, .* a rank: weights .* activations ", " ".join(here.out.split()))
    Qwen3_5TextConfig().save_pretrained(large := tmp_path / "large")
    nodes = tmp_path / "nodes.toml"
    nodes.write_text('[[nodes]]\nname = "one"\naccelerators = 8\naccelerator_memory_gib = 80\n')
    on_devices = ["--engine.device=auto", "--engine.dtype=auto", "--engine.num_ranks=8", OPEN]
    there = command("plan", config, "--cluster", nodes, f"--model.path={large}", *on_devices)
    assert there.code == 0, there.err
    assert "32768, activation_checkpointing = true (trainer 65.7 of 68 GiB)" in " ".join(there.out.split())


def test_only_what_the_assistant_says_is_learned(config: Path, model: Path) -> None:
    preflight = check_run(load_config(config, SftConfig, ["--data.shuffle=false", "--engine.batch_size=20"]))
    tokenizer = load_tokenizer(model)
    spoken = set()
    for index in preflight.batch(0):
        [sequence] = preflight.examples.train[index].sequences
        words = tokenizer.decode(sequence.ids[sequence.loss_mask], skip_special_tokens=False)
        not_learned = tokenizer.decode(sequence.ids[~sequence.loss_mask])
        number = int(words.partition("<|im_end|>")[0].removeprefix("the answer is ")) - 1
        assert words == f"the answer is {number + 1}<|im_end|>{number + 2}<|im_end|>"
        assert f"what is {number} and one?" in not_learned
        assert "the answer" not in not_learned
        spoken.add(number)
    assert len(spoken) == 20


def test_the_plan_starts_nothing(
    command: CommandLine, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = command("plan", config)
    assert ended.code == 0, ended.err
    assert "8 updates of 8 sequences" in ended.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chats.jsonl", "sft.toml"]


def test_the_help_of_train_lists_the_everyday_settings_with_their_defaults() -> None:
    said = subprocess.run(
        [sys.executable, "-m", "sft_app", "train", "--help"], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert said.count("\n  --") == len(EVERYDAY) + 5
    assert "Sequences in one optimizer step (in rows; default: 32)" in said


def test_explain_names_the_key(command: CommandLine) -> None:
    ended = command("--explain", "profile.steps")
    assert ended.code == 0
    assert "3:6" in ended.out


def test_a_plan_shows_a_sequence_as_the_model_gets_it_and_where_its_template_is_from(
    command: CommandLine, config: Path, tmp_path: Path
) -> None:
    planned = command("plan", config, "--json")
    assert planned.code == 0, planned.err
    rows = {row["what"]: row["text"] for row in json.loads(planned.out)["rows"]}
    chat = r"<|im_start|>user\nwhat is 0 and one?<|im_end|>\n<|im_start|>assistant\nthe answer is 1<|im_end|>\n"
    assert rows["a sequence"].startswith(f"rendered with the chat template of chat_template.jinja: {chat}")
    assert rows["validation"] == "4 sequences, before training, every 3 updates and at the end"
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"{number} and one"}) + "\n" for number in range(24)))
    planned = command("plan", config, "--json", "--data.path", texts)
    assert planned.code == 0, planned.err
    [said] = [row["text"] for row in json.loads(planned.out)["rows"] if row["what"] == "a sequence"]
    assert said.startswith("as it is, without a chat template: 0 and one")

"""The token budget and activation checkpointing follow from the memory of the trainer's devices and the roles there."""

from pathlib import Path

import pytest
from transformers import Qwen3_5TextConfig

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._preflight.preflight import check_run
from offbeat_core import load_config
from offbeat_placement import BudgetSettings
from offbeat_run import RunFolder
from offbeat_testing import CommandLine, large_model_configs

IN_TURN = (
    "--cluster.colocate=true",
    "--async.staleness_threshold=0",
    "--async.partial_rollout=false",
)
ON_ACCELERATORS = ("--engine.device=auto", "--rollout.device=auto", "--engine.dtype=auto", "--rollout.dtype=auto")
LARGE_STEPS = ("--async.mini_batch_size=64", "--rollout.max_tokens=2048", "--rollout.max_model_len=3072")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return large_model_configs(tmp_path_factory.mktemp("large"))


def planned(command: CommandLine, config: Path, model: Path, node: str, *words: str) -> tuple[str, str]:
    """Return what is chosen, on one line, and the whole plan.

    Args:
        command: the command line.
        config: of a small run.
        model: folder of a large one.
        node: its settings, such as "accelerators = 8".
        words: more overrides.
    """
    nodes = config.with_name("nodes.toml")
    nodes.write_text(f'[[nodes]]\nname = "one"\n{node}\n')
    ended = command("plan", config, f"--model.path={model}", "--cluster", nodes, *ON_ACCELERATORS, *LARGE_STEPS, *words)
    assert ended.code == 0, ended.err
    text = " ".join(ended.out.split())
    start = text.find("engine.max_tokens_per_microbatch = ")
    return text[start : text.find(")", start) + 1] if start >= 0 else "", text


def test_the_plan_says_what_the_devices_have_room_for(command: CommandLine, config: Path, models: Path) -> None:
    words = ("--engine.num_ranks=8", "--rollout.num_engines=8")
    eight = "accelerators = 16\naccelerator_memory_gib = 80"
    said, text = planned(command, config, models / "Qwen3-8B", eight, *words)
    assert said == (
        "engine.max_tokens_per_microbatch = 32768, activation_checkpointing = true (trainer 46.6 of 68 GiB)"
    )
    assert "trainer memory 46.6 GiB a rank" in text, "the plan estimates what was chosen"
    assert "micro-batches of up to 32768 tokens a rank" in text
    unknown, _ = planned(command, config, models / "Qwen3-8B", "accelerators = 16", *words)
    assert unknown.startswith(
        "engine.max_tokens_per_microbatch = 8192, activation_checkpointing = true (the memory of the devices is not "
    )


def test_an_engine_keeps_states_of_layers_with_the_gated_delta_rule(
    command: CommandLine, config: Path, tmp_path: Path
) -> None:
    """3072 tokens of 8 layers with attention take 96 MiB, two states in float32 of the 24 others 98.25 MiB."""
    Qwen3_5TextConfig().save_pretrained(large := tmp_path / "large")
    options = "{mamba_ssm_cache_dtype = 'float32'}"
    words = (
        "--engine.num_ranks=8",
        "--rollout.num_engines=8",
        "--rollout.backend=vllm",
        f"--rollout.options={options}",
    )
    _, text = planned(command, config, large, "accelerators = 16", *words)
    assert "KV cache and states of one sample 194 MiB" in text


def test_roles_that_take_turns_are_counted_together_and_else_the_trainer_alone(
    command: CommandLine, config: Path, models: Path
) -> None:
    """vLLM takes 85 % of a device beside which it takes turns; the embedded engine a quarter, or what is set."""
    words = (*IN_TURN, "--engine.num_ranks=8", "--rollout.num_engines=8")
    node = "accelerators = 8\naccelerator_memory_gib = 141"
    beside, text = planned(
        command, config, models / "Qwen3-8B", node, *words, "--rollout.options={kv_cache_tokens = 4096}"
    )
    assert beside.endswith("activation_checkpointing = false (trainer + rollout 102 of 120 GiB)")
    assert "cluster.sleep_level = 0" in text
    alone, text = planned(command, config, models / "Qwen3-8B", node, *words, "--rollout.backend=vllm")
    assert alone.endswith("activation_checkpointing = false (trainer 85.6 of 120 GiB)")
    assert "cluster.sleep_level = 2" in text
    awake, _ = planned(
        command, config, models / "Qwen3-8B", node, *words, "--rollout.backend=vllm", "--cluster.sleep_level=0"
    )
    assert awake.endswith("GiB, more than 85% of 141 GiB)")
    assert "8192, activation_checkpointing = true (trainer + rollout" in awake


def test_on_cpus_micro_batches_are_as_they_were_and_a_resumed_run_keeps_those_it_was_begun_with(
    config: Path, tmp_path: Path
) -> None:
    def budget(engine: BudgetSettings) -> tuple[int, bool | str]:
        return engine.max_tokens_per_microbatch, engine.activation_checkpointing

    begun = check_run(load_config(config, GrpoConfig, ()))
    said = "engine.max_tokens_per_microbatch = 8192, activation_checkpointing = false (trains on CPUs)"
    assert said in begun.choices
    assert budget(begun.config.engine) == (8192, False)
    with RunFolder.create(tmp_path / "run", required_bytes=0) as run:
        run.write_config(begun.written)
        again = check_run(load_config(run.config, GrpoConfig, ()))
        anew = load_config(run.config, GrpoConfig, ("--engine.max_tokens_per_microbatch=0",))
        recomputing = check_run(load_config(run.config, GrpoConfig, ("--engine.activation_checkpointing=true",)))
    assert budget(again.written.engine) == budget(again.config.engine) == (8192, False)
    assert not [choice for choice in again.choices if "microbatch" in choice]
    assert budget(recomputing.config.engine) == (8192, True)
    assert "engine.max_tokens_per_microbatch = 8192 (trains on CPUs)" in check_run(anew).choices


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--engine.max_tokens_per_microbatch=15", "set it to 16 or more, or to 0 for what memory has room for"),
        ("--engine.max_tokens_per_microbatch=-1", "must be an integer >= 0, in tokens"),
        ("--engine.activation_checkpointing=maybe", 'must be true or false or "auto"'),
        ("--engine.activation_checkpointing=on", "write true"),
    ],
)
def test_what_no_engine_takes_is_refused(command: CommandLine, config: Path, word: str, said: str) -> None:
    assert said in command.refused("plan", config, word)

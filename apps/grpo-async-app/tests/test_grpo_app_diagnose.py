"""`diagnose` names what makes log-probabilities differ, and names nothing where all is well."""

import json
from pathlib import Path
from typing import Any

import pytest
from grpo_runs import Main, run_to_its_end
from planted_mismatches import FAULTS

from offbeat_testing import RunningCommand, small_grpo_run, tiny_model
from offbeat_testing import forked_main as forked_main_of

SETTINGS = (
    "--rollout.temperature=0.8",
    "--engine.learning_rate=0.02",
    "--engine.weight_decay=5",
    "--eval.every_updates=0",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of some updates whose weights have moved far."""
    folder = tmp_path_factory.mktemp("diagnose")
    model = tiny_model(folder / "model", "qwen3", spread=0.2)
    main = forked_main_of("grpo_async_app", "offbeat_engine_torch", "offbeat_rollout_torch")
    run_to_its_end(main, "train", small_grpo_run(folder, model), "--out", folder / "run", *SETTINGS)
    return folder / "run"


def diagnose(main: Main, *words: object) -> dict[str, Any]:
    with RunningCommand(main, "diagnose", *words) as process:
        code = process.wait(100)
        assert code in (0, 1), process.output
        found: dict[str, Any] = json.loads((Path(str(words[0])) / "diagnosis" / "diagnosis.json").read_text())
        assert code == bool(found["findings"])
        return found


def test_a_healthy_run_has_no_cause(forked_main: Main, run: Path) -> None:
    found = diagnose(forked_main, run)
    assert found["findings"] == []
    assert found["notes"] == []
    assert found["mismatch_nats"] < 1e-5


HEALTHY: dict[str, tuple[Any, tuple[str, ...]]] = {
    "bfloat16": ("qwen3", ("--engine.dtype=bfloat16", "--rollout.dtype=bfloat16")),
    "engine in bfloat16": ("qwen2", ("--rollout.dtype=bfloat16",)),
    "two ranks": ("llama", ("--engine.num_ranks=2",)),
    "tensor parallel": ("qwen3", ("--engine.num_ranks=2", "--engine.options={tensor_parallel=2}")),
    "merged adapter": ("qwen3", ("--engine.lora_rank=4", "--rollout.lora_sync=merged")),
    "adapter": ("qwen3", ("--engine.lora_rank=4", "--rollout.lora_sync=adapter")),
    "experts": ("qwen3_moe", ()),
    "experts in bfloat16": ("qwen3_moe", ("--engine.dtype=bfloat16", "--rollout.dtype=bfloat16")),
    "hybrid": ("qwen3_5_text", ()),
    "cut distribution": ("qwen3", ("--rollout.top_p=0.9", "--rollout.top_k=40")),
    "fp8": ("qwen3", ("--rollout.weight_format=fp8", "--rollout.dtype=bfloat16", "--engine.dtype=bfloat16")),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_setting_has_no_cause(forked_main: Main, tmp_path: Path, name: str) -> None:
    family, words = HEALTHY[name]
    model = tiny_model(tmp_path / "model", family, spread=0.2)
    assert "no cause found" in run_to_its_end(forked_main, "diagnose", small_grpo_run(tmp_path, model), *words)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(forked_main: Main, run: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fault = FAULTS[name]
    fault.plant(monkeypatch)
    first = diagnose(forked_main, run)["findings"][0]
    assert (first["kind"], fault.where in first["where"]) == (fault.kind, True), first

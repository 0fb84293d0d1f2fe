"""`diagnose` names what makes log-probabilities differ, and names nothing where all is well."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import pytest
from draw_geometry import main as draw_geometry
from grpo_runs import Main, run_to_its_end
from planted_mismatches import FAULTS, mirror_images

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._diagnosis.settings import for_diagnosis
from grpo_async_app._preflight.preflight import check_run
from offbeat_core import load_config
from offbeat_testing import CommandLine, RunningCommand, small_grpo_run, tiny_model, tiny_vision_model
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
        assert code in (0, 5), process.output
        found: dict[str, Any] = json.loads((Path(str(words[0])) / "diagnosis" / "diagnosis.json").read_text())
        assert code == (5 if found["findings"] else 0)
        return found


LOOKS: Final = {
    "engine: gelu": "rollout-0 differs from the trainer on the same tokens alone, too",
    "engine: a weight": "rollout-0 holds other weights than the trainer: model.layers.1.self_attn.o_proj.weight",
    "engine: keys of tokens sampled": "rollout-0 computes what the trainer does of the same tokens alone",
}


@pytest.mark.parametrize("name", LOOKS)
def test_an_alarm_is_followed_by_a_first_look(
    forked_main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model = tiny_model(tmp_path / "model", "qwen3", spread=0.2)
    FAULTS[name].plant(monkeypatch)
    words = ("--async.staleness_threshold=0", "--async.partial_rollout=false", "--eval.every_updates=0")
    said = run_to_its_end(forked_main, "train", small_grpo_run(tmp_path, model), "--out", tmp_path / "run", *words)
    assert f"a first look at the mismatch: {LOOKS[name]}" in said


def test_a_report_shows_the_cause(forked_main: Main, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS["engine: gelu"].plant(monkeypatch)
    diagnose(forked_main, run)
    page = (run / "report.html").read_text()
    assert "the rollout engine differs first in layer 0: the activation of the MLP" in page
    assert page.count('class="error beyond"') > 3


SETTINGS_OF_RUNS: Final = {
    "early end": ("--eval.stop_at_accuracy=0.9",),
    "critic": ("--algorithm.advantage=gae", "--critic.warmup_updates=1"),
    "filtered groups": ("--algorithm.filter_groups=true", "--async.max_filtered_batches=3"),
    "sets": ("--eval.sets.other.path={data}",),
    "greedy baseline": ("--algorithm.advantage=remax",),
    "curriculum": ("--curriculum.low=0.2", "--engine.max_updates=3"),
    "KL": ("--algorithm.kl_coefficient=0.1",),
}


@pytest.mark.parametrize("name", SETTINGS_OF_RUNS)
def test_settings_of_a_run_are_no_hindrance(config: Path, name: str) -> None:
    """Settings that have no effect without training and validation are left out with it."""
    words = [word.format(data=config.with_name("sums.jsonl")) for word in SETTINGS_OF_RUNS[name]]
    given = load_config(config, GrpoConfig, words)
    check_run(given)
    assert check_run(for_diagnosis(given)).config.eval.every_updates == 0


def test_what_cannot_be_examined_is_refused(command: CommandLine, config: Path) -> None:
    assert "cluster.colocate" in command.refused("diagnose", config, "--cluster.colocate=true")
    assert "--at names a checkpoint of a run" in command.refused("diagnose", config, "--at=3")
    assert "--format takes text or json" in command.refused("diagnose", config, "--format=yaml")


@pytest.mark.nightly
@pytest.mark.parametrize("sync", ["adapter", "merged"])
def test_a_run_whose_adapter_has_learned_has_no_cause(forked_main: Main, tmp_path: Path, sync: str) -> None:
    """The engine holds the base, and the adapter beside it or in it."""
    model = tiny_model(tmp_path / "model", "qwen3", spread=0.2)
    config, reward = small_grpo_run(tmp_path, model), "--reward.name=grpo_async_app._shrink_reward:variety"
    words = (*SETTINGS, reward, "--engine.lora_rank=4", f"--rollout.lora_sync={sync}")
    run_to_its_end(forked_main, "train", config, "--out", tmp_path / "run", *words)
    found = diagnose(forked_main, tmp_path / "run")
    assert found["findings"] == []
    assert found["notes"] == []


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
    "adapter in bfloat16": ("llama", ("--engine.lora_rank=4", "--engine.dtype=bfloat16", "--rollout.dtype=bfloat16")),
    "prompts in chunks": ("qwen3", ("--rollout.backend=torch", "--rollout.options={max_prefill_tokens=16}")),
    "exact": ("qwen3", ("--engine.options={numerics='exact'}",)),
    "another temperature": ("qwen2", ("--rollout.temperature=1.3",)),
    "experts": ("qwen3_moe", ()),
    "experts in bfloat16": ("qwen3_moe", ("--engine.dtype=bfloat16", "--rollout.dtype=bfloat16")),
    "hybrid": ("qwen3_5_text", ()),
    "model that sees": ("qwen3_vl", ()),
    "hybrid that sees": ("qwen3_5", ()),
    "cut distribution": ("qwen3", ("--rollout.top_p=0.9", "--rollout.top_k=40")),
    "fp8": ("qwen3", ("--rollout.weight_format=fp8", "--rollout.dtype=bfloat16", "--engine.dtype=bfloat16")),
}


BY_DAY: Final = {
    "bfloat16",
    "adapter",
    "engine: prompts see ahead",
    "engine: a weight",
    "engine: keys of tokens sampled",
    "engine: old keys and values",
    "engine: positions scaled in one layer",
    "engine: cache in 8 bits",
    "engine: temperature",
    "trainer: last product of the MLP",
}
"""One or two of each kind; the others wait for the night."""


def by_day(names: Iterable[str]) -> list[Any]:
    """Parameters, those of the night marked."""
    return [pytest.param(name, marks=[] if name in BY_DAY else pytest.mark.nightly) for name in names]


@pytest.mark.parametrize("name", by_day(HEALTHY))
def test_a_healthy_setting_has_no_cause(forked_main: Main, tmp_path: Path, name: str) -> None:
    family, words = HEALTHY[name]
    make = tiny_vision_model if family in ("qwen3_vl", "qwen3_5") else tiny_model
    model = make(tmp_path / "model", family, spread=0.2)
    config, out = small_grpo_run(tmp_path, model), tmp_path / "out"
    assert "no cause found" in run_to_its_end(forked_main, "diagnose", config, "--out", out, *words)
    assert json.loads((out / "diagnosis.json").read_text())["findings"] == []


@pytest.mark.parametrize("name", by_day(FAULTS))
def test_a_fault_is_named(forked_main: Main, run: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fault = FAULTS[name]
    fault.plant(monkeypatch)
    first = diagnose(forked_main, run)["findings"][0]
    assert (first["kind"], fault.where in first["where"], fault.says in first["text"]) == (fault.kind, True, True), (
        first
    )


@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["", "mirrored"])
def test_prompts_with_images_are_examined(
    forked_main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """All prompts of the run have images: text is what is left of them without."""
    draw_geometry([str(tmp_path / "figures"), "--train", "8", "--test", "2", "--size-px", "64"])
    model = tiny_vision_model(tmp_path / "model", "qwen3_vl", spread=0.2)
    config, out = small_grpo_run(tmp_path, model), tmp_path / "out"
    if fault:
        mirror_images(monkeypatch)
    words = (f"--data.path={tmp_path / 'figures'}", "--data.prompt_column=problem", "--data.max_prompt_tokens=128")
    words += ("--rollout.max_model_len=200", "--rollout.dtype=float32", f"--out={out}")
    with RunningCommand(forked_main, "diagnose", config, *words) as process:
        code = process.wait(100)
        assert code == (5 if fault else 0), process.output
    found = json.loads((out / "diagnosis.json").read_text())["findings"]
    assert [each["where"] for each in found] == (["rollout engine: images"] if fault else [])
    assert all(each["text"].endswith(fault) for each in found)

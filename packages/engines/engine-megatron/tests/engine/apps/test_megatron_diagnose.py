"""`grpo-async-app diagnose` names what a trainer of megatron-core computes otherwise than transformers."""

import json
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import offbeat_training
from offbeat_engine_megatron import MegatronTrainEngine
from offbeat_testing import RunningCommand, small_grpo_run, tiny_model

Main = Callable[[], object]
Plant = Callable[[pytest.MonkeyPatch], None]
MEGATRON = ("--engine.backend=megatron", "--samples", "12")
TP = (*MEGATRON, "--engine.num_ranks=2", "--engine.options={tensor_parallel = 2}")
PP = (*MEGATRON, "--engine.num_ranks=2", "--engine.options={pipeline_parallel = 2}")


@pytest.fixture(scope="module")
def run(grpo_main: Main, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the torch engine whose weights have moved far."""
    folder = tmp_path_factory.mktemp("diagnose")
    config = small_grpo_run(folder, tiny_model(folder / "model", "qwen3", spread=0.2))
    settings = ("--rollout.temperature=0.8", "--engine.learning_rate=0.02", "--engine.weight_decay=5")
    words = ("--out", folder / "run", *settings, "--eval.every_updates=0", "--engine.max_updates=2")
    with RunningCommand(grpo_main, "train", config, *words) as process:
        assert process.wait(100) == 0, process.output
    return folder / "run"


def diagnose(main: Main, run: Path, *words: str) -> Any:
    with RunningCommand(main, "diagnose", run, *words) as process:
        assert process.wait(100) in (0, 5), process.output
    return json.loads((run / "diagnosis" / "diagnosis.json").read_text())


@pytest.mark.parametrize("words", [MEGATRON, TP, PP], ids=["one rank", "tp 2", "pp 2"])
def test_a_healthy_trainer_has_no_cause(grpo_main: Main, run: Path, words: tuple[str, ...]) -> None:
    found = diagnose(grpo_main, run, *words)
    assert (found["findings"], found["notes"]) == ([], [])
    assert found["mismatch_nats"] < 1e-4


def built(change: Callable[[Any], None]) -> Plant:
    """Change each part of the model when the engine is built."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        own = MegatronTrainEngine._build

        def build(self: MegatronTrainEngine, *args: Any) -> None:
            own(self, *args)
            for part in self._policy.parts:
                change(part)

        patch.setattr(MegatronTrainEngine, "_build", build)

    return plant


def in_layer(number: int, change: Callable[[Any], None]) -> Plant:
    """Change one layer, on the ranks that have it."""

    def change_part(part: Any) -> None:
        for layer in part.decoder.layers:
            if layer.layer_number == number + 1:
                change(layer)

    return built(change_part)


def scaled(module: Any, factor: float) -> None:
    """Scale what a module gives; megatron-core's give a bias or nothing behind it."""

    def scale(_: Any, __: Any, output: Any) -> Any:
        return (output[0] * factor, *output[1:]) if isinstance(output, tuple) else output * factor

    module.register_forward_hook(scale)


def steep(layer: Any) -> None:
    layer.self_attention.core_attention.scale *= 1.5


def coarse(layer: Any) -> None:
    layer.pre_mlp_layernorm.eps = 0.3


def gelu(layer: Any) -> None:
    layer.mlp.config = copy(layer.mlp.config)
    layer.mlp.config.activation_func = torch.nn.functional.gelu


def heavier_weight(patch: pytest.MonkeyPatch) -> None:
    """A weight is another one after the checkpoint was read."""
    own = MegatronTrainEngine.load

    def load(self: MegatronTrainEngine, folder: Path) -> None:
        own(self, folder)
        self._policy.parts[0].decoder.layers[1].input_layernorm.weight.data.mul_(1.3)

    patch.setattr(MegatronTrainEngine, "load", load)


def other_base(part: Any) -> None:
    part.rotary_pos_emb.inv_freq = part.rotary_pos_emb.inv_freq**1.3


def cold(part: Any) -> None:
    if part.post_process:
        part.output_layer.settings = replace(part.output_layer.settings, temperature=1.0)


def grown_embedding(part: Any) -> None:
    if part.pre_process:
        scaled(part.embedding, 1.2)


def grown_norm(part: Any) -> None:
    if part.post_process:
        scaled(part.decoder.final_layernorm, 1.2)


def other_tokens(patch: pytest.MonkeyPatch) -> None:
    own = offbeat_training.lay_out

    def lay_out(*args: Any, **named: Any) -> Any:
        pack = own(*args, **named)
        ids = pack.ids_T.copy()
        ids[0] = 3
        return replace(pack, ids_T=ids)

    patch.setattr(offbeat_training, "lay_out", lay_out)


FAULTS: dict[str, tuple[Plant, str, str, tuple[str, ...]]] = {
    "rotary base": (built(other_base), "layers", "trainer: layer 0: query", MEGATRON),
    "scale of attention": (in_layer(0, steep), "layers", "trainer: layer 0: attention", TP),
    "epsilon of a norm": (in_layer(1, coarse), "layers", "trainer: layer 1: mlp input", PP),
    "activation": (in_layer(0, gelu), "layers", "trainer: layer 0: activation", TP),
    "heads": (
        in_layer(1, lambda layer: scaled(layer.self_attention.linear_qkv, 1.3)),
        *("layers", "trainer: layer 1: query projection", TP),
    ),
    "output of attention": (
        in_layer(1, lambda layer: scaled(layer.self_attention.linear_proj, 1.5)),
        *("layers", "trainer: layer 1: after attention", PP),
    ),
    "last product of the MLP": (
        in_layer(0, lambda layer: scaled(layer.mlp.linear_fc2, 1.3)),
        *("layers", "trainer: layer 0: output", MEGATRON),
    ),
    "embedding": (built(grown_embedding), "layers", "trainer: embedding", MEGATRON),
    "last norm": (built(grown_norm), "layers", "trainer: final norm", PP),
    "a weight": (heavier_weight, "weights", "layers.1.input_layernorm.weight", MEGATRON),
    "temperature": (built(cold), "inputs", "trainer: temperature = 1", MEGATRON),
    "tokens": (other_tokens, "inputs", "trainer: tokens", MEGATRON),
}
IN_CI = ("rotary base", "activation", "epsilon of a norm", "a weight")


@pytest.mark.parametrize(
    "name", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.nightly) for name in FAULTS]
)
def test_a_fault_of_the_trainer_is_named(
    grpo_main: Main, run: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    plant, kind, where, words = FAULTS[name]
    plant(monkeypatch)
    first = diagnose(grpo_main, run, *words)["findings"][0]
    assert (first["kind"], where in first["where"]) == (kind, True), first

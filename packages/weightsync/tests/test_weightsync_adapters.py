"""A LoRA adapter travels alone, and is merged from the base weights."""

import pytest
import torch
from torch import Tensor

from offbeat_types import WeightSyncError
from offbeat_weightsync import InProcessStream, merge_adapter, select_adapter

PREFIX = "base_model.model.model.layers.0.self_attn"


def trainer_tensors() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (9, 8),
        "model.layers.0.self_attn.q_proj.weight": (8, 8),
        f"{PREFIX}.q_proj.lora_A.weight": (2, 8),
        f"{PREFIX}.q_proj.lora_B.weight": (8, 2),
        f"{PREFIX}.k_proj.lora_A.weight": (2, 8),
        f"{PREFIX}.k_proj.lora_B.weight": (4, 2),
        "model.layers.0.self_attn.k_proj.weight": (4, 8),
    }
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def test_the_adapter_alone_travels_and_is_proved() -> None:
    adapter = select_adapter(trainer_tensors().items())
    assert len(adapter) == 4
    stream = InProcessStream(adapter, 1)
    held = {name: tensor.clone() for name, tensor in stream}
    assert stream.prove(held.__getitem__).num_tensors == 4
    assert stream.plan.num_bytes == 4 * (16 + 16 + 16 + 8)


def test_merged_weights_are_base_plus_scaled_product() -> None:
    tensors = trainer_tensors()
    merged = dict(merge_adapter(tensors.__getitem__, select_adapter(tensors.items()), scale=0.5))
    assert list(merged) == [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qk"]
    for name, weight in merged.items():
        start = f"base_model.model.{name.removesuffix('.weight')}"
        down, up = tensors[f"{start}.lora_A.weight"].double(), tensors[f"{start}.lora_B.weight"].double()
        assert torch.allclose(weight.double(), tensors[name].double() + 0.5 * up @ down, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "the trainer has none"),
        ({"a.lora_A.weight": (2, 8)}, "a.lora_A.weight needs a.lora_B.weight"),
        ({"a.lora_A.weight": (2, 8), "a.lora_B.weight": (8, 3)}, "rank 2 of lora_A is not rank 3 of lora_B"),
    ],
)
def test_an_adapter_that_is_not_whole_is_refused(change: dict[str, tuple[int, ...]], words: str) -> None:
    with pytest.raises(WeightSyncError, match=words):
        select_adapter((name, torch.ones(shape)) for name, shape in change.items())

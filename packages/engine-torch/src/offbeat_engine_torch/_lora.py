"""Low-rank adapters: W + (alpha / rank) B A on every linear layer of the blocks, with W frozen.

Source: LoRA (arXiv:2106.09685); the file format is that of Hugging Face PEFT.
"""

import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import skip_init

from offbeat_types import ModelError

log = logging.getLogger(__name__)

ADAPTER_FOLDER = "adapter"
WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
PEFT_PREFIX = "base_model.model."


class LoraLinear(nn.Module):
    """A frozen linear layer plus a trained low-rank update; the update starts at zero.

    Args:
        base: the layer; its parameters stop requiring gradients.
        rank: of the update.
        alpha: the update is scaled by alpha / rank.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.lora_base = base.requires_grad_(requires_grad=False)
        self.rank, self.scale = rank, alpha / rank
        self.active = True
        like = {"bias": False, "dtype": base.weight.dtype, "device": base.weight.device}
        empty: Any = skip_init  # `initial_adapters` gives the values
        self.lora_A: nn.Linear = empty(nn.Linear, base.in_features, rank, **like)
        self.lora_B: nn.Linear = empty(nn.Linear, rank, base.out_features, **like)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        out: Tensor = self.lora_base(x)
        if not self.active:
            return out
        low: Tensor = self.lora_B(self.lora_A(x))
        return out + low * self.scale


def add_lora(backbone: nn.Module, *, rank: int, alpha: float) -> None:
    """Freeze the backbone and put adapters on all its linear layers (the vocabulary head is not part of it).

    Their values are those of `initial_adapters`, once someone has put them there. Fused experts, which are no linear
    layers, get none: a warning says so.
    """
    backbone.requires_grad_(requires_grad=False)
    places = [
        (parent, name, layer)
        for parent in backbone.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, nn.Linear)
    ]
    if not places:
        raise ModelError(f"LoRA needs linear layers: {type(backbone).__name__} has none; set lora_rank to 0")
    fused = [name for name, parameter in backbone.named_parameters() if parameter.ndim == 3]
    if fused:
        log.warning(
            "lora_rank = %d: %d weights of fused experts, first %s, get no adapters and are not trained; set lora_rank "
            "to 0 to train them",
            *(rank, len(fused), fused[0]),
        )
    for parent, name, layer in places:
        setattr(parent, name, LoraLinear(layer, rank, alpha))


def initial_adapters(model: nn.Module, seed: int) -> Iterator[tuple[str, Tensor]]:
    """(name, first values) of all adapters: A is drawn, B is 0, so that training starts at the base model."""
    generator = torch.Generator().manual_seed(seed)
    for name, layer in lora_layers(model).items():
        rank, dtype = layer.rank, layer.lora_A.weight.dtype
        first = torch.empty(rank, layer.lora_A.in_features, dtype=dtype)
        nn.init.kaiming_uniform_(first, a=math.sqrt(5), generator=generator)
        yield f"{name}.lora_A", first
        yield f"{name}.lora_B", torch.zeros(layer.lora_B.out_features, rank, dtype=dtype)


def lora_layers(model: nn.Module) -> dict[str, LoraLinear]:
    """Adapted layers by the Hugging Face name of the layer."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLinear)}


@contextmanager
def without_lora(model: nn.Module) -> Iterator[None]:
    """Run the base model."""
    layers = list(lora_layers(model).values())
    for layer in layers:
        layer.active = False
    try:
        yield
    finally:
        for layer in layers:
            layer.active = True


def save_adapter(model: nn.Module, tensors: Mapping[str, Tensor], folder: Path, *, base_model: str) -> None:
    """Write the adapters as PEFT reads them.

    Args:
        model: with adapters.
        tensors: all of `<layer>.lora_A` and `<layer>.lora_B`, whole.
        folder: made when missing.
        base_model: where the frozen weights came from.
    """
    layers = lora_layers(model)
    some = next(iter(layers.values()))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": some.rank,
        "lora_alpha": some.scale * some.rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    named = {peft_name(name): tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


def peft_name(name: str) -> str:
    """PEFT's name of an adapter."""
    return f"{PEFT_PREFIX}{name}.weight"

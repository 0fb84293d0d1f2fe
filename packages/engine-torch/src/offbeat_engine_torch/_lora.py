"""Low-rank adapters: W + (alpha / rank) B A on every linear layer of the blocks, with W frozen.

Source: LoRA (arXiv:2106.09685); the file format is that of Hugging Face PEFT.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from offbeat_types import ModelError

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
        generator: draws the first A.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float, generator: torch.Generator) -> None:
        super().__init__()
        self.lora_base = base.requires_grad_(requires_grad=False)
        self.scale = alpha / rank
        self.active = True
        first = torch.empty(rank, base.in_features, dtype=base.weight.dtype)
        nn.init.kaiming_uniform_(first, a=math.sqrt(5), generator=generator)
        self.lora_A = nn.Parameter(first.to(base.weight.device))
        self.lora_B = nn.Parameter(base.weight.new_zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        out: Tensor = self.lora_base(x)
        if not self.active:
            return out
        low = nn.functional.linear(x, self.lora_A)
        return out + nn.functional.linear(low, self.lora_B) * self.scale

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """[out, in]: what a plain linear layer would hold."""
        return torch.addmm(self.lora_base.weight, self.lora_B, self.lora_A, alpha=self.scale)


def add_lora(backbone: nn.Module, *, rank: int, alpha: float, seed: int) -> None:
    """Freeze the backbone and put adapters on all its linear layers (the vocabulary head is not part of it)."""
    backbone.requires_grad_(requires_grad=False)
    generator = torch.Generator().manual_seed(seed)
    places = [
        (parent, name, layer)
        for parent in backbone.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, nn.Linear)
    ]
    if not places:
        raise ModelError(f"LoRA needs linear layers: {type(backbone).__name__} has none; set lora_rank to 0")
    for parent, name, layer in places:
        setattr(parent, name, LoraLinear(layer, rank, alpha, generator))


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


def save_adapter(model: nn.Module, folder: Path, *, base_model: str) -> None:
    """Write the adapters as PEFT reads them, in `folder`."""
    layers = lora_layers(model)
    tensors = {
        f"{PEFT_PREFIX}{name}.lora_{side}.weight": getattr(layer, f"lora_{side}").detach().contiguous()
        for name, layer in layers.items()
        for side in "AB"
    }
    some = next(iter(layers.values()))
    rank = len(some.lora_A)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": some.scale * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


@torch.no_grad()
def load_adapter(model: nn.Module, folder: Path) -> None:
    """Read what `save_adapter` wrote.

    Raises:
        ModelError: the adapters of the file are not those of the model.
    """
    tensors = load_file(folder / WEIGHTS_FILE)
    wanted = {
        f"{PEFT_PREFIX}{name}.lora_{side}.weight": getattr(layer, f"lora_{side}")
        for name, layer in lora_layers(model).items()
        for side in "AB"
    }
    wrong = sorted(set(tensors) ^ set(wanted)) or [n for n in wanted if tensors[n].shape != wanted[n].shape]
    if wrong:
        raise ModelError(f"{folder}: adapters differ from the model's, first at {wrong[0]}; use the same lora_rank")
    for name, parameter in wanted.items():
        parameter.copy_(tensors[name])

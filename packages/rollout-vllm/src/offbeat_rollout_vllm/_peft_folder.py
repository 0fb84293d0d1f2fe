"""A LoRA adapter from a folder that Hugging Face PEFT has written, as a weight stream.

Source: https://github.com/huggingface/peft, peft/tuners/lora/config.py (LoraConfig) and docs/source/developer_guides/
checkpoint.md (adapter_config.json, adapter_model.safetensors).
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from offbeat_types import LoraAdapter, ModelError, WeightProof, WeightSyncError

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS: Final = "adapter_model.safetensors"
CONFIG: Final = "adapter_config.json"
REFUSED: Final = ("use_dora", "lora_bias", "modules_to_save", "alpha_pattern", "rank_pattern", "layer_replication")
"""What makes more of an adapter than one scale and two matrices a layer."""


class PeftFolder:
    """A weight stream of the adapter in a folder.

    Args:
        folder: with adapter_config.json and adapter_model.safetensors.
        name: what requests will call it.
        version: policy version.

    Raises:
        ModelError: a file is missing or corrupt, or it is no plain LoRA.
    """

    def __init__(self, folder: Path, name: str, version: int) -> None:
        config = _read_config(folder / CONFIG)
        self.adapter, self.version = LoraAdapter(name=name, scale=_scale(config, folder)), version
        self._tensors = _read_weights(folder / WEIGHTS)

    def __iter__(self) -> "Iterator[tuple[str, Tensor]]":
        """Yield (PEFT's name, matrix)."""
        yield from self._tensors.items()

    def prove(self, read: "Callable[[str], Tensor]") -> WeightProof:
        """Compare every tensor with what is held.

        Raises:
            WeightSyncError: one differs.
        """
        import torch

        digest = hashlib.blake2b(digest_size=8)
        for name, tensor in self._tensors.items():
            held = read(name)
            if not torch.equal(held, tensor.to(held.dtype)):
                raise WeightSyncError(f"the engine holds other numbers than the folder's in {name}")
            digest.update(name.encode() + held.contiguous().view(torch.uint8).numpy().tobytes())
        return WeightProof(version=self.version, num_tensors=len(self._tensors), checksums=(digest.hexdigest(),))


def _read_config(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return dict(found)
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{path} cannot be read ({error}); give the folder of an adapter saved by PEFT") from error


def _read_weights(path: Path) -> "dict[str, Tensor]":
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(str(path)))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read ({error}); adapters must be safetensors") from error


def _scale(config: dict[str, Any], folder: Path) -> float:
    if extra := [name for name in REFUSED if config.get(name)]:
        raise ModelError(f"the adapter in {folder} has {', '.join(extra)}, and only plain LoRA can be served; merge it")
    if config.get("bias", "none") != "none":
        raise ModelError(f"the adapter in {folder} trains biases, and only plain LoRA can be served; merge it")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise ModelError(f"the adapter in {folder} must name r and lora_alpha, got {rank!r} and {alpha!r}")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)

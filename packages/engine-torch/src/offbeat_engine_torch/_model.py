"""Loads a Hugging Face causal language model, and refuses what the engine could not train faithfully."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from offbeat_engine_torch._attention import ATTENTION_NAME, register_attention
from offbeat_engine_torch._lora import LoraLinear
from offbeat_engine_torch._packing import Segment
from offbeat_engine_torch._rows import AttentionPlan
from offbeat_types import ModelError

# transformers has no error of its own for a folder it cannot read
UNREADABLE = (ValueError, KeyError, OSError, RuntimeError, SafetensorError, TypeError, AttributeError, ImportError)
KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, kw_only=True)
class CausalModel:
    """A causal language model taken apart into what the engine calls.

    Args:
        whole: the transformers model.
        backbone: ids to hidden states, within `whole`.
        head: hidden states to logits, within `whole`.
        logit_scale: factor the model puts on its logits.
    """

    whole: Any
    backbone: nn.Module
    head: nn.Linear
    logit_scale: float

    def hidden(self, ids_T: Tensor, positions_T: Tensor, plan: AttentionPlan, kernel: str) -> Tensor:
        """[T, E] last hidden states of one pack."""
        out = self.backbone(
            input_ids=ids_T[None], position_ids=positions_T[None], use_cache=False, plan=plan, kernel=kernel
        )
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor) in the model's own order; a tied head once, adapters merged."""
        merged: dict[str, LoraLinear] = {}
        for name, module in self.whole.named_modules():
            if isinstance(module, LoraLinear):
                merged[f"{name}.lora_base.weight"] = module
        for name, parameter in self.whole.named_parameters():
            if name.rpartition(".")[2] in ("lora_A", "lora_B"):
                continue
            tensor = merged[name].merged_weight() if name in merged else parameter.detach()
            yield plain_name(name), tensor


def plain_name(name: str) -> str:
    """Hugging Face name of a parameter, whether or not its layer carries an adapter."""
    return name.replace(".lora_base.", ".")


def load_model(path: str, *, device: torch.device, trust_remote_code: bool = False) -> CausalModel:
    """Load a model folder in float32, with packed attention.

    Args:
        path: folder with config.json and safetensors.
        device: where the weights go.
        trust_remote_code: run code that comes with the folder.

    Raises:
        ModelError: the folder is missing, incomplete or corrupt, or the family is not supported.
    """
    folder = Path(path).expanduser()
    _check_folder(folder)
    register_attention()
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
        _check_config(config, folder)
        with _without_progress_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=torch.float32,
                attn_implementation=ATTENTION_NAME,
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
            )
    except UNREADABLE as error:
        raise ModelError(f"{folder}: transformers cannot load a causal language model from it: {error}") from error
    whole, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"{folder}: the weights lack {len(missing)} tensors, first {missing[0]}; fetch the folder anew"
        )
    return _take_apart(whole.to(device).eval(), folder)


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Keep transformers' bars out of the logs of a role process."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _check_folder(folder: Path) -> None:
    """Find what is missing or cut short before transformers does."""
    if not (folder / "config.json").is_file():
        what = "has no config.json" if folder.is_dir() else "is not a folder"
        raise ModelError(f"model_path must be a Hugging Face model folder: {folder} {what}")
    index = folder / "model.safetensors.index.json"
    try:
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else set()
    except (ValueError, KeyError) as error:
        raise ModelError(f"{index} is not a safetensors index: {error}; fetch the folder anew") from error
    files = sorted(folder / name for name in names) or sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} holds no *.safetensors; convert the weights with transformers' save_pretrained")
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} is missing or cut short ({error}); fetch the folder anew") from error


def _check_config(config: Any, folder: Path) -> None:
    """Refuse models whose sequences or logits the engine would get wrong."""
    others = set(getattr(config, "layer_types", None) or ()) - KNOWN_LAYER_TYPES
    if others:
        raise ModelError(f"{folder}: layers of type {', '.join(sorted(others))} would mix packed sequences")
    for cap in ("final_logit_softcapping", "attn_logit_softcapping"):
        if getattr(config, cap, None):
            raise ModelError(f"{folder}: {config.model_type} uses {cap}, which this engine does not compute")


def _take_apart(whole: Any, folder: Path) -> CausalModel:
    head, backbone = whole.get_output_embeddings(), getattr(whole, whole.base_model_prefix, None)
    if not isinstance(head, nn.Linear) or not isinstance(backbone, nn.Module):
        raise ModelError(f"{folder}: {type(whole).__name__} has no linear vocabulary head on a backbone")
    for module in whole.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # the policy that is trained must be the policy that was sampled
    divisor, factor = getattr(whole.config, "logits_scaling", None), getattr(whole.config, "logit_scale", None)
    scale = (1.0 / divisor if divisor else 1.0) * (factor or 1.0)
    model = CausalModel(whole=whole, backbone=backbone, head=head, logit_scale=scale)
    _check_isolation(model, folder)
    return model


@torch.no_grad()
def _check_isolation(model: CausalModel, folder: Path) -> None:
    """Run two sequences packed and alone: a family that lets packed sequences see each other must not be trained."""
    device = model.head.weight.device
    ids = torch.tensor([1, 2, 3, 2, 1], device=device) % model.head.out_features
    positions = torch.tensor([0, 1, 2, 2, 0], device=device)
    segments = (Segment(start=0, length=2), Segment(start=2, length=1, parent=0), Segment(start=3, length=1, parent=0))
    together = (*segments, Segment(start=4, length=1))
    packed = model.hidden(ids, positions, AttentionPlan(together, device), "rows")
    for real in ([0, 1, 2], [0, 1, 3], [4]):
        index = torch.tensor(real, device=device)
        plan = AttentionPlan((Segment(start=0, length=len(real)),), device)
        alone = model.hidden(ids[index], positions[index], plan, "rows")
        if not torch.allclose(packed[index], alone, rtol=1e-2, atol=1e-2 * float(alone.abs().max())):
            name = type(model.whole).__name__
            raise ModelError(f"{folder}: {name} gives other results for packed sequences: family not supported")

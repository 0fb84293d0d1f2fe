"""Modules that compute a model on a device: chosen by what is asked for, what is installed and what fits; and why.

Layers are megatron-core's local ones, or those with TransformerEngine's linear layers and attention. Experts run one
after the other; or in grouped products, of torch in local layers and of TransformerEngine in its own. megatron-core's
third form (GroupedMLP) wants the package grouped_gemm, and computes what torch does without it in bfloat16 alone.
Needs neither megatron-core nor another rank.
"""

from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any, Final

import torch

from offbeat_core import ConfigError
from offbeat_device import Device
from offbeat_engine_megatron._shape import ModelShape
from offbeat_training import fits_varlen

LOCAL: Final = "local"
TE: Final = "te"

MASKED: Final = "masked"
"""Attention by the device's own kernel, under the mask that the device makes with each micro-batch."""

SEQUENTIAL: Final = "sequential"
GROUPED: Final = "grouped"
GROUPED_TE: Final = "grouped-te"

OLDEST_TE: Final = (2, 9)
"""Release that megatron-core 0.16 itself is developed with: its extra `dev` asks for 2.9 to 2.11."""

ALIGNMENT_BYTES: Final = 16
"""Rows in a grouped product are multiples of this. Source: torch 2.13, aten/src/ATen/native/GroupedMMUtils.h."""

_IN_WORDS: Final = {
    LOCAL: "local layers",
    TE: "layers of TransformerEngine",
    SEQUENTIAL: "experts one by one",
    GROUPED: "experts grouped by torch",
    GROUPED_TE: "experts grouped by TransformerEngine",
}


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Choice of kernels.

    Args:
        layers: `LOCAL` or `TE`.
        attention: "varlen" or "runs", see `attend`; or `TE`, or `MASKED`.
        experts: `SEQUENTIAL`, `GROUPED` or `GROUPED_TE`; empty for a model without experts.
        why: reasons by choice, where what is fastest cannot be.
    """

    layers: str
    attention: str
    experts: str
    why: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        why = dict(self.why)
        said = {each: f" ({why[each]})" if each in why else "" for each in (self.layers, self.experts)}
        parts = [f"{_IN_WORDS[self.layers]}{said[self.layers]}"]
        if self.attention == MASKED:
            parts.append("attention by the device's kernel under its mask")
        elif self.attention != TE:
            parts.append(f"attention by {self.attention}")
        if self.experts:
            parts.append(f"{_IN_WORDS[self.experts]}{said[self.experts]}")
        return ", ".join(parts)


def choose_kernels(options: Any, shape: ModelShape, dtype: torch.dtype, device: Device) -> Kernels:
    """Choose for a model in this format on this device.

    Args:
        options: `MegatronEngineOptions`.
        shape: of the model.
        dtype: of the weights that it computes with.
        device: of this process.

    Raises:
        ConfigError: what is asked for cannot be.
    """
    why = {}
    fits_flash = fits_varlen(shape.head_size, shape.latent.value_size if shape.latent else shape.head_size, dtype)
    no_te = _why_not_te(device.torch_device.type, fits_flash=fits_flash) if options.layers != LOCAL else "asked for"
    if shape.latent and not no_te:
        no_te = "multi-latent attention lies in local layers"
    if options.layers == TE and no_te:
        raise ConfigError(f'options.layers = "te" cannot be: {no_te}; set it to "auto" or "local"')
    layers = LOCAL if no_te else TE
    if no_te:
        why[LOCAL] = no_te
    attention = "runs"
    if options.attention == "auto":
        attention = _choose_attention(layers, device, fits_flash=fits_flash)
    experts = ""
    if shape.num_experts:
        grouped = GROUPED_TE if layers == TE else GROUPED
        no_group = "" if layers == TE else _why_not_grouped(device.torch_device.type, shape, dtype)
        if options.experts == GROUPED and no_group:
            raise ConfigError(f'options.experts = "grouped" cannot be: {no_group}; set it to "auto" or "sequential"')
        if options.experts == SEQUENTIAL:
            no_group = "asked for"
        experts = SEQUENTIAL if no_group else grouped
        if no_group:
            why[SEQUENTIAL] = no_group
    return Kernels(layers=layers, attention=attention, experts=experts, why=tuple(why.items()))


def _choose_attention(layers: str, device: Device, *, fits_flash: bool) -> str:
    if layers == TE:
        return TE
    if device.shapes_masks:
        return MASKED
    return "varlen" if fits_flash and device.packed_attention == "varlen" else "runs"


def _why_not_te(device_type: str, *, fits_flash: bool) -> str:
    """Empty where TransformerEngine's layers can compute."""
    if device_type != "cuda":
        return f"TransformerEngine needs a GPU: got {device_type}"
    if not fits_flash:
        return "TransformerEngine takes packs in bfloat16, with heads of a multiple of 8 up to 256"
    return _why_no_te()


@cache
def _why_no_te() -> str:
    """Empty where a TransformerEngine is installed that megatron-core 0.16 works with, and can be imported."""
    if find_spec("transformer_engine") is None:
        return "TransformerEngine is not installed"
    try:
        found = metadata.version("transformer_engine")
        if tuple(int(part) for part in found.split(".")[:2]) < OLDEST_TE:
            return f"TransformerEngine {found} is older than {'.'.join(map(str, OLDEST_TE))}"
        import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:  # made for another torch, or in part
        return f"TransformerEngine cannot be imported: {error}"
    return ""


def _why_not_grouped(device_type: str, shape: ModelShape, dtype: torch.dtype) -> str:
    """Empty where torch's grouped product takes a rank's experts."""
    if device_type not in ("cpu", "cuda"):
        return f"torch has no grouped products on {device_type}"
    if any(size * dtype.itemsize % ALIGNMENT_BYTES for size in (shape.hidden_size, shape.expert_size)):
        return (
            f"grouped products take rows of a multiple of {ALIGNMENT_BYTES} bytes, and hidden_size = "
            f"{shape.hidden_size} and moe_intermediate_size = {shape.expert_size} in {dtype} are not"
        )
    return ""

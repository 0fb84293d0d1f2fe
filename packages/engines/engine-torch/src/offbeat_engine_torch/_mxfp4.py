"""Folders whose experts are in mxfp4, as gpt-oss is published: read into the trainer's format, saved in it.

Blocks of 32 numbers of 4 bits (`*_blocks`) share a power of two (`*_scales`). All values are exact in bfloat16, in
which transformers decodes them without a GPU.
Source: Open Compute Project, "Microscaling Formats (MX) Specification" 1.0; transformers 5.19.0,
quantizers/quantizer_mxfp4.py.
"""

from collections.abc import Collection
from typing import Any

import torch
from transformers.utils.quantization_config import Mxfp4Config


def decoding(config: Any) -> dict[str, Any]:
    """Return the arguments by which `from_pretrained` decodes a folder; none where its config names no mxfp4."""
    found = getattr(config, "quantization_config", None) or {}
    return {"quantization_config": Mxfp4Config(dequantize=True)} if found.get("quant_method") == "mxfp4" else {}


def forget_mxfp4(config: Any) -> None:
    """Take the format out of the config of a model whose weights are not in it."""
    if decoding(config):
        del config.quantization_config


def settle_decoded(whole: Any, in_bfloat16: Collection[str]) -> None:
    """Bring decoded weights to bfloat16, those named, and float32, the others; and let the model be saved as it is.

    Expected: they have the format in which a model is asked for, and are saved under their names. Happens: decoded ones
    are in bfloat16 (transformers 5.19) or float32 (5.24), and 5.19 would save them under the names in the files.
    """
    for name, parameter in whole.named_parameters():
        parameter.data = parameter.data.to(torch.bfloat16 if name in in_bfloat16 else torch.float32)
    whole._weight_conversions = []  # 5.24 itself forgets them; gpt-oss has none but the decoding

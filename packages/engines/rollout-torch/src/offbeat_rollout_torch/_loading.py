"""Tensors written to where a decoder's weights lie: those of a model's folder, or of an update."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from offbeat_core import ExpectedTensors, ModelError, TensorSpec, list_model_files
from offbeat_rollout_torch._decoder import DecoderWeights
from offbeat_weightsync import dequantize_blocks, is_fp8_weight, quantize_blocks


class WeightWriter:
    """Writes named tensors into place and checks that each name comes once, in its shape, and none is missing."""

    def __init__(self, weights: DecoderWeights, error: type[Exception], source: str) -> None:
        self._weights, self._error, self._source = weights, error, source
        self._expected = ExpectedTensors(source, error)

    @property
    def has_written(self) -> bool:
        """Return whether anything of what was there is gone."""
        return bool(self._expected.taken)

    def write(self, name: str, tensor: Any) -> None:
        target, taken = self._weights.aliases.get(name, name), self._expected.taken
        stack = self._weights.stacks.get(name)
        parameter = stack or self._weights.parameters.get(target)
        source = tensor if isinstance(tensor, Tensor) else torch.as_tensor(tensor)
        is_tied, is_first = target in taken and target != name, not taken
        self._expected.take(name, tuple(source.shape), parameter.shape if parameter else None)
        assert parameter is not None
        taken.add(target)
        if stack is not None:
            taken.update(self._weights.parts_of(name))
        if is_first:
            self._weights.discard()
        view = parameter.view()
        source = source.reshape(view.shape)
        if is_tied and not torch.equal(view, source.to(view)):
            raise self._error(f"{self._source}: {name!r} and {target!r} are one tied tensor, but their values differ")
        view.copy_(source)

    def finish(self) -> None:
        self._expected.finish(self._weights.parameters)


def load_weights(weights: DecoderWeights, folder: Path, *, as_fp8: bool = False) -> None:
    """Fill `weights` from the safetensors files of `folder`.

    Args:
        weights: empty.
        folder: in Hugging Face format.
        as_fp8: round the matrices that FP8 updates will round, too.
    """
    writer = WeightWriter(weights, ModelError, str(folder))
    for path in list_model_files(folder):
        for name, tensor in _tensors(path):
            # Old folders stored what the config says already; some have layers for predicting several tokens at once.
            if not name.endswith("rotary_emb.inv_freq") and not name.startswith("mtp."):
                tensor = _rounded(name, tensor) if as_fp8 else tensor
                writer.write(_named(name, weights.architecture.prefix), tensor)
    writer.finish()
    weights.freeze()


def _rounded(name: str, tensor: Tensor) -> Tensor:
    if not is_fp8_weight(TensorSpec(name, "float32", tuple(tensor.shape))):
        return tensor
    return dequantize_blocks(*quantize_blocks(tensor))


def _named(name: str, prefix: str) -> str:
    """Return the name of today, for vision-language folders written before transformers 4.52."""
    if prefix == "model." or name.startswith((prefix, "model.visual.", "lm_head.")):
        return name
    return f"model.{name}" if name.startswith("visual.") else f"{prefix}{name.removeprefix('model.')}"


def _tensors(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)
    except SafetensorError as error:
        raise ModelError(f"{path} is not a whole safetensors file ({error}); download or write it again") from error

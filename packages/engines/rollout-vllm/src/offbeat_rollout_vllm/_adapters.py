"""LoRA adapters: what the engine holds by name, and an update that brings one.

An adapter is small, so it is received whole before anything changes: a stream that fails leaves the old one in place.
vLLM loads adapters from folders, and so gets one in memory that is gone again afterwards. Its scale is multiplied into
B before that, so that what is held can be compared with what was sent.

Source: vllm 0.32.0, vllm/lora/request.py (LoRARequest, load_inplace), vllm/lora/worker_manager.py
(LRUCacheWorkerLoRAManager.add_adapter), vllm/lora/peft_helper.py (adapter_config.json).
"""

import json
import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from offbeat_core import (
    ConfigError,
    LoraAdapter,
    ModelError,
    ModelFolder,
    OffbeatError,
    WeightProof,
    WeightStream,
    WeightSyncError,
)
from offbeat_rollout_vllm._options import SHARED_MEMORY, AdapterLimits
from offbeat_rollout_vllm._updates import FolderStream, Readback
from offbeat_rollout_vllm._workers import Arena, Workers

if TYPE_CHECKING:
    from torch import Tensor


DOWN: Final = ".lora_A."
UP: Final = ".lora_B."
PEFT_PREFIX: Final = "base_model.model."


class Adapters:
    """The adapters of one engine.

    Args:
        workers: of the engine.
        folder: says which layers there are.
        limits: of vLLM.
        dtype: number format of the adapters.
        reserve: gives an arena of at least a number of bytes.
        on_cpu: see `Readback`.
    """

    def __init__(
        self,
        workers: Workers,
        folder: ModelFolder,
        limits: AdapterLimits,
        dtype: str,
        reserve: Callable[[int], Arena],
        *,
        on_cpu: bool,
    ) -> None:
        self._workers, self._folder, self._limits, self._dtype = workers, folder, limits, dtype
        self._reserve, self._on_cpu = reserve, on_cpu
        self._numbers: dict[str, int] = {}
        self._broken: dict[str, str] = {}
        self.touched = False

    def number(self, name: str) -> int:
        if name in self._broken:
            raise WeightSyncError(f"the adapter {name!r} has no usable weights: {self._broken[name]}; send it again")
        if name not in self._numbers:
            there = ", ".join(map(repr, self._numbers)) or "none"
            raise ConfigError(f"the engine has no adapter {name!r} (it has: {there}); send it first")
        return self._numbers[name]

    def check_room(self, name: str) -> None:
        """Refuse one adapter too many, which vLLM would put in another's place."""
        if name not in self._numbers and len(self._numbers) >= self._limits.num_adapters:
            raise ConfigError(
                f"the engine holds {self._limits.num_adapters} adapters and has {', '.join(map(repr, self._numbers))}: "
                f"drop one before {name!r} comes, or raise options.max_loras"
            )

    def load(self, adapter: LoraAdapter, stream: WeightStream, source: str) -> WeightProof:
        """Take an adapter and prove what is held. `touched` says whether anything was changed before a failure."""
        self.touched = False
        try:
            sent = self._take(stream, source)
            number = self._numbers.get(adapter.name) or max(self._numbers.values(), default=0) + 1
            scaled = {name: _scaled(name, tensor, adapter.scale) for name, tensor in sent.items()}
            with tempfile.TemporaryDirectory(prefix="offbeat-adapter-", dir=_memory_folder()) as folder:
                _write(Path(folder), scaled)
                self.touched = True
                self._numbers[adapter.name] = number
                self._workers.call("add_adapter", number=number, name=adapter.name, path=folder)
            proof = stream.prove(AdapterReadback(sent, scaled, self._readback(number), self._limits.max_rank))
        except OffbeatError:
            raise
        except Exception as error:
            raise WeightSyncError(f"{source}: {error}") from error
        self._broken.pop(adapter.name, None)
        return proof

    def _readback(self, number: int) -> Readback:
        return Readback(self._workers, self._dtype, self._reserve, on_cpu=self._on_cpu, adapter=number)

    def _take(self, stream: WeightStream, source: str) -> "dict[str, Tensor]":
        """Copies of all tensors, checked."""
        import torch

        sent: dict[str, Tensor] = {}
        for name, value in stream:
            if name in sent:
                raise WeightSyncError(f"{source}: the tensor {name!r} came twice")
            tensor = value.detach() if isinstance(value, torch.Tensor) else torch.as_tensor(value)
            sent[name] = tensor.cpu().clone()
        check_adapter_shapes(
            {name: tuple(tensor.shape) for name, tensor in sent.items()}, self._folder.shape_of, source
        )
        rank = max(tensor.shape[0] for name, tensor in sent.items() if DOWN in name)
        if rank > self._limits.max_rank:
            raise WeightSyncError(
                f"{source}: rank {rank} is more than max_lora_rank = {self._limits.max_rank}; raise that option"
            )
        return sent

    def mark_unusable(self, name: str, reason: str) -> None:
        self._broken[name] = reason

    def mark_all_unusable(self, reason: str) -> None:
        self._broken |= dict.fromkeys(self._numbers, reason)

    def drop(self, name: str) -> None:
        self._broken.pop(name, None)
        if name in self._numbers:
            self._workers.call("drop_adapter", number=self._numbers.pop(name))


class AdapterReadback:
    """A function from a tensor's name to what the engine holds, as the sender would have to have sent it."""

    def __init__(
        self, sent: "Mapping[str, Tensor]", scaled: "Mapping[str, Tensor]", readback: Readback, max_rank: int
    ) -> None:
        self._sent, self._scaled, self._readback, self._max_rank = sent, scaled, readback, max_rank
        for name, tensor in scaled.items():
            readback.expect(name, self._padded(name, tensor))

    def _padded(self, name: str, tensor: "Tensor") -> "Tensor":
        dim = 0 if DOWN in name else 1
        shape = list(tensor.shape)
        shape[dim] = self._max_rank
        padded = tensor.new_zeros(shape)
        padded.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
        return padded

    def __call__(self, name: str) -> "Tensor":
        """Return the tensor as it was sent, in the engine's number format, if the engine holds what follows from it."""
        held = self._readback(name)
        wanted = self._padded(name, self._scaled[name]).to(held.dtype)
        if not held.allclose(wanted, rtol=0.0, atol=0.0, equal_nan=True):
            raise WeightSyncError(f"the engine holds other numbers than were sent in {name!r}; send the adapter again")
        return self._sent[name].to(held.dtype)


def check_adapter_shapes(
    found: Mapping[str, tuple[int, ...]], shape_of: Callable[[str], tuple[int, ...] | None], source: str
) -> None:
    """Refuse an adapter that is not whole, or not of this model.

    Args:
        found: shape of each tensor of the adapter, by PEFT's name.
        shape_of: gives the shape of a tensor of the model by its Hugging Face name, or None.
        source: the sender, for the error.
    """
    if not found:
        raise WeightSyncError(f"{source}: an adapter needs tensors, got none")
    for name, shape in found.items():
        if (DOWN in name) == (UP in name) or not name.endswith(".weight"):
            raise WeightSyncError(f"{source}: {name!r} must end in lora_A.weight or lora_B.weight, as PEFT names them")
        down, up = name.replace(UP, DOWN), name.replace(DOWN, UP)
        if down not in found or up not in found:
            raise WeightSyncError(f"{source}: {name!r} needs {up if name == down else down!r}, which did not come")
        target = down.removeprefix(PEFT_PREFIX).replace(DOWN, ".")
        layer = shape_of(target) or ()
        if len(layer) != 2:
            raise WeightSyncError(f"{source}: this model has no matrix {target!r} for {name!r} to adapt")
        rank = found[down][0] if found[down] else 0
        wanted = (rank, layer[1]) if name == down else (layer[0], rank)
        if not rank or shape != wanted:
            raise WeightSyncError(f"{source}: {name!r} must have shape {wanted}, got {shape}")


def _scaled(name: str, tensor: "Tensor", scale: float) -> "Tensor":
    return tensor if DOWN in name else (tensor.float() * scale).to(tensor.dtype)


def _memory_folder() -> Path | None:
    """Memory that looks like a folder, where there is one; else the system's folder for temporary files."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else None


def _write(folder: Path, tensors: "Mapping[str, Tensor]") -> None:
    """An adapter in PEFT's form, whose scale is 1."""
    from safetensors.torch import save_file

    ranks = {tensor.shape[0] for name, tensor in tensors.items() if DOWN in name}
    layers = sorted({name.split(DOWN)[0].rpartition(".")[2] for name in tensors if DOWN in name})
    config = {"peft_type": "LORA", "r": max(ranks), "lora_alpha": max(ranks), "target_modules": layers}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    named = {PEFT_PREFIX + name.removeprefix(PEFT_PREFIX): tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, str(folder / "adapter_model.safetensors"))


WEIGHTS: Final = "adapter_model.safetensors"
CONFIG: Final = "adapter_config.json"
REFUSED: Final = ("use_dora", "lora_bias", "modules_to_save", "alpha_pattern", "rank_pattern", "layer_replication")
"""Settings that make more of an adapter than one scale and two matrices a layer."""


def read_peft_adapter(folder: Path, name: str, version: int) -> tuple[LoraAdapter, FolderStream]:
    """Read a LoRA adapter that Hugging Face PEFT has saved.

    Source: https://github.com/huggingface/peft, peft/tuners/lora/config.py (LoraConfig) and docs/source/
    developer_guides/checkpoint.md (adapter_config.json, adapter_model.safetensors).
    """
    adapter = LoraAdapter(name=name, scale=_scale(_read_config(folder / CONFIG), folder))
    tensors = _read_weights(folder / WEIGHTS)
    return adapter, FolderStream(tensors.items, version)


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
        tensors = dict(load_file(str(path)))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read ({error}); adapters must be safetensors") from error
    if bad := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise ModelError(f"{path}: {bad[0]} holds numbers that are not finite; save the adapter of a sound checkpoint")
    return tensors


def _scale(config: dict[str, Any], folder: Path) -> float:
    if extra := [name for name in REFUSED if config.get(name)]:
        raise ModelError(f"the adapter in {folder} has {', '.join(extra)}, and only plain LoRA can be served; merge it")
    if config.get("bias", "none") != "none":
        raise ModelError(f"the adapter in {folder} trains biases, and only plain LoRA can be served; merge it")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise ModelError(f"the adapter in {folder} must name r and lora_alpha, got {rank!r} and {alpha!r}")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)

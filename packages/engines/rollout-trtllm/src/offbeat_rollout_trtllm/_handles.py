"""Handles: how a tensor in this process's memory is named so that the engine's workers open it, and what they note."""

import base64
import inspect
import pickle
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol, cast

import torch
import xxhash
from torch import Tensor

from offbeat_core import WeightSyncError


class Packed(NamedTuple):
    """Handles of some tensors. The engine may open them as long as `tensors` live."""

    text: str
    tensors: tuple[Tensor, ...]


class HandleFormat(Protocol):
    """Makes handles for the worker on one device."""

    device_id: str

    def pack(self, tensors: Sequence[tuple[str, Tensor]]) -> Packed:
        """Make the handles of named tensors, copying to the device what is not there."""


class CudaHandles:
    """CUDA IPC handles, in the one form that TensorRT-LLM 1.2 reads over HTTP.

    `update_weights` in tensorrt_llm/llmapi/rlhf_utils.py unpickles a list of (name, (function, arguments)), allows
    builtins and torch's modules, and puts its own device in the place of argument 6. We write pickle and never read it.

    Args:
        device: index of the CUDA device on which the replica's worker of this rank runs.

    Raises:
        WeightSyncError: there is no such device.
    """

    def __init__(self, device: int) -> None:
        if not torch.cuda.is_available() or device >= torch.cuda.device_count():
            raise WeightSyncError(f"handles need the CUDA device {device}: here are {torch.cuda.device_count()}")
        self.device_id = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        self._device = torch.device("cuda", device)

    def pack(self, tensors: Sequence[tuple[str, Tensor]]) -> Packed:
        """Make the handles of named tensors."""
        from torch.multiprocessing.reductions import reduce_tensor

        reduce: Any = reduce_tensor
        there = [(name, tensor.detach().to(self._device).contiguous()) for name, tensor in tensors]
        torch.cuda.current_stream(self._device).synchronize()
        text = encode_handles([(name, reduce(tensor)) for name, tensor in there])
        return Packed(text, tuple(tensor for _, tensor in there))


def encode_handles(handles: list[tuple[str, Any]]) -> str:
    """Base64 of a pickle: what TensorRT-LLM 1.2 asks for."""
    return base64.b64encode(pickle.dumps(handles)).decode()


def open_cuda_handles(device_ids: Sequence[str]) -> list[HandleFormat]:
    seen = [CudaHandles(index) for index in range(torch.cuda.device_count())]
    by_id: dict[str, HandleFormat] = {each.device_id: each for each in seen}
    for device_id in device_ids:
        if device_id not in by_id:
            raise WeightSyncError(
                f"the engine computes on {device_id}, and this process sees {', '.join(by_id) or 'no device'}: weights "
                "by handle need the same GPUs; run this process with all of the engine's visible"
            )
    return [by_id[device_id] for device_id in device_ids]


def tensors_checksum(tensors: Sequence[tuple[str, Tensor]]) -> str:
    """16 hex digits over names, dtypes, shapes and bytes: equal where the same tensors are held in the same order."""
    hasher = xxhash.xxh3_64()
    for name, tensor in tensors:
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        hasher.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


class ProvenUpdates:
    """Mixed in before TensorRT-LLM's `WorkerExtension`, whose `update_weights` opens the handles and loads them.

    It notes a checksum of each flush as the worker opened it. And where a model cannot load in parts it passes that on
    to the model loader; 1.2 always passes that it can (rlhf_utils.py) and then fails on a model that takes no such
    argument.
    """

    engine: Any
    device_id: int

    def weights_device(self) -> str:
        """Key of this worker's handles: the same text that `update_weights` looks for."""
        return str(import_module("tensorrt_llm._torch.utils").get_device_uuid(self.device_id))

    def supports_partial_loading(self) -> bool:
        """Return whether the model's own `load_weights` can be given some of its tensors at a time."""
        load_weights = self.engine.model_engine.model.load_weights
        return "allow_partial_loading" in inspect.signature(load_weights).parameters

    def begin_weights(self) -> None:
        self._arrivals: list[str] = []

    def update_weights(self, ipc_handles: dict[str, str] | None = None) -> None:
        """Load one flush; None makes the weights ready and forgets cached keys and values."""
        loader = self.engine.model_engine.model_loader
        reload = loader.reload

        def reload_noted(model: Any, weights: dict[str, Any], **_: Any) -> Any:
            self._arrivals = [*getattr(self, "_arrivals", []), tensors_checksum(list(weights.items()))]
            return reload(model, weights, allow_partial_loading=self.supports_partial_loading())

        loader.reload = reload_noted
        try:
            cast(Any, super()).update_weights(ipc_handles)
        finally:
            del loader.reload  # the class's own shows again

    def weight_arrivals(self) -> tuple[str, list[str]]:
        """Name of the device, and the checksum of each flush since `begin_weights`."""
        return self.weights_device(), list(getattr(self, "_arrivals", []))

    def reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()

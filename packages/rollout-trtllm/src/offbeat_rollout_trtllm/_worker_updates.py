"""What a worker of the engine adds to TensorRT-LLM's own way of loading weights."""

import inspect
from importlib import import_module
from typing import Any, cast

from offbeat_rollout_trtllm._handles import tensors_checksum


class ProvenUpdates:
    """Mixed in before TensorRT-LLM's `WorkerExtension`, whose `update_weights` opens the handles and loads them.

    It notes a checksum of each flush as the worker opened it. And where a model cannot load in parts it says so to the
    model loader, which in 1.2 is always told that it can (rlhf_utils.py) and then fails on a model that takes no such
    argument.
    """

    engine: Any
    device_id: int

    def weights_device(self) -> str:
        """Key of this worker's handles: the same text that `update_weights` looks for."""
        return str(import_module("tensorrt_llm._torch.utils").get_device_uuid(self.device_id))

    def supports_partial_loading(self) -> bool:
        """Whether the model's own `load_weights` can be given some of its tensors at a time."""
        load_weights = self.engine.model_engine.model.load_weights
        return "allow_partial_loading" in inspect.signature(load_weights).parameters

    def begin_weights(self) -> None:
        """Forget what a failed update has left."""
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
        """Forget cached keys and values."""
        self.engine.reset_prefix_cache()

"""What a replica's leader asks of the engine's server, one blocking call at a time."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from offbeat_rollout_trtllm._http import HttpEngine


class EngineControl:
    """The control routes of one replica's server, for ranks of a trainer, which have no event loop.

    Nothing is sent before the first call, so every rank may hold one while its leader alone calls it.

    Args:
        address: host:port.
        deadline_s: for each answer.

    Raises:
        ConfigError: the address is none.
    """

    def __init__(self, address: str, *, deadline_s: float = 300.0) -> None:
        self._engine = HttpEngine(address, deadline_s=deadline_s)
        self.deadline_s = deadline_s

    def __str__(self) -> str:
        return self._engine.label

    def version(self) -> str:
        """TensorRT-LLM's version."""
        return str(self._call("GET", "/version")["version"])

    def supports_partial_loading(self) -> bool:
        """Whether the engine can load some of the model's tensors at a time."""
        return bool(self._call("GET", "/offbeat/partial_loading")["supported"])

    def begin_weights(self) -> None:
        """Stop serving: from here to `finish_weights` the engine holds a mixture."""
        self._call("POST", "/offbeat/begin_weights")

    def update_weights(self, handles: Mapping[str, str]) -> None:
        """Load tensors.

        Args:
            handles: for each device of the replica what `HandleFormat.pack` made.
        """
        self._call("POST", "/update_weights", {"weights": dict(handles)})

    def weight_arrivals(self) -> dict[str, list[str]]:
        """For each device a checksum of each flush since `begin_weights`, as its worker opened it."""
        answer: dict[str, list[str]] = self._call("GET", "/offbeat/weight_arrivals")["arrivals"]
        return answer

    def finish_weights(self, version: int) -> None:
        """Make the weights ready, forget cached keys and values, and serve `version`."""
        self._call("POST", "/offbeat/finish_weights", {"version": version})

    def release_memory(self, tags: Sequence[str]) -> None:
        """Give memory back."""
        self._call("POST", "/release_memory", {"tags": list(tags)})

    def resume_memory(self, tags: Sequence[str]) -> None:
        """Take memory again."""
        self._call("POST", "/resume_memory", {"tags": list(tags)})

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        return asyncio.run(self._engine.call(method, path, body))

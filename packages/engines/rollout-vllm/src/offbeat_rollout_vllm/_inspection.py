"""Values that vLLM computes on the way to log-probabilities, and fingerprints of its weights; see `InspectedEngine`."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from offbeat_core import (
    DataError,
    Fingerprint,
    GenerateRequest,
    Ids,
    Inspection,
    ModelFolder,
    SamplingParams,
    fingerprint,
)
from offbeat_rollout_vllm._control import EngineControl
from offbeat_rollout_vllm._requests import RequestState
from offbeat_rollout_vllm._updates import Readback, matrices_of
from offbeat_rollout_vllm._vllm_objects import check_request
from offbeat_rollout_vllm._workers import Arena, Workers

ALONE: Final = {"skip_reading_prefix_cache": True}
"""Parameter of vLLM's with which a prompt is computed anew, whatever the cache holds of it."""
_ITEM_BYTES: Final = 4


class Inspector:
    """Runs single sequences under the eyes of the workers.

    Args:
        workers: of the engine.
        control: its methods run in the thread of this, between changes of the engine.
        folder: of the model.
        max_model_len: of the engine.
        reserve: gives an arena of at least a number of bytes.
    """

    def __init__(
        self,
        workers: Workers,
        control: EngineControl,
        folder: ModelFolder,
        max_model_len: int,
        reserve: Callable[[int], Arena],
    ) -> None:
        self._workers, self._control, self._folder = workers, control, folder
        self._max_model_len, self._reserve = max_model_len, reserve

    async def inspect(
        self, run: Callable[[RequestState], Any], ids: Ids, layer: int | None, adapter: str, temperature: float
    ) -> Inspection:
        """Run a sequence by `run`, without its last token: it predicts none, and vLLM samples one after those it gets.

        Raises:
            DataError: the sequence is longer than the engine takes, or the model has no such layer.
            OffbeatError: other samples came meanwhile.
        """
        prompt = ids[: max(1, len(ids) - 1)]
        params = SamplingParams(max_tokens=1, ignore_eos=True, seed=0)
        request = GenerateRequest(request_id="inspect", prompt_ids=prompt, params=params, adapter=adapter)
        check_request(request, self._folder.vocab_size, self._max_model_len, self._folder.image_token_id)
        begin = partial(self._workers.call, "begin_inspection", layer=layer, num_tokens=len(prompt))
        num_layers = min(await self._control.run(begin))
        try:
            if layer is not None and not 0 <= layer < num_layers:
                raise DataError(f"layer {layer} was asked for, and the model has layers 0 to {num_layers - 1}")
            await run(RequestState(request, prompt.tolist(), ALONE))
        finally:
            await self._control.run(self._workers.call, "end_inspection")
        found: Inspection = await self._control.run(self._read, ids.tolist(), temperature)
        return found

    def _read(self, ids: list[int], temperature: float) -> Inspection:
        shapes = self._workers.call("measure_inspection", ids=ids, temperature=temperature)[0]
        sizes = [rows * width for _, rows, width in shapes]
        arena = self._reserve(sum(sizes) * _ITEM_BYTES)
        self._workers.call("read_inspection")
        values = arena.tensor(0, "float32", (sum(sizes),)).numpy().copy()
        parts = np.split(values, np.cumsum(sizes)[:-1])
        return {name: part.reshape(rows, width) for (name, rows, width), part in zip(shapes, parts, strict=True)}

    def fingerprints(self, names: Sequence[str]) -> dict[str, Fingerprint]:
        """See `InspectedEngine.fingerprints`. On a CPU numbers below the smallest normal one read as zero."""
        import torch

        self._control.require_weights()
        matrices = {name: parts for name in names if (parts := matrices_of(name, self._folder))}
        # As float32, which is no narrower than what is held, each is read in the format in which it is held.
        readback = Readback(self._workers, "float32", self._reserve, on_cpu=False)
        for matrix in [each for parts in matrices.values() for each in parts]:
            shape = self._folder.shape_of(matrix)
            assert shape is not None
            readback.expect(matrix, torch.empty(shape, device="meta"))
        found = {}
        for name, parts in matrices.items():
            whole = torch.cat([readback(part).flatten() for part in parts])
            found[name] = fingerprint(whole.float().numpy())
        return found

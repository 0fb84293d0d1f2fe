"""Decoding steps, and forward and backward of the trainer's model, in which the host never waits for the device.

On a GPU torch raises an error at a wait (`torch.cuda.set_sync_debug_mode`). On a CPU, where nothing waits, no operator
may run that would: one whose result, or its size, the host has to know.
"""

import asyncio
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from gpu.decode_continuous import make_requests
from gpu.decoding_speed import open_engine, seconds_of
from gpu.kernels import recorded
from gpu.piece import CheckError, Figures, Place, main, require
from gpu.shapes import make_model
from gpu.trainer_against_cpu import policy_gradient
from gpu.training_speed import open_trainer

from offbeat_engine_torch import TorchTrainEngine

WAITING = {"_local_scalar_dense", "equal", "masked_select", "nonzero", "unique_consecutive", "_unique2"}
"""ATen operators after which the host needs a value of the device."""


@contextmanager
def no_waits(place: Place, what: str) -> Iterator[None]:
    """Raise CheckError where the host waits for the device in the block, in any thread of this process."""
    if place.is_accelerator:
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        except Exception as error:
            if "synchroniz" in str(error):  # torch's "called a synchronizing CUDA operation"
                raise CheckError(f"{what}: {error}") from error
            raise
        finally:
            torch.cuda.set_sync_debug_mode("default")
    else:
        with recorded(place) as kernels:
            yield
        waited = sorted(WAITING & {name.removeprefix("aten::") for name in kernels.counts})
        require(not waited, f"{what} has run {', '.join(waited)}")
        require(bool(kernels.counts), f"{what} has run nothing")


async def decode(place: Place, folder: Path) -> int:
    """Return the tokens that were drawn while no wait was allowed: those after the prompts.

    Sampling is paused when all prompts are through, and continues under the guard until all samples have ended.
    """
    engine, batch, new = await open_engine(place, folder), place.pick(4, 64), place.pick(48, 256)
    await seconds_of(engine, batch, 8, new)  # records the steps
    begun, requests = set[str](), make_requests([8] * batch, [new] * batch)
    running = [
        asyncio.create_task(engine.stream(request, lambda *_, name=request.request_id: begun.add(name)))
        for request in requests
    ]
    while len(begun) < batch:
        await engine.resume()
        await engine.pause("keep")
        await asyncio.sleep(0)  # the tokens so far are told
    before = (await engine.health()).num_tokens
    with no_waits(place, "a decoding step"):
        await engine.resume()
        await asyncio.gather(*running)
    drawn = (await engine.health()).num_tokens - before
    await engine.close()
    require(drawn >= batch, f"all but {drawn} tokens were drawn before the guard")
    return drawn


class GuardedModel:
    """Allows no wait in forward and backward of the trainer's model in a block; what lies between them may wait.

    Args:
        place: of the piece.
        engine: whose model it is.

    Attributes:
        num_passes: forward and backward passes that have ended.
    """

    def __init__(self, place: Place, engine: TorchTrainEngine) -> None:
        self._place, self._open, self.num_passes = place, ExitStack(), 0
        model: torch.nn.Module = engine._policy.model  # the engine's own methods wait for metrics
        model.register_forward_pre_hook(lambda *_: self._begin("forward"))
        model.register_forward_hook(lambda *_: self._end())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)  # of a pass that has failed

    def _begin(self, what: str) -> None:
        self._open.enter_context(no_waits(self._place, what))

    def _end(self) -> None:
        self._open.close()
        self.num_passes += 1

    def loss(self, tokens: Any) -> Any:
        """Return the plainest policy loss, whose backward pass is guarded."""
        value, metrics = policy_gradient(tokens)

        def begin(_: torch.Tensor) -> None:
            self._begin("backward")
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

        value.register_hook(begin)
        return value, metrics


def run(place: Place) -> Figures:
    """Decode and train."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = make_model(Path(temporary) / "model", tiny=place.tiny, device=place.device.torch_device)
        engine, sequences = open_trainer(place, folder, {})
        engine.forward_backward(sequences, policy_gradient)  # compiles
        with GuardedModel(place, engine) as guarded:
            engine.forward_backward(sequences, guarded.loss)
        figures = {"guarded_passes": guarded.num_passes}
        place.note(figures)
        require(guarded.num_passes == 2, f"{guarded.num_passes} passes were guarded, of one forward and one backward")
        engine.close()
        place.device.release_unused()
        return {**figures, "guarded_tokens": asyncio.run(decode(place, folder))}


if __name__ == "__main__":
    main(run)

"""What ranks that share a model hand out arrives whole over every transport, and is what the embedded engine serves."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat_core import (
    Completion,
    GenerateRequest,
    RolloutEngineConfig,
    SamplingParams,
    TrainEngine,
    TrainEngineConfig,
    TrainSequence,
    load_backend,
)
from offbeat_mesh import Mesh
from offbeat_rollout_torch import TorchRolloutEngine
from offbeat_weightsync import (
    BucketPlan,
    DiskSender,
    GroupSender,
    InProcessStream,
    WeightGroup,
    WeightSender,
    describe_tensors,
    new_address,
    open_sender,
    receive,
)

OpenStream = Callable[[], AbstractContextManager[Any]]
BUCKET_BYTES, DEADLINE_S = 1 << 14, 60.0
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
PROMPT_IDS = np.arange(3, 15, dtype=np.int32)


def open_trainer(model: Path, mesh: Mesh, **options: Any) -> TrainEngine:
    """A trainer after one step that changes what is sampled."""
    config = TrainEngineConfig(model_path=str(model), device="cpu", learning_rate=1e-2, options=options)
    engine: TrainEngine = load_backend("offbeat.engine", "megatron").create(config, mesh)
    rng = np.random.default_rng(0)
    sequences = [
        TrainSequence(ids=rng.integers(3, 300, 24).astype(np.int32), loss_mask=np.arange(24) > 4) for _ in range(4)
    ]
    engine.forward_backward(sequences, lambda tokens: (-tokens.logprobs_N.sum() / tokens.total_tokens, {}))
    engine.step()
    return engine


class Receiver:
    """An embedded engine in a thread of its own: takes an update and answers."""

    def __init__(self, model: Path, open_stream: OpenStream) -> None:
        self._model, self._open_stream = str(model), open_stream
        self.completion: Completion | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()

    async def _serve(self) -> None:
        engine = await TorchRolloutEngine.create(
            RolloutEngineConfig(model_path=self._model, device="cpu", max_model_len=64)
        )
        with self._open_stream() as stream:
            proof = await engine.update_weights(stream, 1)
            if hasattr(stream, "confirm"):
                stream.confirm(proof)
        params = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
        self.completion = (
            await engine.generate(GenerateRequest(request_id="r", prompt_ids=PROMPT_IDS, num_samples=1, params=params))
        )[0]
        await engine.close()

    def wait(self) -> Completion:
        self._thread.join(DEADLINE_S)
        assert self.completion is not None
        return self.completion


def drain(engine: TrainEngine) -> None:
    """What ranks do that send nothing: hand their parts over."""
    deque(engine.weights(), maxlen=0)


def between(engine: TrainEngine, model: Path, sender: WeightSender) -> Completion:
    receiver = Receiver(model, partial(receive, sender.address, 1, DEADLINE_S, group=WeightGroup("cpu")))
    with sender:
        sender.send(iter(engine.weights()), 1, 1, deadline_s=DEADLINE_S)
        return receiver.wait()


def in_process(engine: TrainEngine, model: Path) -> Completion:
    stream = InProcessStream(((name, tensor.clone()) for name, tensor in engine.weights()), 1)

    @contextmanager
    def at_hand() -> Iterator[InProcessStream]:
        yield stream

    return Receiver(model, at_hand).wait()


def sync(transport: str, engine: TrainEngine, model: Path, mesh: Mesh, folder: Path) -> Completion | None:
    """One weight sync; what the engine that has received answers, on the ranks that have one."""
    plan = BucketPlan.build(describe_tensors(engine.weights(), "float32"), BUCKET_BYTES)
    if mesh.rank != 0:
        drain(engine)
        return None
    if transport == "in process":
        return in_process(engine, model)
    senders: dict[str, Callable[[], WeightSender]] = {
        "shared memory": lambda: open_sender(new_address(), plan),
        "tcp": lambda: open_sender(new_address("127.0.0.1"), plan),
        "disk": lambda: DiskSender(new_address("127.0.0.1"), plan, folder),
        "group": lambda: GroupSender(new_address("127.0.0.1"), plan),
    }
    return between(engine, model, senders[transport]())


@pytest.mark.mesh(tp=2, pp=2, deadline_s=90, compare=False)
@pytest.mark.parametrize("transport", ["in process", "shared memory", "tcp", "disk", "group"])
def test_the_embedded_engine_serves_what_the_ranks_hold(
    model: Path, mesh: Mesh, transport: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Log-probabilities of what it samples are those of the trainer."""
    engine = open_trainer(model, mesh)
    folder = tmp_path_factory.getbasetemp() / f"weights-{'-'.join(map(str, mesh.axes.values()))}"
    _compare(engine, mesh, sync(transport, engine, model, mesh, folder))
    engine.close()


@pytest.mark.mesh(dp=2, tp=2, deadline_s=90, compare=False)
def test_it_serves_what_a_late_gather_of_parameters_would_bring(model: Path, mesh: Mesh, tmp_path: Path) -> None:
    """Under overlap_param_gather a rank's own weights are old until the next pass."""
    engine = open_trainer(model, mesh, **OVERLAP)
    _compare(engine, mesh, sync("shared memory", engine, model, mesh, tmp_path))
    engine.close()


def _compare(engine: TrainEngine, mesh: Mesh, completion: Completion | None) -> None:
    mine = None if completion is None else (completion.ids.tolist(), completion.logprobs.tolist())
    served = [each for each in mesh.group("dp", "cp", "tp", "pp").all_gather_data(mine) if each is not None]
    assert served
    for ids, logprobs in served:
        whole = np.concatenate([PROMPT_IDS, np.array(ids, np.int32)])
        mask = np.arange(len(whole)) >= len(PROMPT_IDS)
        (found,) = engine.logprobs([TrainSequence(ids=whole, loss_mask=mask)])
        np.testing.assert_allclose(found[mask], logprobs, atol=1e-4)

"""Whatever goes wrong with an update, the embedded engine serves the old version or refuses: never a mixture."""

import asyncio
import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from weightsync_peers import in_thread

from offbeat_core import (
    Completion,
    GenerateRequest,
    OffbeatError,
    RolloutEngineConfig,
    SamplingParams,
    WeightProof,
    WeightSyncError,
)
from offbeat_rollout_torch import TorchRolloutEngine
from offbeat_testing import changed_weights, reference_model, tiny_model
from offbeat_weightsync import (
    BucketPlan,
    DiskSender,
    GroupSender,
    InProcessStream,
    SharedMemorySender,
    WeightGroup,
    WeightSender,
    describe_tensors,
    new_address,
    read_weights,
    receive,
    write_weights,
)

Named = list[tuple[str, Tensor]]
OpenStream = Callable[[], AbstractContextManager[Any]]
BUCKET_BYTES = 1 << 16
FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def new_weights(folder: Path) -> Named:
    return changed_weights(reference_model(folder))


def plan_of(tensors: Named) -> BucketPlan:
    return BucketPlan.build(describe_tensors(tensors), BUCKET_BYTES)


async def sample(engine: TorchRolloutEngine) -> Completion:
    ids = np.arange(3, 15, dtype=np.int32)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    return (await engine.generate(GenerateRequest(request_id="r", prompt_ids=ids, num_samples=1, params=params)))[0]


def same(one: Completion, other: Completion) -> bool:
    return bool(np.array_equal(one.ids, other.ids) and np.allclose(one.logprobs, other.logprobs, atol=1e-6))


async def what_is_served(engine: TorchRolloutEngine, old: Completion) -> str:
    try:
        now = await sample(engine)
    except WeightSyncError:
        return "refuses"
    assert same(now, old), "a mixture"
    assert now.oldest_version == old.oldest_version == 0
    return "serves the old version"


class EngineThatLosesAByte:
    """A stream whose receiver's memory changes after it was loaded."""

    def __init__(self, stream: Any, engine: TorchRolloutEngine) -> None:
        self._stream, self._engine, self.version = stream, engine, stream.version

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._stream
        self._engine._worker._runner.weights.final_norm.view(torch.uint8)[0] ^= 1

    def prove(self, read: Callable[[str], Any]) -> WeightProof:
        proof: WeightProof = self._stream.prove(read)
        return proof


async def update_engine(folder: Path, open_stream: OpenStream, whole: Named, *, flip: bool = False) -> str:
    """Update an engine by a stream with a fault; say what it serves then, and check that a whole update mends it."""
    engine = await TorchRolloutEngine.create(RolloutEngineConfig(model_path=str(folder), device="cpu", num_threads=1))
    try:
        old = await sample(engine)
        try:
            with open_stream() as stream:
                proof = await engine.update_weights(EngineThatLosesAByte(stream, engine) if flip else stream, 2)
                if hasattr(stream, "confirm"):
                    await asyncio.to_thread(stream.confirm, proof)
            said = "no error"
        except OffbeatError as error:
            said = f"{type(error).__name__}: {error}"
            said = f"{await what_is_served(engine, old)} after {said}"
        await engine.update_weights(InProcessStream(whole, 3), 3)
        new = await sample(engine)
        assert new.oldest_version == 3
        assert not same(new, old)
        return said
    finally:
        await engine.close()


Update = Callable[..., str]


@pytest.fixture
def update(folder: Path, new_weights: Named) -> Update:
    return lambda open_stream, **how: asyncio.run(update_engine(folder, open_stream, new_weights, **how))


def test_a_whole_update_by_every_transport_is_served(
    update: Update, new_weights: Named, address: str, tmp_path: Path
) -> None:
    write_weights(tmp_path, plan_of(new_weights), new_weights, 2)
    assert update(lambda: read_weights(tmp_path, 2, deadline_s=30)) == "no error"
    assert update(lambda: nullcontext(InProcessStream(new_weights, 2))) == "no error"
    with (
        SharedMemorySender(address, plan_of(new_weights), deadline_s=30) as sender,
        in_thread(lambda: sender.send(new_weights, 2, 1)),
    ):
        assert update(lambda: receive(address, 2, 30)) == "no error"


@pytest.mark.parametrize("way", ["group", "disk"])
@pytest.mark.parametrize("fault", ["", "raises"])
def test_an_engine_serves_what_comes_over_a_group_or_the_disk_or_refuses(
    update: Update, new_weights: Named, tmp_path: Path, way: str, fault: str
) -> None:
    where, plan = new_address("127.0.0.1"), plan_of(new_weights)
    sender: WeightSender = GroupSender(where, plan) if way == "group" else DiskSender(where, plan, tmp_path)

    def send() -> object:
        try:
            return sender.send(give(new_weights, fault), 2, 1)
        except RuntimeError as error:
            return error

    with sender, in_thread(send):
        said = update(lambda: receive(sender.address, 2, 30, group=WeightGroup("cpu")))
    served = "serves the old version" if way == "disk" else "refuses"
    assert said == (
        "no error" if not fault else f"{served} after WeightSyncError: trainer-0 gave up: RuntimeError: out of memory"
    )


def widen_one(tensors: Named) -> Named:
    name, tensor = tensors[3]
    return [*tensors[:3], (name, torch.cat([tensor, tensor])), *tensors[4:]]


def add_one(tensors: Named) -> Named:
    return [*tensors, ("model.layers.7.mlp.up_proj.weight", torch.ones(2, 2))]


def tie_differently(tensors: Named) -> Named:
    return [*tensors, ("lm_head.weight", torch.ones_like(dict(tensors)["model.embed_tokens.weight"]))]


@pytest.mark.parametrize(
    ("spoil", "version", "outcome"),
    [
        (lambda tensors: tensors[:-1], 2, "refuses after WeightSyncError: weight stream of version 2: missing"),
        (widen_one, 2, "refuses after WeightSyncError: weight stream of version 2: .* must have shape"),
        (add_one, 2, "refuses after WeightSyncError: weight stream of version 2: this model has no tensor"),
        (tie_differently, 2, "refuses after WeightSyncError: .* are one tied tensor, but their values differ"),
        (list, 1, "serves the old version after WeightSyncError: .* asked for version 2, the stream holds 1"),
    ],
)
def test_a_stream_that_does_not_fit_never_makes_a_mixture(
    update: Update, new_weights: Named, spoil: Callable[[Named], Named], version: int, outcome: str
) -> None:
    stream = InProcessStream(spoil(new_weights), version, bucket_bytes=BUCKET_BYTES)
    assert re.match(outcome, update(lambda: nullcontext(stream)))


def test_an_engine_that_loses_a_byte_after_loading_refuses_and_fails_the_sender(
    update: Update, new_weights: Named, address: str
) -> None:
    with (
        SharedMemorySender(address, plan_of(new_weights), deadline_s=30) as sender,
        in_thread(lambda: sender.send(new_weights, 2, 1)) as sent,
    ):
        said = update(lambda: receive(address, 2, 30), flip=True)
    assert said.startswith("refuses after WeightSyncError: the engine holds other bytes than were sent, in bucket")
    assert "rollout-0 gave up: the engine holds other bytes" in str(sent[0])


def give(tensors: Named, fault: str) -> Iterator[tuple[str, Tensor]]:
    yield from tensors[:-3]
    if fault == "the sender dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault:
        raise RuntimeError("out of memory")
    yield from tensors[-3:]


def send_and_die(address: str, tensors: Named, listening: Any) -> None:
    torch.set_num_threads(1)
    with SharedMemorySender(address, plan_of(tensors), deadline_s=30) as sender:
        listening.set()
        sender.send(give(tensors, "the sender dies"), 2, 1)


def test_a_trainer_that_dies_leaves_an_engine_that_refuses(update: Update, new_weights: Named, address: str) -> None:
    listening = FORK.Event()
    trainer = FORK.Process(target=send_and_die, args=(address, new_weights, listening))
    trainer.start()
    try:
        assert listening.wait(20)
        said = update(lambda: receive(address, 2, 30))
    finally:
        trainer.join(20)
    assert trainer.exitcode == -signal.SIGKILL
    assert said.startswith("refuses after WeightSyncError: trainer-0 hung up or died while bucket"), said


def test_a_damaged_file_leaves_an_engine_that_refuses(update: Update, new_weights: Named, tmp_path: Path) -> None:
    written = write_weights(tmp_path, plan_of(new_weights), new_weights, 2)
    with next(written.glob("*.safetensors")).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    said = update(lambda: read_weights(tmp_path, 2, deadline_s=30))
    assert said.startswith("refuses after WeightSyncError: the engine holds other bytes than were sent"), said

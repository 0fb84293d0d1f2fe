"""vLLM's workers as receivers of their own: what they serve and prove, and what one that fails leaves behind.

The group is gloo's, between CPUs. Its sender proves by sums of words, as one of nccl's does between devices.
"""

import asyncio
import time

import pytest
from engine_checks import DEADLINE_S, check_served, config_of, request, run, sending, sending_beside, sync

from offbeat_core import PeerFailedError, WeightSyncError
from offbeat_testing import FakeWeightStream, changed_weights, reference_model, tiny_model

# One worker receives by day, in test_vllm_updates.py.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(DEADLINE_S)]


async def check_two_syncs(engine, model, sender):
    groups = []
    for version in (1, 2):
        sent, held = await sync(engine, sender, changed_weights(model, seed=version), version)
        assert sent == [held] * len(engine.workers), (sent, held)
        groups.append(sender._group.place.group)
        await check_served(engine, model, version)
    assert groups[0] == groups[1], "the second sync makes no group anew"


async def check_sender_beside_each(engine, model, _):
    """Each worker takes the version from a sender of its own, and both prove the whole engine."""
    weights = changed_weights(model, seed=3)
    with sending_beside(model) as first, sending_beside(model) as second:
        sends = [asyncio.to_thread(each.send, weights, 3, 1, deadline_s=60.0) for each in (first, second)]
        addresses = [first.address, second.address]
        held = engine.receive_weights("shared-memory", addresses, 3, 60.0, name="rollout-0")
        *sent, held = await asyncio.gather(*sends, held)
        assert sent == [[held], [held]]
        await check_served(engine, model, 3)
        with pytest.raises(WeightSyncError, match="got 3 addresses for 2 workers"):
            await engine.receive_weights("shared-memory", [*addresses, "@third"], 4, 5.0, name="rollout-0")
    await check_served(engine, model, 3)


async def plant(engine, change):
    """Change something in the worker of rank 1."""

    def in_worker(worker):
        worker = getattr(worker, "worker", worker)
        if worker.rank == 1:
            change(worker, worker.offbeat_side)

    await asyncio.wrap_future(engine._form.run(lambda: engine._form._engine.collective_rpc(in_worker)))


async def check_failing_worker(engine, model, sender):
    """All sides end at once with its name; the engine refuses until a whole update comes, and takes the next."""

    def change(worker, side):
        copy_kept, tensors = side.copy_kept, []

        def fail(is_reused):
            tensors.append(is_reused)
            if len(tensors) == 6:
                side.copy_kept = copy_kept
                raise ValueError("no room")
            copy_kept(is_reused)

        side.copy_kept = fail

    await plant(engine, change)
    weights, begin = changed_weights(model, seed=3), time.monotonic()
    sent, held = await sync(engine, sender, weights, 3)
    assert time.monotonic() - begin < 30  # of 60
    assert str(sent) == "rollout-0.worker-1 gave up: ValueError: no room"
    assert str(held) == "vLLM's worker of rank 1 could not receive: ValueError: no room"
    with pytest.raises(WeightSyncError, match="the update to version 3 failed half way"):
        await engine.generate(request("refused"))
    sent, held = await sync(engine, sender, weights, 3)
    assert sent == [held] * 2, (sent, held)
    await check_served(engine, model, 3)


async def check_spoiled_worker(engine, model, sender):
    """One number of a part that a single worker holds, and one that both hold, is other than what was sent."""
    spoiled = {
        "model.embed_tokens": "the engine holds other bytes than were sent, in bucket 2 of 33",
        "model.norm": "model.norm.weight: workers that hold the same part of it hold different numbers",
    }
    for version, (name, error) in enumerate(spoiled.items(), 4):

        def change(worker, side, name=name):
            check_heads = side.check_heads

            def spoil():
                side.check_heads = check_heads
                worker.model_runner.get_model().get_submodule(name).weight.data.view(-1)[3] += 1

            side.check_heads = spoil

        await plant(engine, change)
        weights = changed_weights(model, seed=version)
        sent, held = await sync(engine, sender, weights, version)
        assert error in str(sent)
        assert str(held).startswith("vLLM's worker of rank 0 could not confirm")
        assert error in str(held)
        with pytest.raises(WeightSyncError, match=f"the update to version {version} failed half way"):
            await engine.generate(request(f"refused{version}"))
        await engine.update_weights(FakeWeightStream(weights, version), version)  # by the engine's own process
        await check_served(engine, model, version)


async def check_unknown_sender(engine, model, sender):
    """Fail before the first tensor has come, which leaves the version that is served."""
    with pytest.raises(WeightSyncError, match="no sender listens at"):
        await engine.receive_weights("nccl", ["@offbeat-none"], 9, 5.0, name="rollout-0")
    await check_served(engine, model, 5)


async def check_killed_worker(engine, model, sender):
    """The trainer's error names it, and the engine is one to be replaced."""

    def change(worker, side):
        import os
        import signal

        side.load_weights = lambda tensors: (next(iter(tensors)), os.kill(os.getpid(), signal.SIGKILL))

    await plant(engine, change)
    begin = time.monotonic()
    sent, held = await sync(engine, sender, changed_weights(model, seed=6), 6)
    assert time.monotonic() - begin < 30  # of 60
    assert str(sent).startswith("rollout-0.worker-1 hung up or died")
    assert isinstance(held, PeerFailedError)
    with pytest.raises(PeerFailedError):
        await engine.generate(request("after"))


def check_engine(folder, *checks, **settings):
    model = reference_model(folder)
    with sending(model) as sender:
        run(config_of(folder, max_running=8, **settings), *checks, given=(model, sender))


def test_two_workers_receive_and_one_that_fails_holds_other_numbers_or_dies_is_named(tmp_path):
    faults = check_failing_worker, check_spoiled_worker, check_unknown_sender, check_killed_worker
    folder = tiny_model(tmp_path / "model", "qwen3", tied=True)
    check_engine(folder, check_two_syncs, check_sender_beside_each, *faults, tensor_parallel=2)


def test_a_worker_of_an_engine_in_processes_of_its_own_receives(tmp_path):
    folder = tiny_model(tmp_path / "model", "qwen3", tied=False)
    check_engine(folder, check_two_syncs, options={"form": "async"})


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_stacks_of_experts_are_received_and_proved_by_their_matrices(tmp_path, tensor_parallel):
    folder = tiny_model(tmp_path / "model", "qwen3_moe")
    check_engine(folder, check_two_syncs, tensor_parallel=tensor_parallel)

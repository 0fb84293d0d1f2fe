"""Five updates, each compared with transformers on the new weights; and what a failed worker leaves behind."""

import asyncio
import os
import signal
import tempfile
from dataclasses import replace

import pytest
from engine_checks import (
    DEADLINE_S,
    SHORT,
    check_served,
    config_of,
    draw_adapter,
    merged,
    request,
    run,
    sending,
    sync,
)

from offbeat_core import LoraAdapter, PeerFailedError
from offbeat_testing import FakeWeightStream, changed_weights, logprob_errors, reference_model, tiny_model
from offbeat_weightsync import (
    BucketPlan,
    DiskSender,
    GroupSender,
    WeightGroup,
    describe_tensors,
    new_address,
    receive,
)

pytestmark = pytest.mark.timeout(DEADLINE_S)  # a first start on a cold machine takes a minute
SMALL_BUCKET_BYTES = 20_000  # several buckets, each half of the arena used again, and one tensor larger than a half
POET = LoraAdapter(name="poet", scale=0.7)


def ask(request_id, **params):
    return request(request_id, num_samples=2, **{"max_tokens": 24, **params})


async def check_five_updates(engine, model):
    for version in range(1, 6):
        stream = FakeWeightStream(changed_weights(model, seed=version), version)
        assert await engine.update_weights(stream, version) == stream.expected()
        for completion in await engine.generate(ask(f"v{version}")):
            assert [segment.version for segment in completion.segments] == [version]
            assert logprob_errors(model, SHORT, completion).max() < 1e-3


async def check_group_and_disk(engine, model):
    """Updates by a group and through a folder are served and proved as others."""
    with tempfile.TemporaryDirectory() as folder:
        ways = {
            6: lambda plan: GroupSender(new_address("127.0.0.1"), plan, deadline_s=60),
            7: lambda plan: DiskSender(new_address("127.0.0.1"), plan, folder, deadline_s=60),
        }
        for version, open_it in ways.items():
            named = changed_weights(model, seed=version)
            with open_it(BucketPlan.build(describe_tensors(named), 1 << 16)) as sender:
                sent = asyncio.create_task(asyncio.to_thread(sender.send, named, version, 1))
                incoming = receive(sender.address, version, 60, group=WeightGroup("cpu"))
                stream = await asyncio.to_thread(incoming.__enter__)
                proof = await engine.update_weights(stream, version)
                await asyncio.to_thread(stream.confirm, proof)
                incoming.__exit__(None, None, None)
                assert await sent == [proof]
            for completion in await engine.generate(ask(f"v{version}")):
                assert [segment.version for segment in completion.segments] == [version]
                assert logprob_errors(model, SHORT, completion).max() < 1e-3


async def check_receiving_worker(engine, model):
    """A worker takes two versions by itself, between those that the engine's process takes."""
    with sending(model) as sender:
        for version in (8, 9):
            sent, held = await sync(engine, sender, changed_weights(model, seed=version), version)
            assert sent == [held], (sent, held)
            await check_served(engine, model, version)


async def shrink_buckets(engine, model):
    engine._loader._bucket_bytes = SMALL_BUCKET_BYTES


def check_engine(folder, *checks, **settings):
    given = (reference_model(folder),)
    run(config_of(folder, max_running=8, **settings), shrink_buckets, *checks, given=given)


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["tied", "untied"])
def test_logprobs_after_five_updates_are_those_of_transformers(tmp_path, tied):
    checks = check_five_updates, check_group_and_disk, check_receiving_worker
    check_engine(tiny_model(tmp_path / "model", "qwen3", tied=tied), *checks)


async def check_three_adapters(engine, model):
    """Each in place of the one before; over parts of every layer at two ranks."""
    await engine.update_weights(FakeWeightStream(changed_weights(model, seed=6), 6), 6)
    for version, rank in ((7, 8), (8, 3), (9, 4)):
        adapter = draw_adapter(model, rank=rank, seed=version)
        stream = FakeWeightStream(list(adapter.items()), version)
        assert await engine.update_weights(stream, version, adapter=POET) == stream.expected()
        with merged(model, adapter, POET.scale):
            for completion in await engine.generate(replace(ask(f"a{version}"), adapter="poet")):
                assert [segment.version for segment in completion.segments] == [version]
                assert logprob_errors(model, SHORT, completion).max() < 1e-3


async def check_stale_replies(engine, model):
    """After an exception at both ranks vLLM has a reply too many; nothing may take it for an answer."""
    with pytest.raises(Exception, match="no_such_method"):
        await asyncio.wrap_future(engine._form.run(lambda: engine._form._engine.collective_rpc("no_such_method")))
    weights = changed_weights(model, seed=9)
    for attempt in range(3):
        with pytest.raises(PeerFailedError):
            await engine.update_weights(FakeWeightStream(weights, 9), 9)
        with pytest.raises(PeerFailedError, match="make a new one"):
            await engine.generate(ask(f"after{attempt}"))
    assert (await engine.health()).version == 5


def test_two_ranks_with_a_tied_head_and_an_engine_whose_workers_raised_is_thrown_away(tmp_path):
    folder = tiny_model(tmp_path / "model", "qwen3", tied=True)
    check_engine(folder, check_five_updates, check_stale_replies, tensor_parallel=2)


async def check_killed_worker(engine, model):
    """A worker that dies ends what is in flight with an error that says so, and closing does not wait for it."""
    task = asyncio.create_task(engine.generate(ask("long", max_tokens=480)))
    while (await engine.health()).num_running == 0:
        await asyncio.sleep(0.01)
    os.kill(engine.workers[1]["pid"], signal.SIGKILL)
    with pytest.raises(PeerFailedError):
        await task
    with pytest.raises(PeerFailedError):
        await engine.generate(ask("after"))


@pytest.mark.nightly
def test_two_ranks_with_an_untied_head_and_an_engine_whose_worker_died_says_so(tmp_path):
    folder = tiny_model(tmp_path / "model", "qwen3", tied=False)
    checks = check_five_updates, check_three_adapters, check_killed_worker
    check_engine(folder, *checks, tensor_parallel=2, options={"enable_lora": True, "max_lora_rank": 8})

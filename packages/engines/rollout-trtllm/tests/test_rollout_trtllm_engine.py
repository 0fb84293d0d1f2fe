"""What the adapter does beyond the contract: sleep by tags, versions, faults of the server, FP8, vision models."""

import asyncio
import functools
import json
import shutil
from contextlib import aclosing, asynccontextmanager

import numpy as np
import pytest
import torch
from trtllm_peers import HostHandles, open_in

from offbeat_core import (
    ConfigError,
    DataError,
    DeadlineError,
    GenerateRequest,
    ModelFolder,
    OffbeatError,
    PeerFailedError,
    RolloutEngineConfig,
    SamplingParams,
    WeightSyncError,
)
from offbeat_rollout_trtllm import TrtllmRolloutEngine
from offbeat_rollout_trtllm._handles import tensors_checksum
from offbeat_rollout_trtllm._requests import to_engine_params
from offbeat_rollout_trtllm._server_link import HttpEngine, ServerLink
from offbeat_rollout_trtllm._versions import find_release
from offbeat_testing import FakeWeightStream, changed_weights, logprob_errors, reference_model, tiny_model
from offbeat_weightsync import dequantize_blocks

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]
PROMPT = np.asarray([10, 44, 81, 7], np.int32)


def request(request_id="r", num_samples=1, **params):
    params = {"max_tokens": 8, "ignore_eos": True, "seed": 1, **params}
    return GenerateRequest(
        request_id=request_id, prompt_ids=PROMPT, num_samples=num_samples, params=SamplingParams(**params)
    )


@pytest.fixture(scope="module")
def weights(folder):
    """Others than the folder's."""
    return changed_weights(reference_model(folder))


@pytest.fixture
def process(folder, start_engine):
    return start_engine(folder)


@pytest.fixture
def open_engine(tmp_path):
    """An engine that speaks to a process."""

    @asynccontextmanager
    async def opened(process, folder, **options):
        options = {"server": process.address, "call_deadline_s": 20.0, **options}
        config = RolloutEngineConfig(model_path=str(folder), max_model_len=256, options=options)
        engine = await TrtllmRolloutEngine.create(config, open_handles=functools.partial(open_in, tmp_path))
        try:
            yield engine
        finally:
            await engine.close()

    return opened


async def test_sleep_and_wake_use_the_release_s_tags(folder, open_engine, process, weights):
    release = find_release("1.2.1")
    async with open_engine(process, folder) as engine:
        await engine.sleep(1)
        with pytest.raises(OffbeatError, match="kv_cache: wake it first"):
            await engine.generate(request())
        await engine.sleep(2)
        await engine.wake(("weights",))
        await engine.wake(("kv_cache",))
        with pytest.raises(WeightSyncError, match="no whole set"):
            await engine.generate(request())
        await engine.update_weights(FakeWeightStream(weights, 3), 3)
        assert (await engine.generate(request()))[0].oldest_version == 3
        with pytest.raises(ConfigError, match="weights and kv_cache"):
            await engine.wake(("optimizer",))
    tags = process.ask("GET", "/standin/record")["tags"]
    assert tags[:4] == [
        ["sleep", *release.cache_tags],
        ["sleep", *release.weight_tags],
        ["wakeup", *release.weight_tags],
        ["wakeup", *release.cache_tags],
    ]


async def test_cached_keys_are_forgotten_when_their_memory_is_taken_again_and_when_weights_change(
    folder, open_engine, process, weights
):
    async with open_engine(process, folder) as engine:
        await engine.sleep(1)
        await engine.wake()
    assert process.ask("GET", "/standin/record")["num_resets"] == 1
    async with open_engine(process, folder) as engine:
        await engine.update_weights(FakeWeightStream(weights, 1), 1)
    assert process.ask("GET", "/standin/record")["num_resets"] == 2


async def test_a_sample_ends_where_the_model_s_length_does(folder, open_engine, process):
    async with open_engine(process, folder) as engine:
        (completion,) = await engine.generate(request(max_tokens=1000))
        assert (len(completion.ids), completion.stop_reason) == (256 - len(PROMPT), "length")


async def test_the_version_is_the_server_s_so_two_clients_agree(folder, open_engine, process, weights):
    async with open_engine(process, folder) as engine:
        await engine.update_weights(FakeWeightStream(weights, 4), 4)
    async with open_engine(process, folder) as engine:
        assert (await engine.generate(request()))[0].oldest_version == 4


async def test_an_update_that_stops_half_way_leaves_the_server_refusing_every_client(
    folder, open_engine, process, weights
):
    async with open_engine(process, folder, bucket_bytes=1 << 14) as engine:
        with pytest.raises(WeightSyncError):
            await engine.update_weights(FakeWeightStream(weights, 1, fail_after=3), 1)
    async with open_engine(process, folder) as engine:
        with pytest.raises(WeightSyncError, match="no whole set"):
            await engine.generate(request())
        await engine.update_weights(FakeWeightStream(weights, 2), 2)
        assert (await engine.generate(request("healed")))[0].oldest_version == 2


async def test_a_server_that_dies_is_named(folder, open_engine, process):
    async with open_engine(process, folder) as engine:
        task = asyncio.create_task(engine.generate(request(max_tokens=200)))
        while not (await engine.health()).num_tokens:
            await asyncio.sleep(0.005)
        process.stop()
        with pytest.raises(PeerFailedError, match=process.address):
            await task
        assert (await engine.health()).num_running == 0


async def until(condition):
    """Wait until the engine says so."""
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.005)


async def test_a_cancelled_call_and_a_client_that_goes_end_at_the_engine_too(folder, open_engine, process):
    http = HttpEngine(process.address, deadline_s=20.0)

    async def num_running():
        return (await http.call("GET", "/standin/record"))["num_running"]

    async def is_idle():
        return await num_running() == 0

    async with open_engine(process, folder) as engine:
        # A whole sample would take 20 s.
        await http.call("POST", "/standin/faults", {"token_delay_s": 0.1})
        task = asyncio.create_task(engine.generate(request(max_tokens=200)))
        await until(num_running)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(until(is_idle), 5)

        params = to_engine_params(SamplingParams(max_tokens=200), seed=0, eos_ids=(), max_tokens=200)
        body = {"sample_id": "gone", "prompt_ids": PROMPT.tolist(), "params": params}
        async with aclosing(http.lines("/offbeat/generate", body)) as lines:
            assert "delta" in await anext(lines)
            assert await num_running() == 1
        await asyncio.wait_for(until(is_idle), 5)


async def test_a_server_that_takes_a_call_and_says_nothing_ends_at_the_deadline():
    silent = await asyncio.start_server(lambda *_: asyncio.sleep(60), "127.0.0.1", 0)
    link = ServerLink(f"127.0.0.1:{silent.sockets[0].getsockname()[1]}", deadline_s=0.5)
    with pytest.raises(DeadlineError, match=r"POST /offbeat/generate: waited 0\.5 s for the TensorRT-LLM server"):
        async for _ in link.stream("1", [1], {}):
            pass
    with pytest.raises(DeadlineError, match="GET /version"):
        await link.version_of_engine()
    silent.close()


async def test_each_flush_is_hashed_once_however_many_workers_open_it(
    folder, start_engine, monkeypatch, open_engine, weights
):
    hashed = []

    def noted(tensors):
        hashed.append(len(tensors))
        return tensors_checksum(tensors)

    monkeypatch.setattr("offbeat_rollout_trtllm._weights.tensors_checksum", noted)
    process = start_engine(folder, num_workers=2)
    async with open_engine(process, folder, bucket_bytes=1 << 14) as engine:
        await engine.update_weights(FakeWeightStream(weights, 1), 1)
    assert 1 < len(hashed) == len(process.ask("GET", "/standin/record")["flushes"]) // 2


async def test_bytes_that_changed_on_their_way_are_not_served(folder, start_engine, open_engine, weights):
    process = start_engine(folder, num_workers=2)
    process.ask("POST", "/standin/faults", {"spoil_flush": 0})
    async with open_engine(process, folder) as engine:
        with pytest.raises(WeightSyncError, match="GPU-standin-1 opened other bytes"):
            await engine.update_weights(FakeWeightStream(weights, 1), 1)
        with pytest.raises(WeightSyncError, match="no whole set"):
            await engine.generate(request())


@pytest.mark.parametrize("ignore_eos", [False, True])
async def test_the_end_of_sequence_is_told_from_a_stop_token(folder, start_engine, tmp_path, ignore_eos, open_engine):
    process, ending = start_engine(folder), tmp_path / "ending"
    shutil.copytree(folder, ending)
    free = []
    async with open_engine(process, folder) as engine:
        free.extend((await engine.generate(request()))[0].ids.tolist())
    (ending / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, free[4]]}))
    async with open_engine(process, ending) as engine:
        (completion,) = await engine.generate(request(ignore_eos=ignore_eos))
        length = free.index(free[4]) + 1
        assert completion.ids.tolist() == (free if ignore_eos else free[:length])
        assert completion.stop_reason == ("length" if ignore_eos else "eos")
        (completion,) = await engine.generate(request("s", ignore_eos=ignore_eos, stop_token_ids=(free[4],)))
        assert (completion.ids.tolist(), completion.stop_reason) == (free[:length], "stop")


@pytest.mark.parametrize("partial", [True, False])
async def test_only_a_vision_model_is_asked_and_goes_whole_if_it_must(
    folder, tmp_path, partial, open_engine, process, weights
):
    seeing = tmp_path / "seeing"
    shutil.copytree(folder, seeing)
    config = json.loads((seeing / "config.json").read_text())
    for has_vision in (False, True):
        process.ask("POST", "/standin/faults", {"partial": partial or not has_vision})
        extra = {"vision_config": {"depth": 1}} if has_vision else {}
        (seeing / "config.json").write_text(json.dumps({**config, **extra}))
        assert ModelFolder(seeing).has_vision == has_vision

        async with open_engine(process, seeing, bucket_bytes=1 << 14) as engine:
            for version in (1, 2):
                await engine.update_weights(FakeWeightStream(weights, version), version)
        record = process.ask("GET", "/standin/record")
        assert record["num_questions"] == (1 if has_vision else 0)
        num_flushes = len(record["flushes"]) // 2
        assert (num_flushes == 1) == (has_vision and not partial)


async def test_fp8_weights_arrive_as_blocks_with_scales(start_engine, tmp_path, open_engine):
    wide = tiny_model(tmp_path / "wide", "qwen3", hidden_size=128)
    process = start_engine(tmp_path / "no-model", weights="fp8_blocks")
    weights = changed_weights(reference_model(wide))
    sent = []

    class Spying(HostHandles):
        def pack(self, tensors):
            sent.extend(tensors)
            return super().pack(tensors)

    async with open_engine(process, wide, weights="fp8_blocks") as engine:
        with pytest.raises(WeightSyncError, match="no whole set"):
            await engine.generate(request())
        engine._loader._open_handles = lambda devices: [Spying(tmp_path, 0)]
        await engine.update_weights(FakeWeightStream(weights, 1), 1)
    held, name = dict(sent), "model.layers.0.mlp.down_proj.weight"
    assert held[name].dtype == torch.float8_e4m3fn
    assert held["model.embed_tokens.weight"].dtype == torch.float32
    error = (dequantize_blocks(held[name], held[f"{name}_scale_inv"]) - dict(weights)[name]).abs().max()
    assert 0 < float(error) < 0.1
    flushed = {each for flush in process.ask("GET", "/standin/record")["flushes"] for each in flush}
    assert {name, f"{name}_scale_inv"} <= flushed


async def test_temperature_1_without_cuts_draws_from_the_whole_distribution(folder, open_engine, process):
    with torch.no_grad():
        wanted = reference_model(folder)(torch.from_numpy(PROMPT.astype(np.int64))[None]).logits[0, -1].softmax(-1)
    rare = set(wanted.argsort()[: len(wanted) // 2].tolist())
    async with open_engine(process, folder) as engine:
        drawn = [int(each.ids[0]) for each in await engine.generate(request(num_samples=200, max_tokens=1))]
        share = sum(token in rare for token in drawn) / len(drawn)
        assert share == pytest.approx(float(wanted[list(rare)].sum()), abs=0.1)


async def test_requests_without_a_seed_differ_on_one_engine_and_from_engine_to_engine(
    folder, start_engine, open_engine
):
    drawn = []

    for _ in range(2):
        async with open_engine(start_engine(folder), folder) as engine:
            for request_id in "ab":
                drawn.extend(tuple(each.ids) for each in await engine.generate(request(request_id, 2, seed=None)))
    assert len(set(drawn)) == 8


async def test_a_request_whose_id_is_in_flight_is_refused_and_the_first_can_still_be_aborted(
    folder, open_engine, process
):
    async with open_engine(process, folder) as engine:
        first = asyncio.create_task(engine.generate(request(max_tokens=200)))
        await until(lambda: num_tokens(engine))
        with pytest.raises(OffbeatError, match="'r' is in flight already"):
            await engine.generate(request())
        await engine.abort("r")
        assert (await first)[0].stop_reason == "aborted"
        assert (await engine.generate(request()))[0].stop_reason == "length"


async def test_clients_of_one_server_abort_their_own_requests_alone(folder, open_engine, process):
    process.ask("POST", "/standin/faults", {"token_delay_s": 0.01})
    async with open_engine(process, folder) as mine:
        theirs = await TrtllmRolloutEngine.create(mine._config)
        long = [asyncio.create_task(each.generate(request(max_tokens=100))) for each in (mine, theirs)]
        await until(lambda: num_tokens(mine))
        await until(lambda: num_tokens(theirs))
        await mine.abort("r")
        assert [(await each)[0].stop_reason for each in long] == ["aborted", "length"]
        await theirs.close()


async def num_tokens(engine):
    return (await engine.health()).num_tokens


async def test_greedy_logprobs_are_those_at_temperature_one(folder, open_engine, process):
    async with open_engine(process, folder) as engine:
        (completion,) = await engine.generate(request(temperature=0.0))
        assert logprob_errors(reference_model(folder), PROMPT, completion).max() < 1e-4


@pytest.mark.parametrize(
    ("params", "error", "text"),
    [
        ({"top_p": 0.9}, ConfigError, "before the cut"),
        ({"top_k": 5}, ConfigError, "allow_cut_sampling"),
        ({"top_k": 2000}, ConfigError, "at most 1024"),
        ({"min_p": 0.1}, ConfigError, "before the cut"),
        ({"max_tokens": 0}, ConfigError, "at least 1"),
    ],
)
async def test_parameters_that_would_sample_something_else_are_refused(
    folder, start_engine, tmp_path, params, error, text, open_engine
):
    async with open_engine(start_engine(tmp_path / "no-model"), folder) as engine:
        with pytest.raises(error, match=text):
            await engine.generate(request(**params))


async def test_prompts_that_cannot_be_are_refused(folder, start_engine, tmp_path, open_engine):
    async with open_engine(start_engine(tmp_path / "no-model"), folder) as engine:
        for ids, text in (([], "at least one"), ([999], "another tokenizer"), ([5] * 256, "max_model_len is 256")):
            with pytest.raises(DataError, match=text):
                await engine.generate(GenerateRequest(request_id="r", prompt_ids=np.asarray(ids, np.int32)))


async def test_cut_sampling_is_allowed_on_request(folder, open_engine, process):
    async with open_engine(process, folder, allow_cut_sampling=True) as engine:
        assert len((await engine.generate(request(top_k=5)))[0].ids) == 8

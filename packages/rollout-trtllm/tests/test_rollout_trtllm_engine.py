"""What the adapter does beyond the contract: sleep by tags, versions, faults of the server, FP8, vision models."""

import asyncio
import functools
import json
import shutil
from contextlib import aclosing

import numpy as np
import pytest
import torch
from trtllm_peers import HostHandles, open_in

from offbeat_rollout_trtllm import ModelFolder, TrtllmRolloutEngine, find_release, is_fp8_weight
from offbeat_rollout_trtllm._handles import tensors_checksum
from offbeat_rollout_trtllm._requests import to_engine_params
from offbeat_rollout_trtllm._server_link import HttpEngine, ServerLink
from offbeat_testing import FakeWeightStream, changed_weights, logprob_errors, reference_model, tiny_model
from offbeat_types import (
    BackendError,
    ConfigError,
    DataError,
    DeadlineError,
    GenerateRequest,
    OffbeatError,
    PeerFailedError,
    RolloutEngineConfig,
    RolloutEngineSettings,
    SamplingParams,
    WeightSyncError,
)
from offbeat_weightsync import TensorSpec, dequantize_blocks

PROMPT = np.asarray([10, 44, 81, 7], np.int32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("trtllm") / "qwen3", "qwen3")


def request(request_id="r", num_samples=1, **params):
    params = {"max_tokens": 8, "ignore_eos": True, "seed": 1, **params}
    return GenerateRequest(
        request_id=request_id, prompt_ids=PROMPT, num_samples=num_samples, params=SamplingParams(**params)
    )


def with_engine(process, folder, tmp_path, check, **options):
    """Run `check` on an engine that speaks to the process."""

    async def bounded():
        config = RolloutEngineConfig(
            model_path=str(folder),
            max_model_len=256,
            options={"server": process.address, "call_deadline_s": 20.0, **options},
        )
        async with asyncio.timeout(60):
            engine = await TrtllmRolloutEngine.create(config, open_handles=functools.partial(open_in, tmp_path))
            try:
                await check(engine)
            finally:
                await engine.close()

    asyncio.run(bounded())


def test_sleep_and_wake_use_the_release_s_tags(folder, start_engine, tmp_path):
    process, release = start_engine(folder), find_release("1.2.1")

    async def check(engine):
        await engine.sleep(1)
        with pytest.raises(OffbeatError, match="kv_cache: wake it first"):
            await engine.generate(request())
        await engine.sleep(2)
        await engine.wake(("weights",))
        await engine.wake(("kv_cache",))
        with pytest.raises(WeightSyncError, match="no whole set"):
            await engine.generate(request())
        await engine.update_weights(FakeWeightStream(changed_weights(reference_model(folder)), 3), 3)
        assert (await engine.generate(request()))[0].oldest_version == 3
        with pytest.raises(ConfigError, match="weights and kv_cache"):
            await engine.wake(("optimizer",))

    with_engine(process, folder, tmp_path, check)
    tags = process.ask("GET", "/standin/record")["tags"]
    assert tags[:4] == [
        ["sleep", *release.cache_tags],
        ["sleep", *release.weight_tags],
        ["wakeup", *release.weight_tags],
        ["wakeup", *release.cache_tags],
    ]


def test_cached_keys_are_forgotten_when_their_memory_is_taken_again_and_when_weights_change(
    folder, start_engine, tmp_path
):
    process = start_engine(folder)

    async def nap(engine):
        await engine.sleep(1)
        await engine.wake()

    async def update(engine):
        await engine.update_weights(FakeWeightStream(changed_weights(reference_model(folder)), 1), 1)

    with_engine(process, folder, tmp_path, nap)
    assert process.ask("GET", "/standin/record")["num_resets"] == 1
    with_engine(process, folder, tmp_path, update)
    assert process.ask("GET", "/standin/record")["num_resets"] == 2


def test_a_sample_ends_where_the_model_s_length_does(folder, start_engine, tmp_path):
    async def check(engine):
        (completion,) = await engine.generate(request(max_tokens=1000))
        assert (len(completion.ids), completion.stop_reason) == (256 - len(PROMPT), "length")

    with_engine(start_engine(folder), folder, tmp_path, check)


def test_the_version_is_the_server_s_so_two_clients_agree(folder, start_engine, tmp_path):
    process = start_engine(folder)

    async def update(engine):
        await engine.update_weights(FakeWeightStream(changed_weights(reference_model(folder)), 4), 4)

    async def look(engine):
        assert (await engine.generate(request()))[0].oldest_version == 4

    with_engine(process, folder, tmp_path, update)
    with_engine(process, folder, tmp_path, look)


def test_an_update_that_stops_half_way_leaves_the_server_refusing_every_client(folder, start_engine, tmp_path):
    process = start_engine(folder)
    weights = changed_weights(reference_model(folder))

    async def fail(engine):
        with pytest.raises(WeightSyncError):
            await engine.update_weights(FakeWeightStream(weights, 1, fail_after=3), 1)

    async def look(engine):
        with pytest.raises(WeightSyncError, match="no whole set"):
            await engine.generate(request())
        await engine.update_weights(FakeWeightStream(weights, 2), 2)
        assert (await engine.generate(request("healed")))[0].oldest_version == 2

    with_engine(process, folder, tmp_path, fail, bucket_bytes=1 << 14)
    with_engine(process, folder, tmp_path, look)


def test_a_server_that_dies_is_named(folder, start_engine, tmp_path):
    process = start_engine(folder)

    async def check(engine):
        task = asyncio.create_task(engine.generate(request(max_tokens=200)))
        while not (await engine.health()).num_tokens:
            await asyncio.sleep(0.005)
        process.stop()
        with pytest.raises(PeerFailedError, match=process.address):
            await task
        assert (await engine.health()).num_running == 0

    with_engine(process, folder, tmp_path, check)


async def until(condition):
    """Wait until the engine says so."""
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.005)


def test_a_cancelled_call_and_a_client_that_goes_end_at_the_engine_too(folder, start_engine, tmp_path):
    process = start_engine(folder)
    http = HttpEngine(process.address, deadline_s=20.0)

    async def num_running():
        return (await http.call("GET", "/standin/record"))["num_running"]

    async def is_idle():
        return await num_running() == 0

    async def check(engine):
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

    with_engine(process, folder, tmp_path, check)


def test_a_server_that_takes_a_call_and_says_nothing_ends_at_the_deadline(folder):
    async def check():
        silent = await asyncio.start_server(lambda *_: asyncio.sleep(60), "127.0.0.1", 0)
        link = ServerLink(f"127.0.0.1:{silent.sockets[0].getsockname()[1]}", deadline_s=0.5)
        with pytest.raises(DeadlineError, match=r"POST /offbeat/generate: waited 0\.5 s for the TensorRT-LLM server"):
            async for _ in link.stream("1", [1], {}):
                pass
        with pytest.raises(DeadlineError, match="GET /version"):
            await link.version_of_engine()
        silent.close()

    asyncio.run(asyncio.wait_for(check(), 20))


def test_each_flush_is_hashed_once_however_many_workers_open_it(folder, start_engine, tmp_path, monkeypatch):
    hashed = []

    def noted(tensors):
        hashed.append(len(tensors))
        return tensors_checksum(tensors)

    monkeypatch.setattr("offbeat_rollout_trtllm._weights.tensors_checksum", noted)
    process = start_engine(folder, num_workers=2)

    async def check(engine):
        await engine.update_weights(FakeWeightStream(changed_weights(reference_model(folder)), 1), 1)

    with_engine(process, folder, tmp_path, check, bucket_bytes=1 << 14)
    assert 1 < len(hashed) == len(process.ask("GET", "/standin/record")["flushes"]) // 2


def test_bytes_that_changed_on_their_way_are_not_served(folder, start_engine, tmp_path):
    process = start_engine(folder, num_workers=2)
    weights = changed_weights(reference_model(folder))

    async def check(engine):
        with pytest.raises(WeightSyncError, match="GPU-standin-1 opened other bytes"):
            await engine.update_weights(FakeWeightStream(weights, 1), 1)
        with pytest.raises(WeightSyncError, match="no whole set"):
            await engine.generate(request())

    process.ask("POST", "/standin/faults", {"spoil_flush": 0})
    with_engine(process, folder, tmp_path, check)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_the_end_of_sequence_is_told_from_a_stop_token(folder, start_engine, tmp_path, ignore_eos):
    process, ending = start_engine(folder), tmp_path / "ending"
    shutil.copytree(folder, ending)
    free = []

    async def sample(engine):
        free.extend((await engine.generate(request()))[0].ids.tolist())

    async def check(engine):
        (completion,) = await engine.generate(request(ignore_eos=ignore_eos))
        length = free.index(free[4]) + 1
        assert completion.ids.tolist() == (free if ignore_eos else free[:length])
        assert completion.stop_reason == ("length" if ignore_eos else "eos")
        (completion,) = await engine.generate(request("s", ignore_eos=ignore_eos, stop_token_ids=(free[4],)))
        assert (completion.ids.tolist(), completion.stop_reason) == (free[:length], "stop")

    with_engine(process, folder, tmp_path, sample)
    (ending / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, free[4]]}))
    with_engine(process, ending, tmp_path, check)


@pytest.mark.parametrize("partial", [True, False])
def test_only_a_vision_model_is_asked_and_goes_whole_if_it_must(folder, start_engine, tmp_path, partial):
    seeing = tmp_path / "seeing"
    shutil.copytree(folder, seeing)
    config = json.loads((seeing / "config.json").read_text())
    process = start_engine(folder)
    for has_vision in (False, True):
        process.ask("POST", "/standin/faults", {"partial": partial or not has_vision})
        extra = {"vision_config": {"depth": 1}} if has_vision else {}
        (seeing / "config.json").write_text(json.dumps({**config, **extra}))
        assert ModelFolder(seeing).has_vision == has_vision

        async def check(engine):
            for version in (1, 2):
                weights = changed_weights(reference_model(folder))
                await engine.update_weights(FakeWeightStream(weights, version), version)

        with_engine(process, seeing, tmp_path, check, bucket_bytes=1 << 14)
        record = process.ask("GET", "/standin/record")
        assert record["num_questions"] == (1 if has_vision else 0)
        num_flushes = len(record["flushes"]) // 2
        assert (num_flushes == 1) == (has_vision and not partial)


def test_fp8_weights_arrive_as_blocks_with_scales(folder, start_engine, tmp_path):
    wide = tiny_model(tmp_path / "wide", "qwen3", hidden_size=128)
    process = start_engine(tmp_path / "no-model", weights="fp8_blocks")
    weights = changed_weights(reference_model(wide))
    sent = []

    class Spying(HostHandles):
        def pack(self, tensors):
            sent.extend(tensors)
            return super().pack(tensors)

    async def check(engine):
        with pytest.raises(WeightSyncError, match="no whole set"):
            await engine.generate(request())
        engine._loader._open_handles = lambda devices: [Spying(tmp_path, 0)]
        await engine.update_weights(FakeWeightStream(weights, 1), 1)

    with_engine(process, wide, tmp_path, check, weights="fp8_blocks")
    held, name = dict(sent), "model.layers.0.mlp.down_proj.weight"
    assert held[name].dtype == torch.float8_e4m3fn
    assert held["model.embed_tokens.weight"].dtype == torch.float32
    error = (dequantize_blocks(held[name], held[f"{name}_scale_inv"]) - dict(weights)[name]).abs().max()
    assert 0 < float(error) < 0.1
    flushed = {each for flush in process.ask("GET", "/standin/record")["flushes"] for each in flush}
    assert {name, f"{name}_scale_inv"} <= flushed


def test_routers_tables_and_vision_models_stay_out_of_fp8(folder, tmp_path):
    layer = "model.layers.0.mlp."
    names = {"down_proj.weight": True, "gate_proj.weight": True, "experts.3.up_proj.weight": True, "gate.weight": False}
    assert {name: is_fp8_weight(TensorSpec(layer + name, "bfloat16", (256, 512))) for name in names} == names
    assert not is_fp8_weight(TensorSpec("lm_head.weight", "bfloat16", (256, 512)))
    seeing = tmp_path / "seeing"
    shutil.copytree(folder, seeing)
    config = json.loads((seeing / "config.json").read_text())
    (seeing / "config.json").write_text(json.dumps({**config, "vision_config": {}}))
    with pytest.raises(ConfigError, match="language alone"):
        TrtllmRolloutEngine(
            RolloutEngineConfig(model_path=str(seeing), options={"weights": "fp8_blocks"}),
            ServerLink("127.0.0.1:9", deadline_s=1),
            find_release("1.2.0"),
            functools.partial(open_in, tmp_path),
        )


def test_temperature_1_without_cuts_draws_from_the_whole_distribution(folder, start_engine, tmp_path):
    with torch.no_grad():
        wanted = reference_model(folder)(torch.from_numpy(PROMPT.astype(np.int64))[None]).logits[0, -1].softmax(-1)
    rare = set(wanted.argsort()[: len(wanted) // 2].tolist())

    async def check(engine):
        drawn = [int(each.ids[0]) for each in await engine.generate(request(num_samples=200, max_tokens=1))]
        share = sum(token in rare for token in drawn) / len(drawn)
        assert share == pytest.approx(float(wanted[list(rare)].sum()), abs=0.1)

    with_engine(start_engine(folder), folder, tmp_path, check)


def test_requests_without_a_seed_differ_on_one_engine_and_from_engine_to_engine(folder, start_engine, tmp_path):
    drawn = []

    async def check(engine):
        for request_id in "ab":
            drawn.extend(tuple(each.ids) for each in await engine.generate(request(request_id, 2, seed=None)))

    for _ in range(2):
        with_engine(start_engine(folder), folder, tmp_path, check)
    assert len(set(drawn)) == 8


def test_a_request_whose_id_is_in_flight_is_refused_and_the_first_can_still_be_aborted(folder, start_engine, tmp_path):
    async def check(engine):
        first = asyncio.create_task(engine.generate(request(max_tokens=200)))
        await until(lambda: num_tokens(engine))
        with pytest.raises(OffbeatError, match="'r' is in flight already"):
            await engine.generate(request())
        await engine.abort("r")
        assert (await first)[0].stop_reason == "aborted"
        assert (await engine.generate(request()))[0].stop_reason == "length"

    with_engine(start_engine(folder), folder, tmp_path, check)


def test_clients_of_one_server_abort_their_own_requests_alone(folder, start_engine, tmp_path):
    process = start_engine(folder)
    process.ask("POST", "/standin/faults", {"token_delay_s": 0.01})

    async def check(mine):
        theirs = await TrtllmRolloutEngine.create(mine._config)
        long = [asyncio.create_task(each.generate(request(max_tokens=100))) for each in (mine, theirs)]
        await until(lambda: num_tokens(mine))
        await until(lambda: num_tokens(theirs))
        await mine.abort("r")
        assert [(await each)[0].stop_reason for each in long] == ["aborted", "length"]
        await theirs.close()

    with_engine(process, folder, tmp_path, check)


async def num_tokens(engine):
    return (await engine.health()).num_tokens


def test_greedy_logprobs_are_those_at_temperature_one(folder, start_engine, tmp_path):
    async def check(engine):
        (completion,) = await engine.generate(request(temperature=0.0))
        assert logprob_errors(reference_model(folder), PROMPT, completion).max() < 1e-4

    with_engine(start_engine(folder), folder, tmp_path, check)


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
def test_parameters_that_would_sample_something_else_are_refused(folder, start_engine, tmp_path, params, error, text):
    async def check(engine):
        with pytest.raises(error, match=text):
            await engine.generate(request(**params))

    with_engine(start_engine(tmp_path / "no-model"), folder, tmp_path, check)


def test_prompts_that_cannot_be_are_refused(folder, start_engine, tmp_path):
    async def check(engine):
        for ids, text in (([], "at least one"), ([999], "another tokenizer"), ([5] * 256, "max_model_len is 256")):
            with pytest.raises(DataError, match=text):
                await engine.generate(GenerateRequest(request_id="r", prompt_ids=np.asarray(ids, np.int32)))

    with_engine(start_engine(tmp_path / "no-model"), folder, tmp_path, check)


def test_cut_sampling_is_allowed_on_request(folder, start_engine, tmp_path):
    async def check(engine):
        assert len((await engine.generate(request(top_k=5)))[0].ids) == 8

    with_engine(start_engine(folder), folder, tmp_path, check, allow_cut_sampling=True)


def test_no_server_is_named_at_start(folder, tmp_path):
    config = RolloutEngineConfig(model_path=str(folder), options={"server": "127.0.0.1:9"})
    with pytest.raises(PeerFailedError, match=r"127\.0\.0\.1:9"):
        asyncio.run(TrtllmRolloutEngine.create(config))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sever": "x"}, "no option 'sever'"),
        ({"server": "somewhere"}, "host:port"),
        ({"weights": "fp4"}, "as_stored, fp8_blocks"),
        ({"bucket_bytes": 0}, ">= 64"),
        ({"reuse_blocks": 1}, "must be bool"),
    ],
)
def test_options_that_cannot_be_are_refused(folder, options, text):
    config = RolloutEngineConfig(model_path=str(folder), options=options)
    with pytest.raises(ConfigError, match=text):
        asyncio.run(TrtllmRolloutEngine.create(config))


def test_without_tensorrt_llm_the_error_says_where_it_runs(folder):
    with pytest.raises(BackendError, match="container"):
        asyncio.run(TrtllmRolloutEngine.create(RolloutEngineConfig(model_path=str(folder))))


@pytest.mark.parametrize("version", ["1.2.0", "1.2.1", "1.2.3.post1"])
def test_listed_versions_are_taken(version):
    assert find_release(version).series == "1.2"


@pytest.mark.parametrize("version", ["1.1.0", "1.3.0", "1.2.0rc6", "1.20.0", "", "nightly"])
def test_versions_that_are_not_listed_are_refused_or_tried_on_request(version):
    with pytest.raises(BackendError, match=r"1\.2\.x"):
        find_release(version)
    assert find_release(version, allow_unlisted=True).series == "1.2"


def test_what_is_not_installed_is_said_with_what_is_possible_all_the_same():
    with pytest.raises(BackendError, match=r"options\.server alone; it comes with NVIDIA's"):
        TrtllmRolloutEngine.check_installed()


def test_a_plan_without_a_server_is_refused_where_torch_is_another_than_the_engine_s(monkeypatch):
    settings = RolloutEngineSettings(options={"kv_cache_fraction": 0.5})
    with pytest.raises(ConfigError, match=r"rollout\.options\.server must .* pins torch 2\.9 and here is torch 2\.1"):
        TrtllmRolloutEngine.notices_of(settings)
    for options in ({"server": "127.0.0.1:8000"}, {"allow_unlisted_version": True}):
        assert TrtllmRolloutEngine.notices_of(RolloutEngineSettings(options=options)) == []
    monkeypatch.setattr("offbeat_rollout_trtllm._versions.metadata.version", lambda name: "2.9.1+cu130")
    assert TrtllmRolloutEngine.notices_of(settings) == []

"""Points of vLLM's passes: those of transformers, by the same names; and fingerprints of what it serves."""

import asyncio

import numpy as np
import pytest
import torch
from engine_checks import DEADLINE_S, config_of, draw_adapter, merged, request, run, until_running
from tiny_families import write_tiny_family

from offbeat_core import LAYER_POINTS, LOGPROB, DataError, LoraAdapter, OffbeatError, fingerprint
from offbeat_testing import FakeWeightStream, changed_weights, reference_model, tiny_model, tiny_tokenizer
from offbeat_training import record_points

pytestmark = pytest.mark.timeout(DEADLINE_S)
UNSEEN = {"query projection", "key projection", "value projection", "query", "key"}
"""Points that transformers' model may hide: it has one projection for three, or attends in code of its own."""
SHARED = {"attention input", "after attention", "mlp input", "experts"}
"""Points within a layer that each of several ranks has whole."""


def ids_of(num_tokens):
    return np.random.default_rng(7).integers(3, 300, num_tokens).astype(np.int32)


def points_of(model, ids, layer, temperature=1.0):
    """Values of transformers in float32, as arrays."""
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    places = torch.arange(len(ids))[None]
    with torch.no_grad(), record_points(model, layer) as found:
        logits = model(torch.from_numpy(ids).long()[None], use_cache=False, position_ids=places).logits[0]
    scores = (logits / temperature).log_softmax(-1)[:-1].gather(-1, torch.from_numpy(ids[1:, None]).long())
    return {**{point: values.numpy() for point, values in found.items()}, LOGPROB: np.append([[0]], scores, 0)}


async def check_points(engine, model, *, num_tokens=41, points=None, **words):
    """Compare every layer; the last token may be left out."""
    ids = ids_of(num_tokens)
    for layer in (None, *range(model.config.num_hidden_layers)):
        found, wanted = await engine.inspect(ids, layer, **words), points_of(model, ids, layer)
        expected = {*wanted} if points is None or layer is None else {*wanted} & {*points, LOGPROB}
        assert expected <= {*found} <= expected | (UNSEEN if points is None else set())
        for point, values in [(point, found[point]) for point in expected]:
            assert len(values) in (num_tokens - 1, num_tokens), point
            assert np.abs(values - wanted[point][: len(values)]).max() < 1e-4, (layer, point)
        assert len(found[LOGPROB]) == num_tokens


async def check_fingerprints(engine, model):
    held = dict(model.named_parameters())
    found = await engine.fingerprints([*held, "lm_head.weight", "model.layers.0.none.weight"])
    assert {*found} == {*held, "lm_head.weight"}
    head = model.lm_head.weight
    for name, tensor in {**held, "lm_head.weight": head}.items():
        assert np.array_equal(found[name], fingerprint(tensor.detach().numpy())), name


async def check_chunks(engine, model):
    """Three chunks of one sequence, which a cache holds already: it is computed anew all the same."""
    prompt = ids_of(300)
    await engine.generate(request("cached", prompt))
    await check_points(engine, model, num_tokens=300)


async def check_update(engine, model):
    named = changed_weights(model, seed=1)
    await engine.update_weights(FakeWeightStream(named, 1), 1)
    await check_points(engine, model)
    await check_fingerprints(engine, model)


async def check_temperature(engine, model):
    ids = ids_of(20)
    found = (await engine.inspect(ids, 0, temperature=0.7))[LOGPROB]
    assert np.abs(found - points_of(model, ids, 0, 0.7)[LOGPROB]).max() < 1e-4


async def check_order_and_lengths(engine, _):
    assert [*await engine.inspect(ids_of(9), 1)][:-1] == [point for point in LAYER_POINTS if point != "experts"]
    assert len((await engine.inspect(ids_of(1)))[LOGPROB]) == 1
    assert len((await engine.inspect(ids_of(512)))[LOGPROB]) == 512
    with pytest.raises(DataError, match="512"):
        await engine.inspect(ids_of(514))
    with pytest.raises(DataError, match="layers 0 to 1"):
        await engine.inspect(ids_of(5), 2)


async def check_in_flight(engine, model):
    """Not beside samples; and what it has watched is left alone: the same is sampled as before."""
    before = await engine.generate(request("before"))
    sampling = asyncio.ensure_future(engine.generate(request("long", max_tokens=400)))
    await until_running(engine, 1)
    with pytest.raises(OffbeatError, match="in flight"):
        await engine.inspect(ids_of(9))
    await engine.abort("long")
    await sampling
    await check_points(engine, model)
    after = await engine.generate(request("after"))
    assert np.array_equal(before[0].ids, after[0].ids)


async def check_asleep(engine, model):
    await engine.sleep(1)
    with pytest.raises(OffbeatError, match="sleeps without weights"):
        await engine.fingerprints(["model.norm.weight"])
    await engine.wake()
    await check_fingerprints(engine, model)


async def check_adapter(engine, model):
    """Also with room for adapters, for which vLLM's own log-probabilities of prompts end its worker."""
    adapter = draw_adapter(model, seed=3)
    lora = LoraAdapter(name="a", scale=2.0)
    await engine.update_weights(FakeWeightStream(list(adapter.items()), 1), 1, adapter=lora)
    await check_points(engine, model)
    with merged(model, adapter, lora.scale) as changed:
        await check_points(engine, changed, adapter="a")


def check_engine(folder, *checks, **settings):
    run(config_of(folder, **settings), *checks, given=(reference_model(folder),))


def test_every_point_has_the_values_of_transformers(tmp_path):
    checks = check_points, check_fingerprints, check_chunks, check_temperature, check_order_and_lengths
    folder = tiny_model(tmp_path / "model", "qwen3", spread=0.2)
    check_engine(folder, *checks, check_in_flight, check_update, check_asleep, options={"max_num_batched_tokens": 128})


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_other_families_have_these_points_too(family, tmp_path):
    narrow = {"head_dim": 32}  # vLLM's attention on a CPU takes no narrower heads
    check_engine(tiny_model(tmp_path / "model", family, spread=0.2, config=narrow), check_points, check_update)


def test_an_adapter_is_seen_at_work(tmp_path):
    options = {"enable_lora": True, "max_lora_rank": 8}
    check_engine(tiny_model(tmp_path / "model", spread=0.2), check_adapter, options=options)


async def check_shared(engine, model):
    await check_points(engine, model, points=SHARED)
    await check_fingerprints(engine, model)


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_two_ranks_have_what_is_whole(family, tmp_path):
    check_engine(tiny_model(tmp_path / "model", family, spread=0.2), check_shared, tensor_parallel=2)


@pytest.mark.nightly
def test_an_engine_in_its_own_processes_has_them_too(tmp_path):
    folder = tiny_model(tmp_path / "model", spread=0.2)
    checks = check_points, check_fingerprints, check_chunks
    check_engine(folder, *checks, options={"form": "async", "max_num_batched_tokens": 128})


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["gemma3_text", "glm4_moe", "gpt_oss", "mistral", "phi3", "qwen2_moe"])
def test_families_with_parts_of_their_own_have_every_point(family, tmp_path):
    write_tiny_family(family, tmp_path, vocab_size=320, hidden_size=128, head_dim=32, v_head_dim=32)
    tiny_tokenizer(tmp_path)
    check_engine(tmp_path, check_points, max_running=4, max_model_len=256)

"""Points of a forward pass: those of transformers, by the same names, whatever the engine makes of the layout."""

import asyncio

import numpy as np
import pytest
import torch

from offbeat_core import LAYER_POINTS, LOGPROB, DataError, RolloutEngineConfig, fingerprint, layer_point
from offbeat_rollout_torch import TorchRolloutEngine
from offbeat_testing import reference_model, tiny_model
from offbeat_training import record_points

FAMILIES = {"qwen3": 2, "qwen2": 2, "llama": 2, "qwen3_moe": 2, "qwen3_5_text": 3}


def ids_of(num_tokens):
    return np.random.default_rng(7).integers(3, 300, num_tokens).astype(np.int32)


def ask(folder, *calls, **options):
    """Answers of one engine to several calls."""

    async def run():
        config = RolloutEngineConfig(model_path=str(folder), max_model_len=128, num_threads=1, options=options)
        engine = await TorchRolloutEngine.create(config)
        try:
            return [await call(engine) for call in calls]
        finally:
            await engine.close()

    return asyncio.run(run())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_point_has_the_values_of_transformers(tmp_path, family):
    """In chunks of 16 tokens, too: a sequence is whole again afterwards."""
    folder = tiny_model(tmp_path, family, num_layers=FAMILIES[family])
    model, ids = reference_model(folder), ids_of(41)
    layers = [None, *range(FAMILIES[family])]
    model.set_attn_implementation("sdpa")
    wanted = []
    for layer in layers:
        with torch.no_grad(), record_points(model, layer) as found:
            logits = model(torch.from_numpy(ids).long()[None], use_cache=False, position_ids=torch.arange(41)[None])
        wanted.append(found)
    calls = [lambda engine, layer=layer: engine.inspect(ids, layer) for layer in layers]
    for found, expected in zip(ask(folder, *calls, max_prefill_tokens=16), wanted, strict=True):
        # A hybrid's projections come with gates between their heads.
        left_out = {point for point in expected if point.endswith("projection")} if family == "qwen3_5_text" else set()
        assert {*found} == {*expected, LOGPROB} - left_out
        for point in {*expected} - left_out:
            assert np.abs(found[point] - expected[point].numpy()).max() < 1e-4, point
        logprobs = logits.logits[0].log_softmax(-1)[:-1].gather(-1, torch.from_numpy(ids[1:, None]).long())
        assert np.abs(found[LOGPROB][1:] - logprobs.numpy()).max() < 1e-4


def test_points_come_in_the_order_of_computation(tmp_path):
    folder = tiny_model(tmp_path, "qwen3", num_layers=2)
    model = reference_model(folder)
    model.set_attn_implementation("sdpa")
    ids = ids_of(9)
    with torch.no_grad(), record_points(model, 1) as found:
        model(torch.from_numpy(ids).long()[None], use_cache=False)
    [inner, outer] = ask(folder, lambda engine: engine.inspect(ids, 1), lambda engine: engine.inspect(ids))
    assert [*inner][:-1] == [*found] == [point for point in LAYER_POINTS if point != "experts"]
    assert [*outer] == ["token ids", "positions", "embedding", layer_point(0), layer_point(1), "final norm", LOGPROB]


def test_a_fingerprint_is_that_of_the_tensor_of_this_name(tmp_path):
    folder = tiny_model(tmp_path, "qwen3_moe", num_layers=1)
    held = dict(reference_model(folder).named_parameters())
    names = [*held, "lm_head.weight", "model.layers.0.none.weight"]
    [found] = ask(folder, lambda engine: engine.fingerprints(names))
    assert set(held) <= set(found)
    assert "model.layers.0.none.weight" not in found
    for name, tensor in held.items():
        assert np.array_equal(found[name], fingerprint(tensor.detach().numpy())), name


def test_a_changed_element_changes_the_fingerprint():
    values = np.random.default_rng(0).standard_normal((300, 200)).astype(np.float32)
    other = values.copy()
    other[17, 3] += 1e-3
    assert not np.array_equal(fingerprint(values), fingerprint(other))
    assert not np.array_equal(fingerprint(values), fingerprint(values[::-1]))


def test_what_the_engine_cannot_look_at_is_refused(tmp_path):
    folder = tiny_model(tmp_path, "qwen3", num_layers=1)
    with pytest.raises(DataError, match="takes 1 to 127 tokens"):
        ask(folder, lambda engine: engine.inspect(ids_of(128)))
    with pytest.raises(DataError, match="has layers 0 to 0"):
        ask(folder, lambda engine: engine.inspect(ids_of(3), 1))

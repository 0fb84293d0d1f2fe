"""Completions say the experts that transformers' routers choose, each token's by the version that drew the next."""

import asyncio

import numpy as np
import pytest
import torch

from offbeat_core import ConfigError, GenerateRequest, SamplingParams
from offbeat_testing import FakeWeightStream, reference_model, tiny_model

pytestmark = pytest.mark.asyncio

SHORT, LONG = np.arange(5, 45, dtype=np.int32), (np.arange(200) % 97 + 5).astype(np.int32)
CONFIG = {"num_experts": 6, "num_experts_per_tok": 2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two versions of one model."""
    root = tmp_path_factory.mktemp("routes")
    return [tiny_model(root / str(seed), "qwen3_moe", seed=seed, config=CONFIG) for seed in (0, 1)]


@torch.no_grad()
def chosen(folder, ids):
    """[T, L, K] what the routers of transformers choose, each token's experts sorted."""
    model, found = reference_model(folder), []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, out: found.append(out[2]))
    model(torch.as_tensor(ids)[None].long())
    return torch.stack(found, 1).sort(-1).values.numpy()


def said(completion):
    return np.sort(completion.routes.unpack(), -1)


def request(prompt, num_samples=3, max_tokens=20, name="r"):
    params = SamplingParams(max_tokens=max_tokens, seed=3, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt_ids=prompt, num_samples=num_samples, params=params)


@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["copied", "shared"])
@pytest.mark.parametrize("max_prefill_tokens", [2048, 64])
async def test_a_completion_says_the_experts_of_prompt_and_completion(folders, prompt, max_prefill_tokens, run):
    options = {"max_prefill_tokens": max_prefill_tokens}
    completions = await run(folders[0], lambda it: it.generate(request(prompt)), return_routes=True, options=options)
    for completion in completions:
        wanted = chosen(folders[0], np.concatenate([prompt, completion.ids]))
        wanted[-1] = -1  # the last token is never computed
        np.testing.assert_array_equal(said(completion), wanted)


async def test_what_is_drawn_after_an_update_has_the_routes_of_its_version_and_what_was_keeps_its_own(
    folders, open_engine
):
    weights = dict(reference_model(folders[1]).state_dict())
    async with open_engine(folders[0], return_routes=True, max_model_len=4096) as engine:
        sampling = asyncio.create_task(engine.generate(request(SHORT, max_tokens=600)))
        while (await engine.health()).num_tokens < 60:
            await asyncio.sleep(0.01)
        await engine.pause("keep")
        await engine.update_weights(FakeWeightStream(weights.items(), 1), 1)
        await engine.resume()
        completions = await sampling
    for completion in completions:
        old, new = completion.segments
        ids = np.concatenate([SHORT, completion.ids])
        first_new = len(SHORT) + old.num_tokens
        wanted = np.concatenate([chosen(folders[0], ids)[: first_new - 1], chosen(folders[1], ids)[first_new - 1 :]])
        wanted[-1] = -1
        assert new.num_tokens > 1
        # Rounding decides between experts of nearly equal scores, for 3 of 2560 numbers here.
        assert np.mean(said(completion) != wanted) < 0.005
        assert np.mean(chosen(folders[0], ids) != chosen(folders[1], ids)) > 0.5


async def test_tokens_whose_keys_were_kept_from_an_earlier_turn_have_no_route(folders, open_engine):
    async with open_engine(folders[0], return_routes=True) as engine:
        [first] = await engine.generate(request(LONG, 1))
        context = np.concatenate([LONG, first.ids, SHORT])
        [second] = await engine.generate(request(context, 1, name="s"))
    wanted = chosen(folders[0], np.concatenate([context, second.ids]))
    known = said(second)[:, 0, 0] >= 0
    kept = len(LONG) + len(first.ids) - 1
    assert known.tolist() == [False] * kept + [True] * (len(wanted) - kept - 1) + [False]
    np.testing.assert_array_equal(said(second)[known], wanted[known])


async def test_each_form_of_an_update_writes_the_same_experts_and_is_proved(folders, open_engine):
    stacked = dict(reference_model(folders[1]).state_dict())
    apart = {}
    for name, tensor in stacked.items():
        stem, _, kind = name.rpartition(".")
        if kind not in ("gate_up_proj", "down_proj"):
            apart[name] = tensor
            continue
        for number, part in enumerate(tensor):
            halves = zip(("gate", "up"), part.chunk(2), strict=True) if kind == "gate_up_proj" else [("down", part)]
            apart |= {f"{stem}.{number}.{half}_proj.weight": each.contiguous() for half, each in halves}
    found = []
    async with open_engine(folders[0], return_routes=True) as engine:
        for version, weights in enumerate([stacked, apart], 1):
            stream = FakeWeightStream(weights.items(), version)
            assert await engine.update_weights(stream, version) == stream.expected()
            [completion] = await engine.generate(request(SHORT, 1, name=str(version)))
            found.append(said(completion))
            wanted = chosen(folders[1], np.concatenate([SHORT, completion.ids]))[:-1]
            np.testing.assert_array_equal(found[-1][:-1], wanted)


async def test_routes_come_only_where_they_are_asked_for_and_there_are_some(folders, run, tmp_path):
    [completion] = await run(folders[0], lambda engine: engine.generate(request(SHORT, 1)))
    assert completion.routes is None
    dense = tiny_model(tmp_path / "dense", "qwen3")
    [completion] = await run(dense, lambda engine: engine.generate(request(SHORT, 1)), return_routes=True)
    assert completion.routes is None
    with pytest.raises(ConfigError, match="static_rows compute no mixtures"):
        await run(folders[0], lambda engine: engine.generate(request(SHORT, 1)), options={"static_rows": True})

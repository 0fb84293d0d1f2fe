"""Routers take the experts that sequences say, in every layout: held against engine-torch in one process."""

from dataclasses import replace

import numpy as np
import pytest
from megatron_layouts import Layout, copied, engine_config, params_of
from megatron_yardstick import make_sequences, per_expert, policy_loss

from offbeat_core import ModelError, Routes
from offbeat_engine_torch import TorchTrainEngine

TOLERANCE = 1e-5
CHOSEN = {"qwen3-moe": (4, 2), "glm4-moe": (8, 4)}
"""Experts of each model, and how many a token takes."""
LAYOUTS = [
    *(Layout(model=model, axes={}) for model in CHOSEN),
    *(Layout(model="qwen3-moe", axes=axes) for axes in ({"tp": 2}, {"dp": 2, "ep": 2}, {"cp": 2}, {"pp": 2})),
    Layout(model="qwen3-moe", axes={"pp": 2}, recompute=True),
    Layout(model="glm4-moe", axes={"pp": 2, "dp": 2, "ep": 2}, options={"virtual_pipeline": 2}, recompute=True),
    Layout(model="glm4-moe", axes={"tp": 2, "cp": 2, "pp": 2, "ep": 4}, recompute=True),
]
IN_CI = [LAYOUTS[1], LAYOUTS[2], LAYOUTS[4], LAYOUTS[6]]


def routed(seed, model, *, unknown=0.3):
    """Sequences with random routes, of the first half twice, and without a route for some tokens."""
    num_experts, chosen = CHOSEN[model]
    rng, found = np.random.default_rng(seed), []
    for sequence in make_sequences(seed):
        length = len(sequence.ids)
        ids_TLK = rng.random((length, 4, num_experts)).argsort(-1)[..., :chosen]
        ids_TLK[rng.random(length) < unknown] = -1
        found.append(replace(sequence, routes=(Routes.pack(ids_TLK[: length // 2]), Routes.pack(ids_TLK))))
    return found


def replay(engine, model):
    """Losses and norms of two steps with routes, then weights, and log-probabilities with routes and of the reference.

    The reference chooses itself.
    """
    values = []
    for step in range(2):
        values.append(engine.forward_backward(routed(step, model), policy_loss)["loss"].value)
        values.append(engine.step()["grad_norm"].value)
    logprobs = engine.logprobs(routed(9, model)) + engine.logprobs(routed(9, model), reference=True)
    return values, per_expert(copied(engine)), logprobs


@pytest.fixture(scope="session")
def replayed(models):
    """Results of engine-torch for each model, made once."""
    known = {}

    def get(model):
        if model not in known:
            engine = TorchTrainEngine.create(engine_config(models[model], Layout(model=model)))
            assert engine.replay_problem == ""
            known[model] = replay(engine, model)
            engine.close()
        return known[model]

    return get


@pytest.fixture
def wanted(request, replayed):
    return replayed(request.getfixturevalue("layout").model)


@pytest.mark.parametrize("layout", params_of(LAYOUTS, IN_CI))
def test_replayed_routes_give_what_they_give_in_engine_torch(create, layout, mesh, wanted):
    engine = create(layout, mesh)
    assert engine.replay_problem == ""
    values, weights, logprobs = replay(engine, layout.model)
    np.testing.assert_allclose(values, wanted[0], rtol=TOLERANCE, atol=TOLERANCE)
    for found, each in zip(logprobs, wanted[2], strict=True):
        np.testing.assert_allclose(found, each, atol=TOLERANCE)
    for name, each in wanted[1].items():
        assert (weights[name] - each).abs().max() < TOLERANCE * each.abs().max(), name


def test_replay_changes_what_tokens_take(create):
    """The comparison above is not blind: with routes the answers are others, and without they are as ever."""
    engine = create(Layout(model="qwen3-moe"))
    plain = make_sequences(3)
    before = engine.logprobs(plain)
    with_routes = engine.logprobs(routed(3, "qwen3-moe"))
    unknown = engine.logprobs(routed(3, "qwen3-moe", unknown=1.1))
    after = engine.logprobs(plain)
    assert max(np.abs(one - other).max() for one, other in zip(before, with_routes, strict=True)) > 0.01
    for one, other, again in zip(before, unknown, after, strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(one, again)


def test_routes_of_another_model_are_refused(create):
    sequence, engine = make_sequences(0)[0], create(Layout(model="qwen3-moe"))

    def with_routes(*shape):
        return [replace(sequence, routes=(Routes.pack(np.zeros((len(sequence.ids), *shape), int)),))]

    for shape in ((3, 2), (4, 1)):
        with pytest.raises(ModelError, match=f"got {shape[0]} layers with {shape[1]} experts"):
            engine.logprobs(with_routes(*shape))
    routes = Routes.pack(np.full((len(sequence.ids), 4, 2), 4))
    with pytest.raises(ModelError, match="numbered up to 4"):
        engine.logprobs([replace(sequence, routes=(routes,))])
    dense = create()
    assert dense.replay_problem == "the model has no experts"
    with pytest.raises(ModelError, match="has no experts"):
        dense.logprobs(with_routes(4, 2))

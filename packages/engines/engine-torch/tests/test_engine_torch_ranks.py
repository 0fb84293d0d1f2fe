"""Several ranks train as one process does: real processes, gloo, every family and mesh."""

import dataclasses

import numpy as np
import pytest
import torch

from offbeat_core import (
    ConfigError,
    Metric,
    MismatchError,
    ModelError,
    OffbeatError,
    PeerFailedError,
    TrainEngineConfig,
    TrainSequence,
)
from offbeat_engine_torch import TorchTrainEngine
from offbeat_mesh import Mesh
from offbeat_testing import tiny_model

FAMILIES = [("qwen3", True), ("qwen3", False), ("qwen2", True), ("llama", False)]
BUDGET_TOKENS = 48


def config(folder, **changes):
    # A large epsilon: Adam's first steps are nearly the sign of the gradient, which rounding alone may turn where the
    # gradient is almost zero.
    settings = {"learning_rate": 1e-3, "adam_eps": 1e-5, "max_tokens_per_microbatch": BUDGET_TOKENS, "device": "cpu"}
    return TrainEngineConfig(model_path=str(folder), **settings | changes)


def three_steps(engine, make_groups, loss):
    """What one update after another returns, the weights after three, and log-probabilities of both policies."""
    reported = []
    for seed in range(3):
        metrics = engine.forward_backward(make_groups(seed=seed), loss)
        reported += [metrics["loss"].value, metrics["weight"].value, engine.step()["grad_norm"].value]
    weights = {name: tensor.clone() for name, tensor in engine.weights()}
    asked = make_groups(seed=9)
    return reported, weights, engine.logprobs(asked), engine.logprobs(asked, reference=True)


def weighted(tokens):
    """A policy gradient with a metric that is a mean over tokens."""
    loss = -(tokens.logprobs_N * tokens.extras["advantage"]).sum() / tokens.total_tokens
    mean = Metric(value=float(tokens.extras["advantage"].mean()), weight=len(tokens.logprobs_N))
    return loss, {"weight": mean}


def assert_same(many, one, tolerance=1e-5):
    np.testing.assert_allclose(many[0], one[0], rtol=tolerance, atol=tolerance)
    assert list(many[1]) == list(one[1])
    for name, tensor in one[1].items():
        torch.testing.assert_close(many[1][name], tensor, rtol=tolerance, atol=tolerance, msg=name)
    for found, wanted in zip(many[2] + many[3], one[2] + one[3], strict=True):
        np.testing.assert_allclose(found, wanted, atol=2 * tolerance, rtol=0)


@pytest.fixture(scope="module")
def family(request, tmp_path_factory):
    name, tied = request.param
    return tiny_model(tmp_path_factory.mktemp("ranks") / name, name, tied=tied, hidden_size=32)


@pytest.fixture(scope="module")
def of_one_process(family, make_groups):
    return three_steps(TorchTrainEngine.create(config(family)), make_groups, weighted)


TIED, UNTIED = True, False
RUNS = [
    *(pytest.param(family, {"dp": 4}, marks=pytest.mark.nightly) for family in FAMILIES),
    *((family, {"dp": 2, "tp": 2}) for family in FAMILIES),
    (("qwen3", TIED), {"dp": 2}),
    (("llama", UNTIED), {"dp": 2}),
    (("qwen3", UNTIED), {"tp": 2}),
    (("qwen2", TIED), {"tp": 2}),
    (("qwen3", TIED), {"cp": 2}),
    (("llama", UNTIED), {"dp": 2, "cp": 2}),
    (("qwen2", TIED), {"cp": 2, "tp": 2}),
]


def name_run(value):
    return "-".join(str(each) for pair in value.items() for each in pair) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("family", "mesh"), RUNS, ids=name_run, indirect=True)
def test_ranks_train_as_one_process(family, of_one_process, mesh, make_groups):
    engine = TorchTrainEngine.create(config(family), mesh)
    assert engine.num_ranks == mesh.size
    assert engine.leader == (mesh.rank == 0)
    assert_same(three_steps(engine, make_groups, weighted), of_one_process)


def test_a_mesh_of_one_is_one_process(model_folder, make_groups):
    """Bit for bit, and without a world."""
    engines = [TorchTrainEngine.create(config(model_folder), mesh) for mesh in (None, Mesh())]
    one, mesh_of_one = (three_steps(engine, make_groups, weighted) for engine in engines)
    assert mesh_of_one[0] == one[0]
    assert all(torch.equal(mesh_of_one[1][name], tensor) for name, tensor in one[1].items())


@pytest.mark.mesh(dp=1, pp=2, compare=False)
def test_axes_that_the_engine_does_not_cut_are_refused(model_folder, mesh):
    with pytest.raises(ConfigError, match="pp"):
        TorchTrainEngine.create(config(model_folder), mesh)


@pytest.mark.mesh(tp=4, compare=False)
def test_heads_that_do_not_divide_are_refused(model_folder, mesh):
    with pytest.raises(ConfigError, match="num_key_value_heads = 2"):
        TorchTrainEngine.create(config(model_folder), mesh)


CHANGES = {
    "lora": {"lora_rank": 4},
    "checkpointing": {"activation_checkpointing": True},
    "bfloat16": {"dtype": "bfloat16"},
    "entropy": {"options": {"temperature": 0.7, "entropy_gradient": True}},
    "once a pass": {"options": {"reduce_once": "on"}},
}


@pytest.mark.parametrize(
    "mesh",
    [{"dp": 2}, {"cp": 2}, pytest.param({"dp": 2, "tp": 2}, marks=pytest.mark.nightly)],
    ids=name_run,
    indirect=True,
)
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_settings_mean_the_same_on_ranks(model_folder, mesh, make_groups, changes):
    settings = config(model_folder, **changes)
    one = three_steps(TorchTrainEngine.create(settings), make_groups, weighted)
    many = three_steps(TorchTrainEngine.create(settings, mesh), make_groups, weighted)
    assert_same(many, one, 1e-5 if settings.dtype == "float32" else 3e-2)


def one_prompt(num, length=3):
    """Completions of one prompt."""
    rng = np.random.default_rng(5)
    prompt = rng.integers(3, 300, 12)
    made = [np.concatenate([prompt, rng.integers(3, 300, length)]).astype(np.int32) for _ in range(num)]
    extras = {"advantage": np.ones(12 + length, np.float32)}
    return [TrainSequence(ids=ids, loss_mask=np.arange(len(ids)) >= 12, extras=extras) for ids in made]


UPDATES = {
    "one sequence": one_prompt(1),
    "fewer sequences than ranks": one_prompt(3),
    "one prompt": one_prompt(11),
    "longer than the budget": one_prompt(5, length=60),
    "one token each": one_prompt(5, length=1),
    "no loss token": [dataclasses.replace(s, loss_mask=np.zeros(15, bool)) for s in one_prompt(2)],
    "nothing": [],
}


@pytest.mark.parametrize(
    "mesh",
    [{"dp": 2, "cp": 2}, *(pytest.param(axes, marks=pytest.mark.nightly) for axes in ({"dp": 4}, {"cp": 4}))],
    ids=name_run,
    indirect=True,
)
@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_updates_that_do_not_divide(model_folder, mesh, update):
    engines = [TorchTrainEngine.create(config(model_folder), each) for each in (None, mesh)]
    for found, wanted in zip(*(engine.logprobs(update) for engine in reversed(engines)), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    reported = [engine.forward_backward(update, weighted) for engine in engines]
    assert reported[0].keys() == reported[1].keys()
    for name in reported[0].keys() & {"loss", "weight", "sequence_tokens"}:
        assert reported[1][name].value == pytest.approx(reported[0][name].value, rel=1e-5, abs=1e-6)
    norms = [engine.step()["grad_norm"].value for engine in engines]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


@pytest.mark.mesh(dp=2)
@pytest.mark.mesh(dp=2, tp=2)
def test_each_rank_returns_the_same_bits(model_folder, mesh, make_groups):
    engine = TorchTrainEngine.create(config(model_folder), mesh)
    reported, weights, now, first = three_steps(engine, make_groups, weighted)
    arrays = [np.array(reported), *(tensor.numpy() for tensor in weights.values()), *now, *first]
    bits = [array.tobytes().hex()[-2000:] for array in arrays]
    mesh.group("dp", "tp").check_equal(bits, what="what the engine returned")


@pytest.mark.mesh(dp=2, compare=False)
@pytest.mark.parametrize("faulty", [0, 1])
def test_a_loss_that_is_not_finite_on_one_rank_refuses_the_step_on_all(model_folder, mesh, make_groups, faulty):
    engine = TorchTrainEngine.create(config(model_folder), mesh)
    before = {name: tensor.clone() for name, tensor in engine.weights()}
    share = mesh.group("dp").rank

    def poisoned(tokens):
        value, metrics = weighted(tokens)
        return value * (float("nan") if share == faulty else 1.0), metrics

    engine.forward_backward(make_groups(), poisoned)
    assert engine.step()["steps_refused"].value == 1
    assert "the loss is not finite" in engine.last_refusal
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.weights())
    engine.forward_backward(make_groups(), weighted)
    assert engine.step()["steps_refused"].value == 0
    assert engine.steps_taken == 1


@pytest.mark.mesh(dp=2, compare=False)
def test_a_gradient_that_is_not_finite_on_one_rank_is_named_on_all(model_folder, mesh, make_groups):
    engine = TorchTrainEngine.create(config(model_folder), mesh)
    share = mesh.group("dp").rank

    def steep(tokens):  # finite loss, infinite slope
        return torch.sqrt(tokens.logprobs_N * (0.0 if share else 1.0) * -1.0).sum(), {}

    engine.forward_backward(make_groups(), steep)
    assert engine.step()["steps_refused"].value == 1
    assert "model.embed_tokens.weight" in engine.last_refusal


@pytest.mark.mesh(dp=2, compare=False)
@pytest.mark.parametrize("faulty", [0, 1])
def test_a_loss_that_raises_on_one_rank_is_raised_on_all_and_training_goes_on(model_folder, mesh, make_groups, faulty):
    engine = TorchTrainEngine.create(config(model_folder), mesh)
    share = mesh.group("dp").rank

    def raises(tokens):
        if share == faulty:
            raise ZeroDivisionError("no advantage")
        return weighted(tokens)

    error, text = (ZeroDivisionError, "no advantage") if share == faulty else (PeerFailedError, f"rank {faulty}.*no ad")
    with pytest.raises(error, match=text):
        engine.forward_backward(make_groups(), raises)
    clean = TorchTrainEngine.create(config(model_folder), mesh)
    losses = [each.forward_backward(make_groups(), weighted)["loss"].value for each in (engine, clean)]
    assert losses[0] == losses[1]
    assert engine.step()["grad_norm"].value == clean.step()["grad_norm"].value


@pytest.mark.mesh(tp=2, compare=False)
@pytest.mark.mesh(cp=2, compare=False)
@pytest.mark.parametrize("faulty", [0, 1])
def test_a_loss_that_raises_on_one_of_the_ranks_that_share_a_pack_is_raised_on_all(
    model_folder, mesh, make_groups, faulty
):
    engine = TorchTrainEngine.create(config(model_folder), mesh)

    def raises(tokens):
        if mesh.rank == faulty:
            raise ZeroDivisionError("no advantage")
        return weighted(tokens)

    error, text = (
        (ZeroDivisionError, "no advantage") if mesh.rank == faulty else (PeerFailedError, f"rank {faulty}.*no ad")
    )
    with pytest.raises(error, match=text):
        engine.forward_backward(make_groups(), raises)
    assert engine.forward_backward(make_groups(), weighted)["num_microbatches"].value > 1


NO_LOSSES = {
    "no tensor": (lambda tokens: (0.0, {}), "got 0.0"),
    "no scalar": (lambda tokens: (tokens.logprobs_N, {}), "shape"),
    "no metric": (lambda tokens: (tokens.logprobs_N.sum(), {"kl": 0.5}), "got kl = 0.5"),
    "no number": (lambda tokens: (tokens.logprobs_N.sum(), {"kl": Metric(value="half")}), "half"),
}


@pytest.mark.mesh(dp=2, compare=False)
@pytest.mark.parametrize(("loss", "words"), NO_LOSSES.values(), ids=NO_LOSSES)
def test_a_loss_that_returns_something_else_on_one_rank_is_raised_on_all(model_folder, mesh, make_groups, loss, words):
    engine = TorchTrainEngine.create(config(model_folder), mesh)
    with pytest.raises((OffbeatError, ValueError), match=words):
        engine.forward_backward(make_groups(), loss if mesh.rank else weighted)
    assert engine.forward_backward(make_groups(), weighted)["num_microbatches"].value > 1


@pytest.mark.mesh(dp=2, compare=False)
def test_ranks_that_are_given_other_sequences_are_told(model_folder, mesh, make_groups):
    engine = TorchTrainEngine.create(config(model_folder), mesh)
    with pytest.raises(MismatchError, match="forward_backward"):
        engine.forward_backward(make_groups(seed=mesh.group("dp").rank), weighted)
    known, unknown = make_groups(), [dataclasses.replace(each, ids=each.ids + 10**6) for each in make_groups()]
    with pytest.raises(MismatchError, match="logprobs"):  # before one of them looks at its own
        engine.logprobs(unknown if mesh.rank else known)
    with pytest.raises(ModelError, match="token ids"):
        engine.logprobs(unknown)


@pytest.mark.mesh(dp=2)
def test_asking_leaves_nothing_behind_that_an_update_makes_stale(model_folder, mesh, make_groups):
    """FSDP keeps what it gathered when no backward pass follows."""
    engine, other = (TorchTrainEngine.create(config(model_folder, learning_rate=1e-2), mesh) for _ in range(2))
    for seed in range(2):
        engine.logprobs(make_groups(seed=7))
        engine.forward_backward(make_groups(seed=seed), weighted)
        engine.logprobs(make_groups(seed=7))
        engine.step()
        other.forward_backward(make_groups(seed=seed), weighted)
        other.step()
    for found, wanted in zip(engine.logprobs(make_groups()), other.logprobs(make_groups()), strict=True):
        np.testing.assert_array_equal(found, wanted)

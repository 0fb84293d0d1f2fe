"""What the engine promises beyond equal results, on real ranks."""

import dataclasses
from itertools import cycle

import numpy as np
import pytest
import torch
from megatron_layouts import Layout, copied, same
from megatron_yardstick import make_sequences, policy_loss, reference_loss

from offbeat_core import (
    ConfigError,
    DataError,
    Metric,
    MismatchError,
    ModelError,
    OffbeatError,
    PeerFailedError,
    TrainSequence,
    load_backend,
)
from offbeat_engine_megatron import MegatronTrainEngine
from offbeat_mesh import Mesh, current_world
from offbeat_testing import reference_logprobs, reference_model, tiny_model


@pytest.mark.mesh(tp=2, cp=2)
def test_weights_go_round_bit_for_bit(create, model_folder, mesh, shared):
    """In from safetensors, out by the stream and by a folder that transformers reads."""
    engine = create(mesh=mesh)
    wanted = dict(reference_model(model_folder).named_parameters())
    found = copied(engine)
    assert list(found) == [slot.name for slot in engine._policy.weights.slots]
    assert same(found, wanted)
    engine.save_weights(shared / "round")
    assert same(found, dict(reference_model(shared / "round").named_parameters()))
    assert (shared / "round" / "tokenizer.json").exists()


@pytest.mark.mesh(tp=2, pp=2)
def test_the_stream_is_cut_into_buckets(create, mesh, monkeypatch):
    engine = create(mesh=mesh)
    wanted = copied(engine)
    monkeypatch.setattr("offbeat_engine_megatron._weights.BUCKET_BYTES", 5000)
    assert len(list(engine._policy.weights.buckets())) > 10
    assert same(copied(engine), wanted)


@pytest.mark.mesh(dp=2)
def test_weights_are_those_of_the_last_step_under_overlap(create, mesh):
    """With overlap_param_gather a step leaves this rank's copy stale until the next pass."""
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    plain, overlapped = (create(Layout(options=each), mesh) for each in ({}, overlap))
    for step in range(3):
        for engine in (plain, overlapped):
            engine.forward_backward(make_sequences(step), policy_loss)
            engine.step()
        stale = {name: tensor.clone() for name, tensor in overlapped._policy.weights.gather()}
        wanted = copied(plain)
        assert not same(stale, wanted)
        assert same(copied(overlapped), wanted)
        asked = make_sequences(7)
        for one, other in zip(plain.logprobs(asked), overlapped.logprobs(asked), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.mesh(dp=2, compare=False)
def test_overlapped_reduction_allows_one_pass_an_update(create, mesh):
    engine = create(Layout(options={"overlap_grad_reduce": True}), mesh)
    engine.forward_backward(make_sequences(0), policy_loss)
    with pytest.raises(ConfigError, match="one forward_backward"):
        engine.forward_backward(make_sequences(1), policy_loss)
    engine.step()
    engine.step()  # without a pass: nothing to learn, and no other rank waits
    engine.forward_backward(make_sequences(1), policy_loss)
    assert engine.step()["steps_refused"].value == 0


@pytest.mark.parametrize(
    "mesh", [{"pp": 2, "dp": 2}, pytest.param({"tp": 2, "cp": 2}, marks=pytest.mark.nightly)], ids=str, indirect=True
)
@pytest.mark.mesh
def test_each_rank_returns_the_same_bits(create, mesh):
    engine = create(mesh=mesh)
    seen = []
    for step in range(2):
        seen += [metric.value for metric in engine.forward_backward(make_sequences(step), policy_loss).values()]
        seen += [metric.value for metric in engine.step().values()]
    arrays = [np.array(seen), *engine.logprobs(make_sequences(5)), *engine.logprobs(make_sequences(5), reference=True)]
    arrays += [tensor.numpy() for tensor in copied(engine).values()]
    engine.mesh.group("dp", "cp", "tp", "pp").check_equal(
        [array.tobytes().hex()[-1000:] for array in arrays], what="it"
    )


UPDATES = {
    "one sequence": make_sequences(0)[:1],
    "three": make_sequences(0)[:3],
    "longer than the budget": [
        TrainSequence(
            ids=np.arange(3, 103, dtype=np.int32),
            loss_mask=np.arange(100) > 50,
            extras={"advantage": np.ones(100, np.float32)},
        )
    ],
    "one long, many short": [
        TrainSequence(
            ids=np.arange(3, 3 + length, dtype=np.int32),
            loss_mask=np.arange(length) > 1,
            extras={"advantage": np.linspace(-1, 1, length, dtype=np.float32)},
        )
        for length in (60, 5, 5, 5, 7, 5)
    ],
    "no loss token": [dataclasses.replace(each, loss_mask=np.zeros_like(each.loss_mask)) for each in make_sequences(0)],
    "nothing": [],
}


@pytest.mark.parametrize(
    "mesh", [{"dp": 2, "pp": 2}, pytest.param({"cp": 2, "tp": 2}, marks=pytest.mark.nightly)], ids=str, indirect=True
)
@pytest.mark.mesh
def test_updates_that_do_not_divide(create, model_folder, mesh):
    options = {"virtual_pipeline": 2} if mesh.axes["pp"] > 1 else {}
    engine = create(Layout(options=options), mesh, learning_rate=0.0)
    for name, update in UPDATES.items():
        model = reference_model(model_folder)
        for sequence, found in zip(update, engine.logprobs(update), strict=True):
            wanted = np.where(sequence.loss_mask, reference_logprobs(model, sequence.ids), 0.0)
            np.testing.assert_allclose(found, wanted, atol=1e-5, err_msg=name)
        reported = engine.forward_backward(update, policy_loss)
        norm = engine.step()["grad_norm"]
        assert norm.weight == 1.0, name
        used = [sequence for sequence in update if sequence.loss_mask.any()]
        assert (norm.value > 0) == bool(used), name
        if used:
            loss = reference_loss(model, used)
            loss.backward()
            norm_of_all = torch.linalg.vector_norm(torch.cat([each.grad.flatten() for each in model.parameters()]))
            found, wanted = [reported["loss"].value, norm.value], [loss.item(), norm_of_all.item()]
            np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    "mesh",
    [
        {"pp": 2, "dp": 2},
        pytest.param({"dp": 2}, marks=pytest.mark.nightly),
        pytest.param({"tp": 2, "dp": 2}, marks=pytest.mark.nightly),
    ],
    ids=str,
    indirect=True,
)
@pytest.mark.mesh(compare=False)
def test_a_loss_that_raises_on_one_share_is_raised_on_all_and_training_goes_on(create, mesh):
    engine = create(mesh=mesh)
    share = mesh.group("dp").rank
    for faulty in range(2):

        def raises(tokens, faulty=faulty):
            if share == faulty:
                raise ZeroDivisionError(f"no advantage on {faulty}")
            return policy_loss(tokens)

        with pytest.raises((ZeroDivisionError, PeerFailedError), match=f"no advantage on {faulty}"):
            engine.forward_backward(make_sequences(0), raises)
    loss = engine.forward_backward(make_sequences(0), policy_loss)["loss"].value
    norm = engine.step()["grad_norm"].value
    clean = create(mesh=mesh)
    assert clean.forward_backward(make_sequences(0), policy_loss)["loss"].value == loss
    assert clean.step()["grad_norm"].value == norm


@pytest.mark.mesh(dp=2, compare=False)
@pytest.mark.mesh(pp=2, dp=2, compare=False)
@pytest.mark.parametrize("faulty", [0, 1])
def test_a_loss_that_is_not_finite_on_one_share_refuses_the_step_on_all(create, mesh, faulty):
    engine = create(mesh=mesh)
    before, share = copied(engine), mesh.group("dp").rank

    def poisoned(tokens):
        value, metrics = policy_loss(tokens)
        return value * (float("nan") if share == faulty else 1.0), metrics

    engine.forward_backward(make_sequences(0), poisoned)
    assert engine.step()["steps_refused"].value == 1
    assert "the loss is not finite" in engine.last_refusal
    assert same(copied(engine), before)
    assert (engine.steps_taken, engine.steps_refused) == (0, 1)


@pytest.mark.mesh(dp=2, tp=2, compare=False)
def test_a_gradient_that_is_not_finite_is_named(create, mesh):
    engine = create(mesh=mesh)

    def steep(tokens):  # finite loss, infinite slope
        return torch.sqrt(tokens.logprobs_N * 0.0 * -1.0).sum(), {}

    engine.forward_backward(make_sequences(0), steep)
    assert engine.step()["steps_refused"].value == 1
    assert "model.embed_tokens.weight" in engine.last_refusal


NO_LOSSES = {
    "no tensor": (lambda tokens: (0.0, {}), "got 0.0"),
    "no scalar": (lambda tokens: (tokens.logprobs_N, {}), "shape"),
    "no pair": (lambda tokens: tokens.logprobs_N.sum(), "0-d|iterate|unpack"),
    "no metric": (lambda tokens: (tokens.logprobs_N.sum(), {"kl": 0.5}), "got kl = 0.5"),
}


@pytest.mark.mesh(pp=2, compare=False)
@pytest.mark.parametrize(("loss", "words"), NO_LOSSES.values(), ids=NO_LOSSES)
def test_a_loss_that_returns_something_else_is_told_to_all_stages(create, mesh, loss, words):
    engine = create(mesh=mesh)
    with pytest.raises((OffbeatError, TypeError), match=words):
        engine.forward_backward(make_sequences(0), loss)
    assert engine.forward_backward(make_sequences(0), policy_loss)["num_microbatches"].value > 1


@pytest.mark.mesh(pp=2, compare=False)
def test_metrics_that_do_not_add_up_are_told_to_all_stages(create, mesh):
    engine, kinds = create(mesh=mesh), cycle(["sum", "max"])
    with pytest.raises((ValueError, PeerFailedError), match="cannot merge a sum with a max"):
        engine.forward_backward(
            make_sequences(0), lambda tokens: (tokens.logprobs_N.sum(), {"kl": Metric(value=0.5, how=next(kinds))})
        )
    assert engine.forward_backward(make_sequences(0), policy_loss)["num_microbatches"].value > 1


@pytest.mark.mesh(pp=2, compare=False)
def test_ranks_that_are_given_other_sequences_are_told(create, mesh):
    engine = create(mesh=mesh)
    with pytest.raises(MismatchError, match="forward_backward"):
        engine.forward_backward(make_sequences(mesh.rank), policy_loss)
    known, unknown = make_sequences(0), [dataclasses.replace(each, ids=each.ids + 10**6) for each in make_sequences(0)]
    for ask in (engine.logprobs, lambda sequences: engine.forward_backward(sequences, policy_loss)):
        with pytest.raises(MismatchError, match="arguments"):  # before one of them looks at its own
            ask(unknown if mesh.rank else known)
        with pytest.raises(ModelError, match="token ids"):
            ask(unknown)


@pytest.mark.mesh(dp=2, compare=False)
def test_sequences_with_images_are_refused_on_all_ranks_and_training_goes_on(create, mesh):
    engine = create(mesh=mesh)
    plain = make_sequences(0)
    pictured = [dataclasses.replace(plain[0], images=(np.zeros((28, 28, 3), np.uint8),)), *plain[1:]]
    for ask in (engine.logprobs, lambda sequences: engine.forward_backward(sequences, policy_loss)):
        with pytest.raises(DataError, match="holds 1 images, and the model takes none"):
            ask(pictured)
    assert engine.forward_backward(plain, policy_loss)["num_microbatches"].value > 1


def test_one_layout_at_a_time(create):
    """Engines of one layout share megatron-core's groups; the last one to close gives them up, and its world."""
    first, second = create(), create()
    first.close()
    assert current_world() is not None
    assert second.forward_backward(make_sequences(0), policy_loss)["num_microbatches"].value > 1
    second.close()
    second.close()
    assert current_world() is None


@pytest.mark.ranks(2, compare=False)
def test_another_layout_is_refused_while_one_is_open(create, ranks):
    engine, other = create(mesh=Mesh(dp=2)), Layout(options={"tensor_parallel": 2})
    with pytest.raises(ConfigError, match="one layout per process"):
        create(other, Mesh(dp=2))
    engine.close()
    with pytest.raises(ConfigError, match="pass a mesh"):
        create()
    create(other, Mesh(dp=2))


@pytest.fixture(scope="session")
def folder_of_two(tmp_path_factory, model_folder):
    """The weights of one model beside the config of another."""
    folder = tiny_model(tmp_path_factory.mktemp("megatron") / "other", num_layers=4, num_kv_heads=4)
    (folder / "config.json").write_text((model_folder / "config.json").read_text())
    return folder


@pytest.mark.mesh(tp=2, compare=False)
def test_weights_of_another_model_are_refused_on_all_ranks(create, mesh, folder_of_two):
    with pytest.raises((ModelError, PeerFailedError), match="must have shape"):
        create(mesh=mesh, folder=folder_of_two)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda value: value["rope_type"],
)
def test_scaled_rotary_embeddings_are_those_of_transformers(create, tmp_path, scaling):
    folder = tiny_model(tmp_path / "llama", "llama", config={"rope_parameters": scaling})
    model, asked = reference_model(folder), UPDATES["longer than the budget"]
    for sequence, found in zip(asked, create(folder=folder).logprobs(asked), strict=True):
        wanted = np.where(sequence.loss_mask, reference_logprobs(model, sequence.ids), 0.0)
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_the_engine_is_found_by_entry_point():
    assert load_backend("offbeat.engine", "megatron") is MegatronTrainEngine

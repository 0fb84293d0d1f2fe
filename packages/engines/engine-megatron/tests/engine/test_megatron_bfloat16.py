"""bfloat16: the model computes in it; gradients, norms, clipping, the optimizer and checkpoints are float32."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from megatron_layouts import Layout, copied, params_of, same, train_with_engine, whole_gradients
from megatron_yardstick import compare, make_sequences, policy_loss, train_with_transformers
from safetensors.torch import load_file

OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS = [
    Layout(),
    Layout(axes={"dp": 2}, options=OVERLAP),
    Layout(axes={"cp": 2}, options={"distributed_optimizer": False}),
    Layout(axes={"tp": 2}),
    Layout(axes={"pp": 2, "dp": 2}, recompute=True),
    Layout(model="qwen3-moe", axes={"dp": 2, "ep": 2}),
    Layout(axes={"tp": 2}, lora=True),
]
# A sparse model sends some tokens to other experts when it rounds, so that single gradients are others altogether.
BOUNDS = {"loss": 0.01, "grad_norm": 0.01, "gradient": 0.1, "weight": 0.03, "logprob_nats": 0.1}


@pytest.fixture(scope="session")
def float32(models):
    """What transformers makes of the models in float32."""
    kinds = {(layout.model, layout.lora) for layout in LAYOUTS}
    return {kind: train_with_transformers(models[kind[0]], lora=kind[1]) for kind in sorted(kinds)}


@pytest.fixture
def create(create):
    """Makes engines in bfloat16, unless asked otherwise."""
    return lambda *given, **changes: create(*given, **({"dtype": "bfloat16"} | changes))


def step(engine, number):
    loss = engine.forward_backward(make_sequences(number), policy_loss)["loss"].value
    return loss, engine.step()["grad_norm"].value


def rounded(tensors):
    return {name: tensor.bfloat16().float() for name, tensor in tensors.items()}


IN_CI = [LAYOUTS[1], LAYOUTS[3]]


@pytest.mark.parametrize("layout", params_of(LAYOUTS, IN_CI))
def test_two_steps_are_near_those_of_float32(create, float32, layout, mesh):
    engine = create(layout, mesh)
    apart = dataclasses.asdict(compare(train_with_engine(engine), float32[layout.model, layout.lora]))
    if layout.model == "qwen3-moe":
        del apart["gradient"]
    assert all(value < BOUNDS[name] for name, value in apart.items()), apart
    assert apart["logprob_nats"] > 1e-4, "this was not computed in bfloat16"


AGAIN = Layout(axes={"tp": 2}, recompute=True)  # the others are saved at night, for the next test
WHOLE = [layout for layout in LAYOUTS if not layout.lora]  # where adapters are merged, neither format holds the sum


@pytest.mark.parametrize("layout", params_of([each for each in WHOLE if each.options != OVERLAP], IN_CI))
def test_a_step_is_adams_in_float32(create, models, shared, layout, mesh):
    """From the file's values, not from rounded ones, with a norm over gradients that were never rounded on the way."""
    engine, place = create(layout, mesh), shared / f"step-{layout.slug}"
    engine.forward_backward(make_sequences(0), policy_loss)
    gradients = whole_gradients(engine, engine._policy.weights)
    assert not any(same({name: each}, rounded({name: each})) for name, each in gradients.items() if each.ndim > 1)
    norm = engine.step()["grad_norm"].value
    wanted = float(torch.stack([each.double().norm() for each in gradients.values()]).norm())
    np.testing.assert_allclose(norm, wanted, rtol=1e-6)
    assert norm > 2 * engine.config.max_grad_norm, "nothing was clipped"

    engine.save_weights(place)
    before, after = (load_file(each / "model.safetensors") for each in (models[layout.model], place))
    assert after.keys() == gradients.keys()
    for name, gradient in gradients.items():
        parameter = torch.nn.Parameter(before[name])
        parameter.grad = gradient * (0.5 / norm)
        decay = 0.1 if parameter.ndim > 1 else 0.0
        torch.optim.AdamW([parameter], lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=decay).step()
        torch.testing.assert_close(after[name], parameter.detach(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("layout", params_of([*LAYOUTS, AGAIN], [AGAIN]))
def test_a_checkpoint_holds_the_float32_weights_and_the_run_goes_on_bit_for_bit(create, shared, layout, mesh):
    engine, other = (create(layout, mesh) for _ in range(2))
    step(engine, 0), step(other, 5)
    folder = shared / layout.slug
    engine.save(folder)
    if not layout.lora:
        kept, served = load_file(folder / "model.safetensors"), copied(engine)
        assert same(served, rounded(kept)), "what is served is not what the trainer computes with"
        assert not same(served, kept)
    other.load(folder)
    reported = [step(engine, 1), step(engine, 2)]
    assert [step(other, 1), step(other, 2)] == reported
    assert same(copied(other), copied(engine))
    if engine.leader:
        (folder / "reported.json").write_text(json.dumps(reported))


@pytest.mark.nightly
@pytest.mark.timeout(180)
@pytest.mark.mesh(tp=2, dp=2, deadline_s=120)
def test_a_layout_goes_on_from_what_another_saved(create, shared, mesh):
    """No bit of the float32 weights and moments is lost on the way, and the next losses are near."""
    engine, mine = create(mesh=mesh), shared / "read"
    for writer in (layout for layout in WHOLE if layout.model == "qwen3"):
        theirs = shared / writer.slug
        engine.load(theirs)
        engine.save(mine)
        for file in ("model.safetensors", "trainer/optimizer.safetensors"):
            one, other = load_file(mine / file), load_file(theirs / file)
            assert same(*({name: each for name, each in found.items() if "rng" not in name} for found in (one, other)))
        reported = json.loads((theirs / "reported.json").read_text())
        np.testing.assert_allclose([step(engine, 1)], reported[:1], rtol=0.01, atol=0.005, err_msg=str(writer))


@pytest.mark.timeout(180)
@pytest.mark.mesh(pp=2, deadline_s=120)
def test_layers_of_multi_token_prediction_on_interleaved_stages_are_near_those_of_float32(create, mesh):
    layout, reported = Layout(options={"mtp_layers": 1, "virtual_pipeline": 2}), []
    for dtype in ("bfloat16", "float32"):
        engine = create(layout, mesh, dtype=dtype)
        for number in range(2):
            metrics = engine.forward_backward(make_sequences(number), policy_loss)
            reported.append([metrics["loss"].value, metrics["mtp_loss_1"].value, engine.step()["grad_norm"].value])
    np.testing.assert_allclose(reported[:2], reported[2:], rtol=0.01, atol=0.005)
    assert reported[:2] != reported[2:]


def test_updates_too_small_for_bfloat16_add_up(create, models, tmp_path):
    coarse, fine = (create(learning_rate=1e-6, dtype=dtype) for dtype in ("bfloat16", "float32"))
    start = load_file(models["qwen3"] / "model.safetensors")
    for number in range(4):
        step(coarse, number), step(fine, number)
    name, moved = "model.layers.0.mlp.up_proj.weight", []
    for engine in (coarse, fine):
        engine.save_weights(tmp_path / engine.config.dtype)
        moved.append(load_file(tmp_path / engine.config.dtype / "model.safetensors")[name] - start[name])
    assert float((moved[0] - moved[1]).norm() / moved[1].norm()) < 0.05
    still = copied(coarse)[name] == start[name].bfloat16().float()
    assert float(still.float().mean()) > 0.99


def test_the_float32_weights_sleep_with_the_optimizer(create):
    """And the rounded ones can still be handed out."""
    engine, other = (create() for _ in range(2))
    step(engine, 0), step(other, 0)
    held = sum(each.numel() * each.element_size() for each in engine._optimizer.state())
    num_parameters = sum(each.numel() for each in engine._passes.tensors())
    assert held == 12 * num_parameters
    engine.sleep(1)
    assert not any(each.untyped_storage().nbytes() for each in engine._optimizer.state())
    assert same(copied(engine), copied(other))
    engine.sleep(2)
    engine.wake()
    assert step(engine, 1) == step(other, 1)

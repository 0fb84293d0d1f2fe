"""Biases of routers: held in float32, sent as they are, and read again; layers that predict later tokens."""

import pytest
import torch
from megatron_layouts import Layout, copied, same
from megatron_yardstick import make_sequences, policy_loss, train_steps

GLM = Layout(model="glm4-moe")


@pytest.mark.mesh(pp=2, dp=2, deadline_s=100)
def test_biases_stay_in_float32_and_where_they_are(create, mesh):
    engine = create(Layout(model="glm4-moe", axes={"pp": 2, "dp": 2}), mesh, dtype="bfloat16")
    biases = {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2, 3)}
    before = {name: tensor.clone() for name, tensor in engine.weights("bfloat16")}
    assert engine.float32_weights == biases
    assert {name for name, tensor in before.items() if tensor.dtype == torch.float32} == biases
    assert all((before[name].bfloat16() != before[name]).any() for name in biases), "rounding would show"
    train_steps(engine, 0, 2)
    after = {name: tensor.clone() for name, tensor in engine.weights("bfloat16")}
    assert {name for name in before if torch.equal(before[name], after[name])} == biases


def test_a_checkpoint_sets_biases_too(create, tmp_path):
    writer, reader = create(GLM), create(GLM)
    with torch.no_grad():
        for parameter in writer._passes.tensors():
            if parameter.shape == (8,):
                parameter += torch.linspace(-0.1, 0.1, 8)
    train_steps(writer, 0, 1)
    writer.save(tmp_path / "saved")
    before = copied(reader)
    reader.load(tmp_path / "saved")
    found = copied(reader)
    assert same(found, copied(writer))
    assert not any(torch.equal(found[name], before[name]) for name in reader.float32_weights)
    assert train_steps(reader, 1, 2) == pytest.approx(train_steps(writer, 1, 2), rel=1e-6)


@pytest.mark.parametrize("model", ["glm4-moe", "deepseek-v3"])
@pytest.mark.timeout(180)
@pytest.mark.mesh(tp=2, pp=2, deadline_s=150)
def test_layers_that_predict_later_tokens_are_like_the_last_one(create, mesh, shared, model):
    options = {"mtp_layers": 1, "mtp_loss_weight": 1.0}
    engine = create(Layout(model=model, axes={"tp": 2, "pp": 2}, options=options), mesh)
    found = [engine.forward_backward(make_sequences(0), policy_loss)["mtp_loss_1"].value]
    engine.step()
    assert any("e_score_correction_bias" in slot.name for slot in engine._policy.mtp.slots)
    engine.save(shared / model)
    engine.load(shared / model)
    again = engine.forward_backward(make_sequences(0), policy_loss)["mtp_loss_1"].value
    assert again < found[0], "one step on the same tokens lowers their loss"

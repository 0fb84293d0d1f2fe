"""Checkpoints across layouts: what one has saved another resumes from: the next step is the undisturbed run's."""

import json

import numpy as np
import pytest
import torch
from megatron_layouts import Layout, copied, params_of, same
from megatron_yardstick import train_steps

from offbeat_core import ModelError
from offbeat_mesh import Mesh
from offbeat_testing import DAMAGES, reference_model, tiny_model

WRITERS = [
    Layout(),
    Layout(axes={"tp": 2, "pp": 2}),
    Layout(axes={"cp": 2, "dp": 2}),
    Layout(axes={"pp": 2, "dp": 2}, options={"virtual_pipeline": 2}),
    Layout(axes={"dp": 2}, options={"distributed_optimizer": False}),
    Layout(axes={"dp": 2}, options={"overlap_grad_reduce": True, "overlap_param_gather": True}),
    Layout(model="qwen3-moe", axes={"dp": 2, "ep": 2}),
    Layout(model="qwen3-moe", axes={"tp": 2, "pp": 2}),
    Layout(model="qwen3-moe", axes={"dp": 2, "ep": 2}, options={"experts": "sequential"}),
]
READERS = [
    Layout(),
    Layout(axes={"tp": 2}),
    Layout(axes={"pp": 2, "dp": 2}),
    Layout(axes={"dp": 4}, options={"overlap_grad_reduce": True, "overlap_param_gather": True}),
    Layout(axes={"dp": 2}, options={"distributed_optimizer": False}),
    Layout(model="qwen3-moe", axes={"tp": 2, "dp": 2, "ep": 2}),
    Layout(model="qwen3-moe", axes={"pp": 2}),
]


@pytest.mark.nightly
@pytest.mark.parametrize("layout", params_of(WRITERS))
def test_a_layout_saves(create, shared, layout, mesh):
    """Two steps, a checkpoint, two more steps."""
    engine, place = create(layout, mesh), shared / layout.slug
    train_steps(engine, 0, 2)
    engine.save(place)
    names = {name for name, _ in engine.weights()}
    reported = train_steps(engine, 2, 4)
    if engine.leader:
        (place / "reported.json").write_text(json.dumps(reported))
        assert names == {name for name, _ in reference_model(place).named_parameters()} or "moe" in layout.model


@pytest.mark.nightly
@pytest.mark.parametrize("layout", params_of(READERS))
def test_a_layout_goes_on_from_what_any_other_saved(create, shared, layout, mesh):
    engine = create(layout, mesh)
    for number, writer in enumerate(each for each in WRITERS if each.model == layout.model):
        if number == 1:  # the first time the optimizer is a fresh one; later there is the run before to forget
            train_steps(engine, 7, 8)
        engine.load(shared / writer.slug)
        assert engine.steps_taken == 2
        wanted = json.loads((shared / writer.slug / "reported.json").read_text())
        np.testing.assert_allclose(train_steps(engine, 2, 4), wanted, rtol=1e-5, atol=1e-5, err_msg=str(writer))


@pytest.mark.timeout(180)
@pytest.mark.mesh(dp=4, deadline_s=120)
def test_ranks_go_on_in_another_layout(create, shared, mesh):
    """One of the pairs above, in the same processes one after the other."""
    engine = create(Layout(options={"tensor_parallel": 2, "pipeline_parallel": 2}), mesh)
    train_steps(engine, 0, 1)
    engine.save(shared / "pair")
    reported = train_steps(engine, 1, 2)
    engine.close()
    engine = create(Layout(options={"context_parallel": 2}), mesh)
    engine.load(shared / "pair")
    np.testing.assert_allclose(train_steps(engine, 1, 2), reported, rtol=1e-5, atol=1e-5)


def test_one_process_goes_on_bit_for_bit(create, tmp_path):
    engine, other = (create(mesh=mesh) for mesh in (None, Mesh()))
    train_steps(engine, 0, 2)
    engine.save(tmp_path / "saved")
    other.load(tmp_path / "saved")
    assert train_steps(engine, 2, 4) == train_steps(other, 2, 4)
    assert same(copied(engine), copied(other))


class FusedAdam(torch.optim.Optimizer):
    """AdamW that counts its steps and holds its state as TransformerEngine's does."""

    def __init__(self, params, lr, weight_decay, betas, eps, **rest):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                assert not state or set(state) == {"exp_avg", "exp_avg_sq"}, "its state_dict() knows no other"
                self._update(parameter, state, group)

    def _update(self, parameter, state, group):
        first, second = (state.setdefault(name, torch.zeros_like(parameter)) for name in ("exp_avg", "exp_avg_sq"))
        (beta1, beta2), step = group["betas"], group["step"]
        first.lerp_(parameter.grad, 1 - beta1)
        second.mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
        size = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(first, size, value=-group["lr"] / (1 - beta1**step))


def test_a_fused_optimizer_goes_on_counting(create, tmp_path, monkeypatch):
    """Its count is in its groups: from 0 again, the first update after a resume would be 2.2 times too large."""
    for module in ("megatron.core.optimizer", "megatron.core.optimizer.distrib_optimizer"):
        monkeypatch.setattr(f"{module}.Adam", FusedAdam)
    monkeypatch.setattr("megatron.core.optimizer.USING_PYTORCH_OPTIMIZER", False)
    engine, other = (create(mesh=mesh) for mesh in (None, Mesh()))
    train_steps(engine, 0, 2)
    engine.save(tmp_path / "saved")
    other.load(tmp_path / "saved")
    inner = [each.optimizer for each in other._optimizer.each]
    assert {group["step"] for each in inner for group in each.param_groups if group["params"]} == {2}
    assert all(isinstance(each, FusedAdam) for each in inner)
    assert train_steps(engine, 2, 4) == train_steps(other, 2, 4)
    assert same(copied(engine), copied(other))


@pytest.mark.mesh(dp=2, compare=False)
def test_a_checkpoint_before_the_first_step(create, mesh, shared):
    engine = create(mesh=mesh)
    engine.save(shared / "unstepped")
    first = train_steps(engine, 0, 2)
    engine.load(shared / "unstepped")
    np.testing.assert_allclose(train_steps(engine, 0, 2), first, rtol=1e-6)


BAD = {
    "no checkpoint": "not a checkpoint that",
    "another model": "another model",
    "cut short": "cut short",
    "a byte at the end": "optimizer.safetensors has the digest",
}


@pytest.mark.mesh(tp=2, compare=False)
@pytest.mark.parametrize(("what", "message"), BAD.items(), ids=BAD)
def test_a_bad_checkpoint_is_refused_on_all_ranks(create, mesh, shared, what, message):
    engine, folder = create(mesh=mesh), shared / f"bad-{what}"
    engine.save(folder)
    if engine.leader:
        trainer = folder / "trainer"
        if what == "no checkpoint":
            (trainer / "engine.json").unlink()
        elif what == "another model":
            tiny_model(folder)
        else:
            moments = (trainer / "optimizer.safetensors").read_bytes()
            damaged = moments[:-100] if what == "cut short" else DAMAGES[what](moments)
            (trainer / "optimizer.safetensors").write_bytes(damaged)
    mesh.group("tp").barrier()
    train_steps(engine, 0, 1)
    before = copied(engine)
    with pytest.raises(ModelError, match=message):
        engine.load(folder)
    assert same(copied(engine), before)
    train_steps(engine, 1, 2)  # and it can still train
    assert engine.steps_taken == 2

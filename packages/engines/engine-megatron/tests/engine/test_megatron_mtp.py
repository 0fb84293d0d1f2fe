"""Multi-token prediction trains in every layout as it does in one process on transformers' own modules."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron_layouts import Layout, engine_config, params_of, same, whole_gradients
from megatron_yardstick import make_sequences, policy_loss
from safetensors.torch import load_file
from torch import Tensor, nn

from offbeat_core import ConfigError, LossTokens, ModelError
from offbeat_engine_megatron import MegatronTrainEngine
from offbeat_mesh import Mesh
from offbeat_testing import reference_model

NUM_LAYERS, WEIGHT, TOLERANCE = 2, 0.3, 1e-5
OPTIONS = {"mtp_layers": NUM_LAYERS, "mtp_loss_weight": WEIGHT}


def layout(model="qwen3", *, recompute=False, axes=None, **options):
    return Layout(model=model, axes=axes or {}, options={**OPTIONS, **options}, recompute=recompute)


LAYOUTS = [
    layout(),
    *(
        layout(axes={axis: size for axis, size in (("cp", cp), ("pp", pp), ("tp", tp)) if size > 1})
        for cp in (1, 2, 4)
        for pp in (1, 2)
        for tp in (1, 2)
        if 1 < cp * pp * tp <= 8
    ),
    layout("qwen3-untied", axes={"pp": 2, "tp": 2}, recompute=True),
    layout(axes={"pp": 2, "cp": 2}, virtual_pipeline=2),
    layout("qwen3-moe", axes={"dp": 2, "ep": 2}),
    layout("qwen3-moe", axes={"tp": 2, "pp": 2, "ep": 2}),
    layout(axes={"dp": 2, "pp": 2}, overlap_grad_reduce=True, overlap_param_gather=True),
]


IN_CI = [LAYOUTS[0], layout(axes={"cp": 2, "pp": 2}), layout("qwen3-moe", axes={"dp": 2, "ep": 2})]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Two steps: losses of the model and of each layer, norms, first gradients and last weights by name."""

    losses: list[float]
    ahead: list[list[float]]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


class Reference(nn.Module):
    """transformers' model, and the layers made of its own parts."""

    def __init__(self, folder: Path):
        from transformers import AutoModelForCausalLM
        from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm

        super().__init__()
        self.network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
        config = self.network.config
        self.layers = nn.ModuleDict()
        stored = load_file(folder / "mtp.safetensors")
        for number in range(config.num_hidden_layers, config.num_hidden_layers + NUM_LAYERS):
            layer = Qwen3DecoderLayer(config, 0)
            layer.enorm, layer.hnorm = (Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2))
            layer.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
            layer.shared_head = nn.ModuleDict({"norm": Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)})
            stem = f"model.layers.{number}."
            own = {name.removeprefix(stem): each for name, each in stored.items() if name.startswith(stem)}
            layer.load_state_dict(own, strict=True)
            self.layers[str(number)] = layer

    def named(self):
        yield from self.network.named_parameters()
        for number, layer in self.layers.items():
            yield from ((f"model.layers.{number}.{name}", each) for name, each in layer.named_parameters())

    def values(self, sequence):
        """Log-probabilities and entropies of the loss tokens; for each layer the sum of its losses and their count."""
        ids = torch.from_numpy(sequence.ids.astype(np.int64))
        mask = torch.from_numpy(sequence.loss_mask)
        hidden = self.network.model(ids[None], use_cache=False).last_hidden_state
        logp = torch.log_softmax(self.network.lm_head(hidden)[0, :-1], -1)[mask[1:]]
        chosen = logp.gather(1, ids[1:][mask[1:]][:, None])[:, 0]
        turns = self.network.model.rotary_emb(hidden, torch.arange(len(ids))[None])
        ahead = []
        for depth, layer in enumerate(self.layers.values(), 1):
            later = self.network.model.embed_tokens(torch.roll(ids, -depth))[None]
            joined = layer.eh_proj(torch.cat([layer.enorm(later), layer.hnorm(hidden)], -1))
            hidden = layer.shared_head["norm"](_first(layer(joined, position_embeddings=turns)))
            tokens = torch.nonzero(mask)[:, 0]
            tokens = tokens[tokens > depth]
            found = torch.log_softmax(self.network.lm_head(hidden)[0], -1)[tokens - 1 - depth]
            ahead.append((-found.gather(1, ids[tokens][:, None]).sum(), len(tokens)))
        return chosen, -(logp.exp() * logp).sum(1), ahead


def _first(answer):
    return answer[0] if isinstance(answer, tuple) else answer


def train_reference(folder):
    reference = Reference(folder)
    named = dict(reference.named())
    groups = [
        {"params": [each for each in named.values() if each.ndim >= 2], "weight_decay": 0.1},
        {"params": [each for each in named.values() if each.ndim < 2], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-3)
    losses, norms, ahead, gradients = [], [], [], {}
    for step in range(2):
        sequences = make_sequences(step)
        found = [reference.values(each) for each in sequences]
        counts = [len(each) for each, *_ in found]
        tokens = LossTokens(
            logprobs_N=torch.cat([each for each, *_ in found]),
            entropy_N=torch.cat([each for _, each, _ in found]),
            sequence_N=torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)),
            num_sequences=len(sequences),
            extras={"advantage": torch.cat([torch.from_numpy(s.extras["advantage"][s.loss_mask]) for s in sequences])},
            total_tokens=sum(counts),
            total_sequences=len(sequences),
        )
        loss = policy_loss(tokens)[0]
        layers = [
            sum(each[depth][0] for *_, each in found) / sum(each[depth][1] for *_, each in found)
            for depth in range(NUM_LAYERS)
        ]
        (loss + WEIGHT * sum(layers) / NUM_LAYERS).backward()
        if step == 0:
            gradients = {name: each.grad.clone() for name, each in named.items()}
        norms.append(float(nn.utils.clip_grad_norm_(named.values(), 0.5)))
        losses.append(float(loss))
        ahead.append([float(each) for each in layers])
        adam.step()
        adam.zero_grad()
    weights = {name: each.detach().clone() for name, each in named.items()}
    return Trained(losses=losses, ahead=ahead, norms=norms, gradients=gradients, weights=weights)


def whole(engine):
    """Every tensor under its name, those of the layers too."""
    held = [engine._policy.weights, engine._policy.mtp]
    return {name: tensor.clone() for each in held for name, tensor in each.gather()}


def train_engine(engine):
    losses, ahead, norms, gradients = [], [], [], {}
    for step in range(2):
        metrics = engine.forward_backward(make_sequences(step), policy_loss)
        losses.append(metrics["loss"].value)
        ahead.append([metrics[f"mtp_loss_{depth}"].value for depth in range(1, NUM_LAYERS + 1)])
        if step == 0 and not engine.config.options.get("overlap_grad_reduce"):
            gradients = whole_gradients(engine, engine._policy.weights, engine._policy.mtp)
        norms.append(engine.step()["grad_norm"].value)
    with engine._shim:
        engine._optimizer.gather_weights()
    return Trained(losses=losses, ahead=ahead, norms=norms, gradients=gradients, weights=whole(engine))


@pytest.fixture(scope="module")
def trained(models, shared):
    """Saves folders with layers beside the model; what one process on transformers makes of each, of experts ours."""
    found = {}
    for model in ("qwen3", "qwen3-untied", "qwen3-moe"):
        engine = MegatronTrainEngine.create(engine_config(models[model], layout(model)))
        engine.save_weights(shared / model)  # with the layers as they are made
        found[model] = train_engine(engine) if model == "qwen3-moe" else train_reference(shared / model)
        engine.close()
    return found


def apart(found, wanted):
    return max(
        float((found[name] - each).abs().max() / each.abs().max().clamp_min(1e-3)) for name, each in wanted.items()
    )


@pytest.mark.parametrize("layout", params_of(LAYOUTS, IN_CI))
def test_a_layout_trains_the_layers_as_one_process_does(create, layout, mesh, trained, shared):
    found, wanted = train_engine(create(layout, mesh, folder=shared / layout.model)), trained[layout.model]
    for name in ("losses", "ahead", "norms"):
        np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), rtol=TOLERANCE, atol=TOLERANCE)
    assert found.weights.keys() == wanted.weights.keys()
    assert apart(found.weights, wanted.weights) < TOLERANCE
    if found.gradients:
        assert apart(found.gradients, wanted.gradients) < TOLERANCE


@pytest.mark.parametrize(
    "mesh", [pytest.param({"tp": 2, "pp": 2}, marks=pytest.mark.nightly), {"dp": 2}], ids=str, indirect=True
)
@pytest.mark.mesh(deadline_s=120)
@pytest.mark.usefixtures("trained")
def test_new_layers_are_the_same_in_every_layout_and_come_back_with_a_checkpoint(create, mesh, shared):
    """Made anew, trained, saved beside the model and loaded; what engines are sent is the model alone."""
    engine, folder = create(layout(), mesh), shared / f"saved-{mesh.size}"
    assert same(dict(engine._policy.mtp.gather()), load_file(shared / "qwen3/mtp.safetensors"))

    def train(step):
        loss = engine.forward_backward(make_sequences(step), policy_loss)["mtp_loss_2"].value
        engine.step()
        return loss

    train(0)
    engine.save(folder)
    reported = [train(1), train(2)]
    engine.load(folder)
    np.testing.assert_allclose([train(1), train(2)], reported, rtol=1e-6)
    assert {name for name, _ in engine.weights()} == {name for name, _ in reference_model(folder).named_parameters()}
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == NUM_LAYERS


def test_detached_layers_leave_the_model_alone(create):
    """The model's gradients and log-probabilities are those without the layers; the layers learn."""
    plain, detached = create(), create(layout(mtp_detached=True))
    for one, two in zip(plain.logprobs(make_sequences(5)), detached.logprobs(make_sequences(5)), strict=True):
        np.testing.assert_array_equal(one, two)
    before = {name: tensor.clone() for name, tensor in detached._policy.mtp.gather()}
    for engine in (plain, detached):
        engine.forward_backward(make_sequences(0), policy_loss)
    grads = [dict(each._policy.weights.gather(lambda parameter: parameter.main_grad)) for each in (plain, detached)]
    assert all(torch.equal(tensor, grads[1][name]) for name, tensor in grads[0].items())
    detached.step()
    assert not any(torch.equal(tensor, before[name]) for name, tensor in detached._policy.mtp.gather())


@pytest.mark.usefixtures("trained")
def test_what_cannot_be_is_refused(create, shared, tmp_path):
    with pytest.raises(ConfigError, match="mtp_layers must be a number >= 0"):
        create(layout(mtp_layers=-1))
    engine = create()
    engine.save(tmp_path / "without")
    engine.close()
    engine = create(layout(), Mesh())
    with pytest.raises(ModelError, match="another model"):
        engine.load(tmp_path / "without")
    engine.close()
    with pytest.raises(ModelError, match=r"no tensor model.layers.6"):
        create(layout(mtp_layers=3), folder=shared / "qwen3")
    with pytest.raises(ConfigError, match="lora_rank"):
        create(layout(), lora_rank=2)

"""The loss that balances experts, reports of routers, and the rule for their biases, against each sequence alone.

Shapes: T tokens of a sequence, X experts, K of a token.
"""

import numpy as np
import pytest
import torch
from expert_models import write_experts
from test_engine_torch_ranks import assert_same, config, three_steps, weighted
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from offbeat_core import ConfigError
from offbeat_engine_torch import TorchTrainEngine
from offbeat_engine_torch._formats import route_as_the_family
from offbeat_engine_torch._layers.balance import RoutedTokens, Routers, find_bias, find_expert_layers, find_router
from offbeat_engine_torch._layers.experts import EXPERTS_NAME, register_experts
from offbeat_engine_torch._layers.replay import Routing
from offbeat_mesh import Mesh

FAMILIES = ["qwen3_moe", "gpt_oss", "glm4_moe", "minimax_m2"]
"""Two choose by a softmax of all experts or of those chosen, two by sigmoids and a bias."""
SIGMOIDS = {"glm4_moe", "minimax_m2"}
NUM_EXPERTS = {"gpt_oss": 4}


@pytest.fixture(scope="module")
def model(request, tmp_path_factory):
    return write_experts(tmp_path_factory.mktemp("routers") / request.param, request.param)


class Alone:
    """Transformers' own model, asked for each sequence alone, up to the last token that trains: loss and counts."""

    def __init__(self, folder, sequences):
        self.family = folder.name
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
        self.model.set_experts_implementation("eager")
        self.blocks = list(find_expert_layers(self.model))
        num_experts = self.blocks[0][1].num_experts
        self.counts = torch.zeros(len(self.blocks), num_experts, dtype=torch.int64)
        losses = [self._balance(each) for each in sequences if each.loss_mask.any()]
        self.loss = torch.stack(losses).mean()

    def _balance(self, sequence):
        seen, hooks = [], []
        for block, _ in self.blocks:
            hooks.append(find_router(block).register_forward_hook(lambda _, __, found: seen.append(found)))
        ids = torch.from_numpy(sequence.ids[: np.flatnonzero(sequence.loss_mask)[-1]].astype(np.int64))
        self.model(input_ids=ids[None], use_cache=False)
        for hook in hooks:
            hook.remove()
        return torch.stack([self._of_layer(number, found) for number, found in enumerate(seen)]).mean()

    def _of_layer(self, number, found):
        logits_TX, expert_TK = found[0], found[2]
        num_tokens, num_experts = logits_TX.shape
        chosen_X = torch.bincount(expert_TK.flatten(), minlength=num_experts)
        self.counts[number] += chosen_X
        if self.family in SIGMOIDS:
            probability_TX = torch.sigmoid(logits_TX)
            probability_TX = probability_TX / probability_TX.sum(-1, keepdim=True)
        else:
            probability_TX = torch.softmax(logits_TX, -1)
        loss = num_experts * (chosen_X / num_tokens * probability_TX.mean(0)).sum()
        if self.family not in SIGMOIDS:
            theirs = load_balancing_loss_func((logits_TX,), num_experts, expert_TK.shape[1])
            assert theirs.item() == pytest.approx(loss.item(), rel=1e-5)
        return loss

    def gradients(self):
        self.model.zero_grad()
        self.loss.backward()
        return {name: each.grad for name, each in self.model.named_parameters() if each.grad is not None}


def gradients(engine, sequences, loss):
    metrics = engine.forward_backward(sequences, loss)
    return metrics, {name: each.grad.clone() for name, each in engine._optimizer.parameters.items()}


def nothing(tokens):
    return 0.0 * tokens.logprobs_N.sum(), {}


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
@pytest.mark.parametrize(("budget_tokens", "recomputes"), [(4096, False), (24, True)])
def test_the_loss_is_the_mean_over_sequences_and_layers_of_that_of_transformers(
    model, make_groups, budget_tokens, recomputes
):
    sequences = make_groups()
    alone = Alone(model, sequences)
    settings = {"max_tokens_per_microbatch": budget_tokens, "activation_checkpointing": recomputes}
    settings = config(model, options={"router_aux_loss": 0.3}, **settings)
    metrics, found = gradients(TorchTrainEngine.create(settings), sequences, nothing)
    assert (metrics["num_microbatches"].value > 1) == (budget_tokens == 24)
    assert metrics["router_aux_loss"].value == pytest.approx(alone.loss.item(), rel=1e-5)
    wanted = alone.gradients()
    assert sum(float(each.norm()) for each in wanted.values()) > 1e-3
    for name, grad in found.items():
        of_loss = 0.3 * wanted.get(name, torch.zeros_like(grad)).float()
        torch.testing.assert_close(grad, of_loss, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("model", ["qwen3_moe", "glm4_moe"], indirect=True)
def test_reports_are_those_of_all_choices(model, make_groups):
    sequences = make_groups()
    counts = Alone(model, sequences).counts
    engine = TorchTrainEngine.create(config(model))
    engine.logprobs(sequences)  # counts nothing
    metrics = engine.forward_backward(sequences, weighted)
    assert "router_aux_loss" not in metrics
    load = (counts.double() * counts.shape[1] / counts.sum(1, keepdim=True)).max()
    assert metrics["router_max_load"].value == pytest.approx(float(load), rel=1e-12)
    assert metrics["router_unused_experts"].value == int((counts == 0).sum())
    few = make_groups()[:1]
    unused = int((Alone(model, few).counts == 0).sum())
    assert engine.forward_backward(few, weighted)["router_unused_experts"].value == unused > 0
    assert not {name for name in engine.forward_backward([], weighted) if name.startswith("router")}


RANKS = {
    "dp": ({"dp": 2}, {}),
    "cp": ({"cp": 2}, {}),
    "ep": ({"dp": 2, "ep": 2}, {"activation_checkpointing": True}),
    "cp and ep": ({"dp": 2, "cp": 2, "ep": 4}, {"activation_checkpointing": True}),
}


@pytest.mark.parametrize("model", ["glm4_moe"], indirect=True)
@pytest.mark.parametrize(("mesh", "changes"), RANKS.values(), ids=RANKS, indirect=["mesh"])
def test_ranks_balance_as_one_process_does(model, mesh, make_groups, changes):
    options = {"router_aux_loss": 0.3, "router_bias_rate": 0.01}
    settings = config(model, options=options, **changes)
    engines = [TorchTrainEngine.create(settings, each) for each in (mesh, None)]
    reported = [engine.forward_backward(make_groups(), weighted) for engine in engines]
    for name in ("router_max_load", "router_unused_experts"):
        assert reported[0][name] == reported[1][name]
    assert reported[0]["router_aux_loss"].value == pytest.approx(reported[1]["router_aux_loss"].value, rel=1e-5)
    assert_same(*(three_steps(engine, make_groups, weighted) for engine in engines))
    few = make_groups()[:1]  # some ranks have no work
    values = [engine.forward_backward(few, weighted)["router_aux_loss"].value for engine in engines]
    assert values[0] == pytest.approx(values[1], rel=1e-5)


def biases_of(engine):
    return [find_bias(block).clone() for block, _ in find_expert_layers(engine._policy.model.whole)]


@pytest.mark.parametrize("model", ["glm4_moe", "minimax_m2"], indirect=True)
def test_a_step_moves_each_bias_by_the_sign_of_the_updates_counts(model, make_groups):
    engine = TorchTrainEngine.create(config(model, options={"router_bias_rate": 0.01}))
    before, alone = biases_of(engine), [Alone(model, make_groups(seed=seed)) for seed in (0, 1)]
    engine.logprobs(make_groups(seed=3))
    engine.forward_backward(make_groups(seed=2), lambda tokens: (weighted(tokens)[0] * float("nan"), {}))
    assert engine.step()["steps_refused"].value == 1
    assert all(torch.equal(*pair) for pair in zip(biases_of(engine), before, strict=True)), "a refused step moves none"
    for seed in (0, 1):  # two passes, one step
        engine.forward_backward(make_groups(seed=seed), weighted)
    assert all(torch.equal(*pair) for pair in zip(biases_of(engine), before, strict=True))
    engine.step()
    counts_LX = sum(each.counts for each in alone).double()
    for bias, old, counts_X in zip(biases_of(engine), before, counts_LX, strict=True):
        wanted = old + 0.01 * torch.sign(counts_X.mean() - counts_X)
        torch.testing.assert_close(bias, wanted.float(), rtol=0, atol=1e-7)
    moved = biases_of(engine)
    engine.forward_backward(make_groups(), lambda tokens: (tokens.logprobs_N.sum() * 0.0, {}))
    engine._clear_gradients()
    engine.forward_backward([], weighted)
    engine.step()
    assert all(torch.equal(*pair) for pair in zip(biases_of(engine), moved, strict=True)), "of a step without tokens"


@pytest.mark.parametrize("model", ["glm4_moe"], indirect=True)
@pytest.mark.mesh(dp=2, compare=False)
def test_a_checkpoint_has_the_biases(model, mesh, make_groups, tmp_path):
    settings = config(model, options={"router_bias_rate": 0.01})
    folder = mesh.group("dp").broadcast_data(str(tmp_path))
    engine = TorchTrainEngine.create(settings, mesh)
    engine.forward_backward(make_groups(), weighted)
    engine.step()
    engine.save(type(tmp_path)(folder) / "saved")
    other = TorchTrainEngine.create(settings, Mesh(dp=2, ep=2))
    other.load(type(tmp_path)(folder) / "saved")
    assert all(torch.equal(*pair) for pair in zip(biases_of(engine), biases_of(other), strict=True))
    sent = dict(other.weights())
    named = [name for name in sent if name.endswith("e_score_correction_bias")]
    assert all(torch.equal(sent[name], bias) for name, bias in zip(named, biases_of(engine), strict=True))


def test_choices_are_counted_in_compiled_blocks_too_in_one_graph_for_all(tmp_path):
    register_experts()
    model = AutoModelForCausalLM.from_pretrained(write_experts(tmp_path, "qwen3_moe"))
    model.set_experts_implementation(EXPERTS_NAME)
    route_as_the_family(model)
    routing = Routing(model)
    with torch.autocast("cpu", dtype=torch.bfloat16), routing.watch():  # before routers are traced
        model(torch.arange(5)[None])
    routers, counter = Routers(model, None, loss_weight=0.0, bias_rate=0.0), CompileCounterWithBackend("aot_eager")
    blocks = [block for block, _ in find_expert_layers(model)]
    compiled = [torch.compile(each.forward, backend=counter, fullgraph=True, dynamic=True) for each in blocks]
    for length in (7, 12, 30):
        routers.now = tokens_of_one_sequence(length)
        hidden_1TE, counts = torch.randn(1, length, 32, requires_grad=True), []
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for forwards in (compiled, blocks):
                for forward in forwards:
                    forward(hidden_1TE).sum().backward()
                counts.append(torch.stack(routers.take()[0]))
        assert torch.equal(*counts)
        assert counts[0].sum() == 2 * 2 * int(routers.now.times_t.sum()), "in two layers two experts of each token"
    assert counter.frame_count == 1


def tokens_of_one_sequence(length):
    return RoutedTokens(
        times_t=torch.arange(length) % 3,
        segment_t=torch.zeros(length, dtype=torch.int64),
        member_SG=torch.ones(1, 1),
        length_S=torch.full((1,), float(length)),
        num_sequences=1,
    )


REFUSED = {
    "no experts": ({"router_aux_loss": 0.1}, {}, "router_aux_loss .* Qwen3ForCausalLM has no stacks of experts"),
    "no biases": ({"router_bias_rate": 0.1}, {}, "router_bias_rate needs routers with a bias, and Qwen3ForCausalLM"),
    "adapters": ({"router_bias_rate": 0.1}, {"lora_rank": 4}, "moves biases that lora_rank = 4 leaves"),
}


@pytest.mark.parametrize(("options", "changes", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_balanced_is_refused(model_folder, options, changes, words):
    settings = config(model_folder, options=options, **changes)
    for call in (TorchTrainEngine.plan, TorchTrainEngine.create):
        with pytest.raises(ConfigError, match=words):
            call(settings)

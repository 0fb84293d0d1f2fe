"""Routers take the experts that sequences say, and weigh them as their family does: against transformers in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gpt_oss_folders import write_model
from test_engine_torch_ranks import assert_same, config, weighted
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from offbeat_core import ModelError, Routes
from offbeat_engine_torch import TorchTrainEngine

LAYERS, EXPERTS, CHOSEN = 2, 8, 2
SIZES = {"hidden_size": 32, "vocab_size": 300, "intermediate_size": 64, "moe_intermediate_size": 16, "head_dim": 8}
SIZES |= {"num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4, "initializer_range": 0.2}
SIZES |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERTS)
SIZES |= {"num_experts_per_tok": CHOSEN, "first_k_dense_replace": 0, "kv_lora_rank": 16, "q_lora_rank": 16}
SIZES |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "pad_token_id": 0, "decoder_sparse_step": 1}
SIZES |= {"shared_expert_intermediate_size": 16}
GROUPS = {"n_group": 4, "topk_group": 1}
"""Two experts each, so that a route mostly has experts of groups that the router itself leaves out."""


def softmax(logits):
    return logits.softmax(-1)


def of_chosen_alone(logits, index):
    return logits.gather(-1, index).softmax(-1)


def gathered(score, normalised, scale=1.0):
    def weigh(logits, index):
        weights = score(logits).gather(-1, index)
        return scale * weights / (weights.sum(-1, keepdim=True) if normalised else 1)

    return weigh


FAMILIES = {
    "qwen3_moe": ({"norm_topk_prob": True}, gathered(softmax, True)),
    "qwen2_moe": ({"norm_topk_prob": False}, gathered(softmax, False)),
    "olmoe": ({"norm_topk_prob": False}, gathered(softmax, False)),
    "mixtral": ({}, gathered(softmax, True)),
    "granitemoe": ({}, of_chosen_alone),
    "glm4_moe": ({**GROUPS, "routed_scaling_factor": 2.5}, gathered(torch.sigmoid, True, 2.5)),
    "deepseek_v3": ({**GROUPS, "routed_scaling_factor": 1.5}, gathered(torch.sigmoid, True, 1.5)),
}


def write(folder, family, **settings):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SIZES, **settings}))
    for name, tensor in model.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            tensor.normal_(std=0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def family(request, tmp_path_factory):
    settings, weigh = FAMILIES[request.param]
    return write(tmp_path_factory.mktemp("routing") / request.param, request.param, **settings), weigh


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return write(tmp_path_factory.mktemp("routing") / "mixture", "qwen3_moe", norm_topk_prob=True)


def routed(sequences, *, unknown=0.3, seed=0):
    """Random routes, alike for tokens that sequences share, and none for some tokens."""
    rng, known, found = np.random.default_rng(seed), {}, []
    for sequence in sequences:
        length = len(sequence.ids)
        ids_TLK = np.full((length, LAYERS, CHOSEN), -1)
        for token in range(length):
            context = sequence.ids[: token + 1].tobytes()
            if context not in known:
                chosen = [[rng.choice(EXPERTS, CHOSEN, replace=False) for _ in range(LAYERS)]]
                known[context] = np.array(chosen) if rng.random() > unknown else -1
            ids_TLK[token] = known[context]
        found.append(replace(sequence, routes=(Routes.pack(ids_TLK[: length // 2]), Routes.pack(ids_TLK))))
    return found


class Replayed:
    """A model of transformers in float64, one sequence at a time, whose routers are formulas."""

    def __init__(self, folder, weigh):
        plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
        self.model = AutoModelForCausalLM.from_pretrained(folder, **plain).double()
        self.own, self.routes = [], []
        for name, module in self.model.named_modules():
            if name.endswith((".mlp.gate", ".block_sparse_moe.gate", ".block_sparse_moe.router", ".mlp.router")):
                self._replace(module, len(self.own), weigh)
                self.own.append(None)
        assert len(self.own) == LAYERS

    def _replace(self, router, layer, weigh):
        ask = router.forward

        def forward(hidden):
            logits = functional.linear(hidden.reshape(-1, router.weight.shape[1]), router.weight)
            found = ask(hidden)
            [place] = [n for n, each in enumerate(found) if not each.dtype.is_floating_point]
            route = torch.from_numpy(self.routes[:, layer].astype(np.int64))
            self.own[layer] = found[place]
            index = torch.where(route < 0, found[place], route)
            given = {place: index}
            given[next(n for n, each in enumerate(found) if n != place and each.shape == index.shape)] = weigh(
                logits, index
            )
            return tuple(given.get(n, each) for n, each in enumerate(found))

        router.forward = forward

    def logprobs(self, sequence):
        """[T] of every token, 0 where it is not in the loss."""
        self.routes = sequence.routes[-1].unpack()
        ids = torch.from_numpy(sequence.ids).long()
        found = self.model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        return torch.cat([found.new_zeros(1), found]) * torch.from_numpy(sequence.loss_mask)

    def differing(self, sequence):
        """[T] share of layers whose router would have chosen other experts."""
        with torch.no_grad():
            self.logprobs(sequence)
        own_TL = torch.stack(self.own, 1).sort(-1).values.numpy()
        return (own_TL != np.sort(self.routes, -1)).any(-1).mean(-1)


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_log_probabilities_and_gradients_are_those_of_the_experts_that_were_sampled(family, make_groups):
    folder, weigh = family
    engine, sequences = TorchTrainEngine.create(config(folder)), routed(make_groups())
    assert engine.replay_problem == ""
    reference = Replayed(folder, weigh)
    wanted = [reference.logprobs(sequence) for sequence in sequences]
    for found, each in zip(engine.logprobs(sequences), wanted, strict=True):
        np.testing.assert_allclose(found, each.detach().numpy(), atol=2e-5)
    advantages = [torch.from_numpy(sequence.extras["advantage"] * sequence.loss_mask) for sequence in sequences]
    total = sum(int(sequence.loss_mask.sum()) for sequence in sequences)
    (-sum((each * advantage).sum() for each, advantage in zip(wanted, advantages, strict=True)) / total).backward()
    engine.forward_backward(sequences, weighted)
    gradients = {name: parameter.grad for name, parameter in reference.model.named_parameters()}
    found = {piece.name: piece.parameter.grad for piece in engine._policy.pieces if piece.name in gradients}
    assert found.keys() == gradients.keys()
    for name, wanted in gradients.items():
        torch.testing.assert_close(found[name], wanted.float(), atol=2e-5, rtol=1e-3, msg=name)
    router = next(name for name in gradients if name.endswith(("gate.weight", "router.weight")))
    assert gradients[router].abs().max() > 1e-3


def test_sinks_and_biases_of_gpt_oss_do_not_matter_to_its_routers(tmp_path, make_groups):
    """A route that the routers would choose themselves changes nothing; another one does."""
    engine = TorchTrainEngine.create(config(write_model(tmp_path)))
    sequences, own = make_groups(), []
    routers = [each for name, each in engine._policy.model.whole.named_modules() if name.endswith(".mlp.router")]
    for router in routers:
        router.register_forward_hook(lambda _, __, found: own.append(found[-1].numpy()))
    before = engine.logprobs(sequences[:1])[0]
    length = len(sequences[0].ids)
    ids_TLK = np.full((length, len(routers), own[0].shape[1]), -1)
    ids_TLK[: len(own[0])] = np.stack(own[: len(routers)], 1)
    replayed = engine.logprobs([replace(sequences[0], routes=(Routes.pack(ids_TLK),))])[0]
    np.testing.assert_allclose(replayed, before, atol=1e-6)
    other = engine.logprobs([replace(sequences[0], routes=(Routes.pack(np.where(ids_TLK < 0, -1, ids_TLK ^ 1)),))])[0]
    assert abs(other - before).max() > 1e-4


@pytest.mark.parametrize("settings", [{"activation_checkpointing": True}, {"max_tokens_per_microbatch": 16}, {}])
def test_what_is_recomputed_or_cut_into_micro_batches_follows_the_same_routes(mixture, make_groups, settings):
    sequences = routed(make_groups())
    gradients = []
    for changes in ({"options": {"share_prompts": False}}, settings):
        engine = TorchTrainEngine.create(config(mixture, **{"max_tokens_per_microbatch": 4096, **changes}))
        engine.forward_backward(sequences, weighted)
        gradients.append({piece.name: piece.parameter.grad for piece in engine._policy.pieces})
    for name, wanted in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], wanted, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("replays", [True, False])
def test_the_loss_learns_in_how_many_layers_the_predicting_token_was_sampled_otherwise(mixture, make_groups, replays):
    """Replayed, each layer is asked with the experts of the layers before it replaced; else with none replaced."""
    sequences, reference = routed(make_groups(), unknown=0.2), Replayed(mixture, FAMILIES["qwen3_moe"][1])
    wanted = []
    for sequence in sequences:
        route_TLK = sequence.routes[-1].unpack()
        if replays:
            share_T = reference.differing(sequence)
        else:
            nothing = Routes.pack(np.full_like(route_TLK, -1))
            reference.differing(replace(sequence, routes=(nothing,)))
            own = torch.stack(reference.own, 1).sort(-1).values.numpy()
            share_T = (own != np.sort(route_TLK, -1)).any(-1).mean(-1)
        share_T[route_TLK[:, 0, 0] < 0] = -1
        wanted += share_T[np.flatnonzero(sequence.loss_mask) - 1].tolist()
    seen = []

    def loss(tokens):
        seen.extend(tokens.extras["routes_differ"].tolist())
        return weighted(tokens)

    settings = {"replay_routes": replays, "share_prompts": False}
    engine = TorchTrainEngine.create(config(mixture, options=settings, max_tokens_per_microbatch=16))
    engine.forward_backward(sequences, loss)
    assert sorted(seen) == sorted(wanted)
    assert {-1.0, 0.5, 1.0} <= set(seen)
    plain = [replace(sequence, routes=()) for sequence in sequences]
    same = [np.array_equal(a, b) for a, b in zip(engine.logprobs(sequences), engine.logprobs(plain), strict=True)]
    assert all(same) is not replays


def test_the_first_policy_and_sequences_without_routes_choose_for_themselves(mixture, make_groups):
    engine, plain = TorchTrainEngine.create(config(mixture)), make_groups()
    sequences = routed(plain)
    wanted = engine.logprobs(plain)
    for found in (engine.logprobs(sequences, reference=True), engine.logprobs(plain)):
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one, other)
    assert any((a != b).any() for a, b in zip(engine.logprobs(sequences), wanted, strict=True))
    adapted = TorchTrainEngine.create(config(mixture, lora_rank=2))
    for one, other in zip(adapted.logprobs(sequences, reference=True), wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.mesh(dp=2, cp=2)
def test_ranks_replay_as_one_process_also_where_some_have_no_routes(mesh, mixture, make_groups):
    def train(engine):
        reported, differ = [], []

        def loss(tokens):
            differ.extend(tokens.extras.get("routes_differ", torch.zeros(0)).tolist())
            return weighted(tokens)

        for seed in range(3):
            plain = make_groups(seed=seed)
            sequences = [*routed(plain[:4], seed=seed), *plain[4:]]
            metrics = engine.forward_backward(sequences, loss)
            reported += [metrics["loss"].value, metrics["weight"].value, engine.step()["grad_norm"].value]
        weights = {name: tensor.clone() for name, tensor in engine.weights()}
        asked = routed(make_groups(seed=9))
        return (reported, weights, engine.logprobs(asked), engine.logprobs(asked, reference=True)), differ

    (many, _), (one, differ) = (train(TorchTrainEngine.create(config(mixture), each)) for each in (mesh, None))
    assert_same(many, one)
    assert 0 < np.mean(np.array(differ) > 0) < 1


def test_routes_of_another_model_are_refused_and_what_cannot_replay_says_why(mixture, model_folder, make_groups):
    engine, plain = TorchTrainEngine.create(config(mixture)), make_groups()[:1]

    def ask(ids_TLK):
        return engine.logprobs([replace(plain[0], routes=(Routes.pack(ids_TLK),))])

    for shape, number in [((1, 3, 2), 0), ((1, 2, 3), 0), ((1, 2, 2), 8)]:
        with pytest.raises(ModelError, match="routes must be of 2 layers with 2 of 8 experts, as Qwen3MoeForCausalLM"):
            ask(np.full(shape, number))
    dense = TorchTrainEngine.create(config(model_folder))
    assert "no routers" in dense.replay_problem
    with pytest.raises(ModelError, match="Qwen3ForCausalLM cannot be replayed: the model has no routers"):
        dense.logprobs([replace(plain[0], routes=(Routes.pack(np.zeros((1, 2, 2), int)),))])


@pytest.mark.parametrize(
    ("family", "settings", "problem"),
    [
        ("phimoe", {}, "PhimoeTopKRouter does not choose by topk"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy", **GROUPS}, "DeepseekV2TopkRouter weighs experts by"),
    ],
)
def test_routers_that_are_not_understood_are_named(family, settings, problem, tmp_path):
    engine = TorchTrainEngine.create(config(write(tmp_path, family, **settings)))
    assert engine.replay_problem.startswith(problem)


def test_layers_without_experts_have_rows_that_are_not_read(tmp_path, make_groups):
    engine = TorchTrainEngine.create(config(write(tmp_path, "glm4_moe", first_k_dense_replace=1)))
    plain, rng = make_groups()[0], np.random.default_rng(0)
    ids_TLK = np.tile([[[5, 6], [1, 2]]], (len(plain.ids), 1, 1))

    def ask(ids_TLK):
        return engine.logprobs([replace(plain, routes=(Routes.pack(ids_TLK),))])[0]

    wanted = ask(ids_TLK)
    ids_TLK[:, 0] = rng.integers(0, 8, (len(plain.ids), 2))
    np.testing.assert_array_equal(ask(ids_TLK), wanted)
    ids_TLK[:, 1] = [3, 4]
    assert (ask(ids_TLK) != wanted).any()


def test_experts_of_a_bfloat16_model_follow_routes_too(mixture, make_groups):
    exact, coarse = (TorchTrainEngine.create(config(mixture, dtype=dtype)) for dtype in ("float32", "bfloat16"))
    sequences = routed(make_groups(), unknown=0)
    found = [np.concatenate(engine.logprobs(sequences)) for engine in (exact, coarse)]
    assert abs(found[0] - found[1]).max() < 0.1

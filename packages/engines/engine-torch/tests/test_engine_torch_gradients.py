"""Packed, prefix-sharing gradients against plain transformers, one sequence at a time, in float64."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import AutoModelForCausalLM, Gemma3TextConfig, MistralConfig, MistralForCausalLM
from varlen_on_cpu import documented

from offbeat_core import TrainEngineConfig
from offbeat_engine_torch import TorchTrainEngine
from offbeat_engine_torch._layers.attention import packed_attention
from offbeat_engine_torch._layers.plan import AttentionPlan
from offbeat_testing import tiny_model
from offbeat_training import lay_out, plan_packs


def double_engine(folder, **changes):
    """An engine whose weights and computation are float64."""
    options = changes.pop("options", {})
    config = TrainEngineConfig(model_path=str(folder), device="cpu", options=options, **changes)
    engine = TorchTrainEngine.create(config)
    engine._policy.model.whole.double()
    return engine


def reference_gradients(folder, sequences, *, temperature=1.0, entropy_weight=0.0):
    """Loss and gradients of sum(logp * advantage + entropy_weight * entropy), one unpadded sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    total = sum(int(s.loss_mask.sum()) for s in sequences)
    loss = torch.zeros((), dtype=torch.float64)
    for s in sequences:
        ids = torch.from_numpy(s.ids.astype(np.int64))
        logp = torch.log_softmax(model(ids[None], use_cache=False).logits[0, :-1] / temperature, -1)
        mask = torch.from_numpy(s.loss_mask[1:])
        chosen = logp.gather(1, ids[1:, None])[:, 0][mask]
        entropy = -(logp.exp() * logp).sum(-1)[mask]
        advantage = torch.from_numpy(s.extras["advantage"][1:])[mask].double()
        loss = loss - (chosen * advantage + entropy_weight * entropy).sum() / total
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}


def engine_gradients(engine, sequences, loss):
    value = engine.forward_backward(sequences, loss)["loss"].value
    return value, {name: p.grad for name, p in engine._optimizer.parameters.items()}


def assert_same(got, wanted):
    """Equal up to the float32 rounding that transformers' norms and rotary angles do even in a float64 model."""
    assert got[0] == pytest.approx(wanted[0], rel=1e-6)
    assert got[1].keys() == wanted[1].keys()
    for name, grad in wanted[1].items():
        assert (got[1][name] - grad).abs().max() <= 1e-6 * grad.abs().max(), name


@pytest.fixture(scope="module", params=[("qwen3", True), ("qwen2", False), ("llama", True)], ids=str)
def folder(request, tmp_path_factory):
    family, tied = request.param
    return tiny_model(tmp_path_factory.mktemp("family") / family, family, tied=tied, hidden_size=32)


@pytest.mark.parametrize("kernel", ["split", "rows"])
@pytest.mark.parametrize("share", [True, False], ids=["shared", "unshared"])
def test_gradients_are_those_of_single_sequences(folder, kernel, share, make_groups, weighted_loss):
    engine = double_engine(folder, options={"share_prompts": share}, max_tokens_per_microbatch=64)
    engine._policy.kernel = kernel
    sequences = make_groups()
    assert_same(engine_gradients(engine, sequences, weighted_loss), reference_gradients(folder, sequences))


def test_activation_checkpointing_changes_no_gradient(folder, make_groups, weighted_loss):
    engine = double_engine(folder, activation_checkpointing=True)
    sequences = make_groups()
    assert_same(engine_gradients(engine, sequences, weighted_loss), reference_gradients(folder, sequences))


@pytest.mark.parametrize("budget_tokens", [16, 48, 8192])
def test_calls_and_micro_batches_add_up(model_folder, make_groups, weighted_loss, budget_tokens):
    sequences = make_groups(num_prompts=4)
    engine = double_engine(model_folder, max_tokens_per_microbatch=budget_tokens)
    total = sum(int(s.loss_mask.sum()) for s in sequences)

    def share_of_all(tokens):
        return weighted_loss(dataclasses.replace(tokens, total_tokens=total))

    first = engine_gradients(engine, sequences[:5], share_of_all)[0]
    second, grads = engine_gradients(engine, sequences[5:], share_of_all)
    assert_same((first + second, grads), reference_gradients(model_folder, sequences))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("one_chunk", [True, False])
def test_entropy_and_temperature(model_folder, make_groups, temperature, one_chunk, monkeypatch):
    if not one_chunk:
        monkeypatch.setattr("offbeat_training._logprobs.CHUNK_BYTES", 0)
    engine = double_engine(model_folder, options={"entropy_gradient": True, "temperature": temperature})

    def loss(tokens):
        return -(
            tokens.logprobs_N * tokens.extras["advantage"] + 0.3 * tokens.entropy_N
        ).sum() / tokens.total_tokens, {}

    sequences = make_groups(num_prompts=6)
    wanted = reference_gradients(model_folder, sequences, temperature=temperature, entropy_weight=0.3)
    assert_same(engine_gradients(engine, sequences, loss), wanted)


def test_entropy_carries_no_gradient_unless_asked(model_folder, make_groups, weighted_loss):
    def look(tokens):
        assert not tokens.entropy_N.requires_grad
        assert tokens.entropy_N.min() >= 0
        return weighted_loss(tokens)

    double_engine(model_folder).forward_backward(make_groups(), look)


def test_a_sliding_window_reaches_across_the_shared_prompt(tmp_path, make_groups, weighted_loss):
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MistralConfig(vocab_size=300, num_key_value_heads=2, sliding_window=5, **shape)
    MistralForCausalLM(config).save_pretrained(tmp_path)
    sequences = make_groups()
    engine = double_engine(tmp_path)
    assert_same(engine_gradients(engine, sequences, weighted_loss), reference_gradients(tmp_path, sequences))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_capped_logits_give_the_gradients_of_single_sequences(tmp_path, temperature, make_groups, weighted_loss):
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    config = Gemma3TextConfig(vocab_size=300, num_key_value_heads=2, final_logit_softcapping=0.2, **shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    sequences = make_groups()
    engine = double_engine(tmp_path, options={"temperature": temperature})
    wanted = reference_gradients(tmp_path, sequences, temperature=temperature)
    assert_same(engine_gradients(engine, sequences, weighted_loss), wanted)


def test_the_flat_form_for_variable_length_kernels_says_the_same_as_rows(make_groups):
    """torch's varlen kernel needs a GPU; its inputs are checked here by computing what it documents."""
    sequences = make_groups()
    pack = lay_out(sequences, plan_packs(sequences, budget=10**4, share_prompts=True)[0])
    plan = AttentionPlan(pack.segments, torch.device("cpu"))
    packed = plan.varlen()
    queries, keys, longest_query, longest_key = vars(packed.bounds).values()
    seen = {}
    for row in range(len(queries) - 1):
        row_keys = packed.index[keys[row] : keys[row + 1]].tolist()
        row_queries = range(int(queries[row]), int(queries[row + 1]))
        assert len(row_queries) <= longest_query
        assert len(row_keys) <= longest_key
        for back, query in enumerate(reversed(row_queries)):  # causal, aligned at the end of the keys
            seen[query] = row_keys[: len(row_keys) - back]
    wanted = {}
    for rows in plan.joined(None):
        key, query = rows.key.view(rows.num_rows, -1), rows.query.view(rows.num_rows, -1)
        real = range(query.numel()) if rows.real is None else rows.real.tolist()
        for place in real:
            row, column = divmod(place, query.shape[1])
            wanted[int(query[row, column])] = key[row][rows.mask[row, 0, column]].tolist()
    assert seen == wanted
    assert sorted(seen) == list(range(len(pack.ids_T)))


def varlen_before_2_13(query, key, value, cu_q, cu_k, max_q, max_k, *, return_aux=None, scale, window_size):
    return documented(query, key, value, cu_q, cu_k, max_q, max_k, scale=scale, window_size=window_size)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("call", [documented, varlen_attn, varlen_before_2_13])
def test_variable_length_attention_is_asked_for_what_rows_compute(window, call, make_groups, monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", call)
    sequences = make_groups()
    pack = lay_out(sequences, plan_packs(sequences, budget=10**4, share_prompts=True)[0])
    plan = AttentionPlan(pack.segments, torch.device("cpu"))
    draw = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(1, heads, len(pack.ids_T), 16, generator=draw).bfloat16().requires_grad_() for heads in (4, 2, 2)
    ]
    found = {}
    for kernel in ("varlen", "rows"):
        out, _ = packed_attention(None, *tensors, sliding_window=window, **plan.arguments(kernel))
        if kernel == "varlen":
            assert list(plan._made) == ["varlen"], "a mask was made"
        found[kernel] = [out.float(), *torch.autograd.grad(out.float().square().sum(), tensors)]
    for one, other in zip(found["varlen"], found["rows"], strict=True):
        assert (one.float() - other.float()).abs().max() <= 0.02 * other.float().abs().max()


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("kernel", ["split", "varlen", "rows"])
def test_what_attention_gives_can_be_cut_with_view(kernel, kv_heads, make_groups):
    """JetMoE does, other than most families."""
    for sequences in (make_groups(), make_groups()[:1]):
        pack = lay_out(sequences, plan_packs(sequences, budget=10**4, share_prompts=True)[0])
        plan = AttentionPlan(pack.segments, torch.device("cpu"))
        tensors = [torch.randn(1, heads, len(pack.ids_T), 16) for heads in (4, kv_heads, kv_heads)]
        assert packed_attention(None, *tensors, **plan.arguments(kernel))[0].is_contiguous()

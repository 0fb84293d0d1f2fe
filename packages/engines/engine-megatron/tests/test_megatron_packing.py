"""Packs and zigzag cuts: every loss token is computed once, by its predictor, wherever that lies."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat_core import Routes, TrainEngineConfig, TrainSequence
from offbeat_engine_megatron._layout import Parallel, plan_layout
from offbeat_engine_megatron._packing import (
    attend,
    causal_runs,
    cut,
    gather_values,
    lay_out_all,
    token_logprobs,
    zigzag,
)
from offbeat_testing import tiny_model
from offbeat_training import Family


def sequences_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [
        TrainSequence(ids=rng.integers(1, 1000, n).astype(np.int32), loss_mask=np.arange(n) >= rng.integers(1, n + 1))
        for n in lengths
    ]


def alone(sequences, *members):
    """Each of these sequences as a family of its own."""
    return [
        Family(members=(each,), prefix=0, num_tokens=int(np.flatnonzero(sequences[each].loss_mask)[-1]))
        for each in members
    ]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_rank_has_the_routes_of_its_tokens_and_none_of_padding(num_ranks):
    sequences = []
    for number, sequence in enumerate(sequences_of([5, 17, 9])):
        route = np.stack([sequence.ids % 7, np.full(len(sequence.ids), number)], -1)[:, None]
        sequences.append(replace(sequence, routes=(Routes.pack(route),)))
    parallel = Parallel(cp=num_ranks, tp=2, sp=True)
    [pack] = lay_out_all(sequences, [alone(sequences, 0, 1, 2)], parallel)
    seen = 0
    for rank in range(num_ranks):
        part = cut(pack, rank, num_ranks)
        assert part.routes_TLK.shape == (part.ids_1L.numel(), 1, 2)
        known = part.routes_TLK[:, 0, 0] >= 0
        assert torch.equal(part.routes_TLK[known, 0, 0].long(), part.ids_1L[0][known] % 7)
        assert not part.ids_1L[0][~known].any()
        seen += int(known.sum())
    assert seen == sum(int(np.flatnonzero(each.loss_mask)[-1]) for each in sequences)


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)
PARALLEL = st.builds(
    lambda cp, tp: Parallel(cp=cp, tp=tp, sp=tp > 1), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 4])
)


@given(LENGTHS, PARALLEL, st.integers(0, 9))
def test_the_ranks_answers_laid_end_to_end_are_those_of_the_pack(lengths, parallel, seed):
    sequences = sequences_of(lengths, seed)
    members = [number for number, sequence in enumerate(sequences) if sequence.loss_mask.any()]
    [pack] = lay_out_all(sequences, [alone(sequences, *members)], parallel)
    assert sum(pack.lengths) == len(pack.ids_T)
    assert len(pack.ids_T) % parallel.pack_multiple == 0
    wanted = [(s.ids[t - 1], s.ids[t]) for s in (sequences[m] for m in members) for t in np.flatnonzero(s.loss_mask)]
    parts = [cut(pack, rank, parallel.cp) for rank in range(parallel.cp)]
    everywhere = np.zeros((parallel.cp * max(parts[0].width, 1), 2), np.int64)
    for rank, part in enumerate(parts):
        assert part.ids_1L.numel() * parallel.cp == len(pack.ids_T)
        pairs = torch.stack([part.ids_1L[0, part.predictor_n], part.target_n], 1)
        everywhere[rank * part.width : rank * part.width + len(pairs)] = pairs
    assert [tuple(pair) for pair in everywhere[parts[0].place_N.numpy()]] == wanted
    joined = torch.cat([part.ids_1L[0] for part in parts])
    if parallel.cp > 1:
        np.testing.assert_array_equal(joined[parts[0].gathered_T], pack.ids_T)


@given(LENGTHS, st.integers(0, 9))
def test_tokens_further_on_are_those_of_the_same_sequence(lengths, seed):
    """Inputs of multi-token prediction: tokens read beside each one, and places that predict each loss token."""
    sequences = sequences_of(lengths, seed)
    members = [number for number, sequence in enumerate(sequences) if sequence.loss_mask.any()]
    [pack] = lay_out_all(sequences, [alone(sequences, *members)], Parallel())
    starts = np.cumsum((0, *pack.lengths))
    for depth, mtp in enumerate(cut(pack, 0, 1, mtp_layers=2).mtp, 1):
        own = [pack.ids_T[start:end] for start, end in itertools.pairwise(starts)]
        later = [[*ids[depth:], *[0] * min(depth, len(ids))] for ids in own]
        assert mtp.ids_1L[0].tolist() == [number for ids in later for number in ids]
        wanted = [
            (start + t - 1 - depth, sequences[m].ids[t])
            for start, m in zip(starts, members, strict=False)
            for t in np.flatnonzero(sequences[m].loss_mask)
            if t > depth
        ]
        assert list(zip(mtp.predictor_n.tolist(), mtp.target_n.tolist(), strict=True)) == wanted


def test_the_zigzag_gives_each_rank_the_chunks_that_mirror_each_other():
    assert zigzag((8, 4), 0, 2).tolist() == [0, 1, 6, 7, 8, 11]
    assert zigzag((8, 4), 1, 2).tolist() == [2, 3, 4, 5, 9, 10]


def dense_attention(query, key, value, lengths, scale):
    """[T, H, D] of the whole pack, with one mask for all of it."""
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    order = torch.arange(len(owner))
    seen = (owner[:, None] == owner) & (order[:, None] >= order)
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


def varlen_as_documented(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size):
    """What torch says that `varlen_attn` computes, causal from the end of each sequence's keys."""
    assert window_size == (-1, 0)
    parts = []
    for n in range(len(cu_q) - 1):
        q, (k, v) = query[cu_q[n] : cu_q[n + 1]], (each[cu_k[n] : cu_k[n + 1]] for each in (key, value))
        assert len(q) <= max_q
        assert len(k) <= max_k
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v))
    return torch.cat(parts)


@pytest.mark.parametrize("kernel", ["runs", "varlen"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_runs_of_all_ranks_attend_as_one_mask_over_the_pack_does(num_ranks, kernel, monkeypatch):
    """In float64, with the gradients of queries, keys and values; varlen needs a GPU: here by what it documents."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_as_documented)
    lengths = tuple(2 * num_ranks * chunks for chunks in (3, 1, 5))
    draw = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(sum(lengths), heads, 8, dtype=torch.float64, generator=draw).requires_grad_() for heads in (4, 2, 2)
    ]
    places = [torch.as_tensor(zigzag(lengths, rank, num_ranks)) for rank in range(num_ranks)]
    end_to_end = torch.cat(places)
    gathered_T = end_to_end.argsort() if num_ranks > 1 else None
    query, key, value = tensors
    found = torch.empty_like(query)
    for rank, place in enumerate(places):
        runs = causal_runs(lengths, gathered_T, rank, num_ranks)
        own = slice(None) if runs.key_K is None else end_to_end[runs.key_K]
        found = found.index_copy(0, place, attend(query[place], key[own], value[own], runs, scale=0.3, kernel=kernel))
        assert sum(runs.num_keys) * 2 * num_ranks == (2 * num_ranks + 1) * sum(lengths) or num_ranks == 1
    wanted = dense_attention(*tensors, lengths, 0.3)
    weights = torch.randn(wanted.shape, dtype=torch.float64, generator=draw)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad((each * weights).sum(), tensors) for each in (found, wanted)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("device", "dtype", "head_size", "asked", "wanted"),
    [
        ("varlen", "bfloat16", 32, "auto", "varlen"),
        ("varlen", "bfloat16", 32, "runs", "runs"),
        ("varlen", "bfloat16", 36, "auto", "runs"),
        ("varlen", "float32", 32, "auto", "runs"),
        ("split", "bfloat16", 32, "auto", "runs"),
    ],
)
def test_flash_attention_is_taken_where_device_and_format_have_it(
    device, dtype, head_size, asked, wanted, tmp_path, monkeypatch
):
    folder = tiny_model(tmp_path / "model", "qwen3", config={"head_dim": head_size})
    monkeypatch.setattr("offbeat_device._cpu.CpuDevice.packed_attention", device)
    config = TrainEngineConfig(
        model_path=str(folder), device="cpu", dtype=dtype, options={"attention": asked, "tensor_parallel": 2}
    )
    text = str(plan_layout(config, 2))
    assert text == f"tp 2, local layers (TransformerEngine needs a GPU: got cpu), attention by {wanted}"


def test_interleaved_stages_get_packs_of_one_length():
    sequences = sequences_of([30, 5, 9, 17])
    share = [alone(sequences, *members) for members in ([0], [1, 2], [3], [])]
    packs = lay_out_all(sequences, share, Parallel(pp=2, vpp=2, cp=2))
    assert len({len(pack.ids_T) for pack in packs}) == 1


@pytest.mark.mesh(tp=2)
@pytest.mark.mesh(tp=4)
@pytest.mark.parametrize("chunk_bytes", [1, 2**26], ids=["chunks", "one chunk"])
def test_ranks_that_share_the_vocabulary_find_what_one_would(mesh, chunk_bytes, monkeypatch):
    """In float64: values on every rank, the hidden states' gradient in parts, the head's by rows."""
    monkeypatch.setattr("offbeat_training._logprobs.CHUNK_BYTES", chunk_bytes)
    torch.manual_seed(0)
    hidden = torch.randn(40, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(12, 6, dtype=torch.float64, requires_grad=True)
    target, factor = torch.randint(12, (40,)), torch.randn(2, 40, dtype=torch.float64)
    logp = torch.log_softmax(2.0 * hidden @ weight.T, -1)
    wanted = torch.stack([logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp).sum(1)])
    gradients = torch.autograd.grad((wanted * factor).sum(), (hidden, weight))
    group = mesh.group("tp")
    own = weight.detach().chunk(group.size)[group.rank].clone().requires_grad_()
    whole = hidden.detach().clone().requires_grad_()
    found = torch.stack(token_logprobs(whole, own, target, group, scale=2.0, entropy_gradient=True))
    (found * factor).sum().backward()
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(group.all_reduce(whole.grad), gradients[0])
    torch.testing.assert_close(own.grad, gradients[1].chunk(group.size)[group.rank])


@pytest.mark.mesh(cp=2)
@pytest.mark.mesh(cp=4)
def test_context_parallel_ranks_gather_what_each_has_found(mesh):
    """Every rank has all values in the order of the pack, and gets back the gradient of its own."""
    group = mesh.group("cp")
    sequences = sequences_of([9, 14, 6], 2)
    [pack] = lay_out_all(sequences, [alone(sequences, 0, 1, 2)], Parallel(cp=group.size))
    local = cut(pack, group.rank, group.size)
    own = local.target_n.double().requires_grad_()
    found = gather_values(own, local.place_N, local.width, group)
    np.testing.assert_array_equal(found.detach().numpy(), pack.target_N)
    (found * torch.from_numpy(pack.target_N)).sum().backward()
    assert torch.equal(own.grad, local.target_n.double())

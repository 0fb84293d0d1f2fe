"""Attention with sinks: packed attention and its gradients are those of a softmax with one more logit."""

import numpy as np
import pytest
import torch
import varlen_on_cpu  # noqa: F401  adds the kernels

from offbeat_core import ConfigError, TrainEngineConfig
from offbeat_engine_torch import TorchTrainEngine
from offbeat_engine_torch._layers.attention import packed_attention
from offbeat_engine_torch._layers.plan import AttentionPlan
from offbeat_testing import tiny_model
from offbeat_training import lay_out, plan_packs


def softmax_with_sinks(pack, query, key, value, sinks, window):
    """[1, T, H, D]: every token's scores and its sink in one softmax, by a mask over the whole pack."""
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    place = np.full((len(pack.segments), len(pack.ids_T)), -1)  # of each token in each segment's sequence
    seen = np.zeros((len(pack.ids_T),) * 2, bool)
    for row, segment in zip(place, pack.segments, strict=True):
        own = np.arange(segment.start, segment.start + segment.length)
        parent = pack.segments[segment.parent] if segment.parent >= 0 else None
        before = np.arange(parent.start, parent.start + parent.length) if parent else own[:0]
        both = np.concatenate([before, own])
        row[both] = np.arange(len(both))
        back = row[own][:, None] - row[both][None]
        seen[np.ix_(own, both)] = (back >= 0) & (back < (window or len(both)))
    scores = (query[0] @ key[0].mT) * query.shape[-1] ** -0.5
    scores = scores.masked_fill(~torch.from_numpy(seen), -torch.inf)
    scores = torch.cat([scores, sinks[:, None, None].expand(-1, scores.shape[1], 1)], -1)
    return (scores.softmax(-1)[..., :-1] @ value[0]).transpose(0, 1)[None]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(
    ("kernel", "dtype", "tolerance"),
    [
        ("split", torch.float64, 1e-9),
        ("rows", torch.float64, 1e-9),
        ("rows", torch.bfloat16, 0.03),
        ("varlen", torch.bfloat16, 0.03),
    ],
    ids=str,
)
def test_packed_attention_with_sinks_is_a_softmax_with_one_more_logit(kernel, dtype, tolerance, window, make_groups):
    """Its output, and the gradients of queries, keys, values and sinks, in packs with shared prompts."""
    sequences = make_groups()
    pack = lay_out(sequences, plan_packs(sequences, budget=10**4, share_prompts=True)[0])
    plan = AttentionPlan(pack.segments, torch.device("cpu"))
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, heads, len(pack.ids_T), 16) for heads in (4, 2, 2)]
    tensors = [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]
    sinks = torch.tensor([-2.0, 0.0, 1.0, 3.0], dtype=torch.float64).to(torch.promote_types(dtype, torch.float32))
    sinks.requires_grad_()
    weight = torch.randn(1, len(pack.ids_T), 4, 16, generator=draw, dtype=torch.float64)

    def compared(attend):
        out = attend()
        return [out, *torch.autograd.grad((out.double() * weight).sum(), [*tensors, sinks])]

    found = compared(
        lambda: packed_attention(None, *tensors, sliding_window=window, s_aux=sinks, **plan.arguments(kernel))[0]
    )
    wanted = compared(lambda: softmax_with_sinks(pack, *(each.double() for each in tensors), sinks.double(), window))
    for one, other in zip(found, wanted, strict=True):
        assert one.isfinite().all()
        assert (one.double() - other.double()).abs().max() <= tolerance * other.double().abs().max()


def test_tensor_parallelism_of_sinks_is_refused(tmp_path):
    folder = tiny_model(tmp_path / "granite_swa", "granite_swa", hidden_size=32)
    config = TrainEngineConfig(model_path=str(folder), device="cpu", options={"tensor_parallel": 2})
    with pytest.raises(ConfigError, match="tp = 2: the attention sinks of granite_swa are not shared out: set tp to 1"):
        TorchTrainEngine.plan(config, num_ranks=2)

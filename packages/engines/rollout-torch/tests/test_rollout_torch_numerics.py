"""The decoder against transformers: every family, tied and untied, every storage layout, both kinds of pass."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import rms_norm
from torch.utils._python_dispatch import TorchDispatchMode

from offbeat_device import can_pack
from offbeat_rollout_torch import _attention
from offbeat_rollout_torch._attention import Chunk, DecodeAttention, PrefillAttention, prefill_group
from offbeat_rollout_torch._cache import KVCache
from offbeat_rollout_torch._decoder import (
    DecoderWeights,
    decode_hidden,
    decode_logits,
)
from offbeat_rollout_torch._families import read_architecture, rotations
from offbeat_rollout_torch._layers.linear import Linear
from offbeat_rollout_torch._loading import WeightWriter, load_weights
from offbeat_testing import reference_model, tiny_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "qwen3-tied": ("qwen3", True, {}),
    "qwen3-untied": ("qwen3", False, {}),
    "qwen3-bias": ("qwen3", True, {"attention_bias": True}),
    "qwen2-tied": ("qwen2", True, {}),
    "qwen2-untied": ("qwen2", False, {}),
    "llama-tied": ("llama", True, {}),
    "llama-untied": ("llama", False, {}),
    "llama-biases": ("llama", False, {"attention_bias": True, "mlp_bias": True}),
    "llama3-rope": ("llama", True, {"rope_parameters": LLAMA3}),
    "linear-rope": ("llama", True, {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "qwen3_moe": ("qwen3_moe", False, {"num_experts": 6, "num_experts_per_tok": 3}),
    "qwen3_moe-not-normalised": ("qwen3_moe", True, {"norm_topk_prob": False}),
    "qwen3_5_text": ("qwen3_5_text", True, {}),
    "qwen3_5_text-untied": ("qwen3_5_text", False, {"num_hidden_layers": 5, "full_attention_interval": 3}),
    "qwen3_5_text-biases": ("qwen3_5_text", True, {"attention_bias": True}),
    "one-kv-head-each": ("llama", True, {"num_key_value_heads": 4}),
}


@pytest.fixture(params=VARIANTS, scope="module")
def folder(request, tmp_path_factory):
    family, tied, config = VARIANTS[request.param]
    # Wide enough that some matrices are packed and some are not.
    return tiny_model(tmp_path_factory.mktemp("m"), family, tied=tied, hidden_size=192, config=config)


def load(folder, *, pack=True, dtype=torch.float32):
    architecture = read_architecture(folder)
    weights = DecoderWeights(architecture, dtype, torch.device("cpu"), pack=pack)
    load_weights(weights, folder)
    return weights


class Passes:
    """Feeds sequences chunk by chunk and collects the logits of every chunk's tokens."""

    def __init__(self, weights, lengths):
        self.weights = weights
        self.cache = KVCache(weights.architecture, 1 << 16, 512, weights.final_norm)
        self.rows = [self.cache.add(length) for length in lengths]
        self.turns = rotations(weights.architecture, 512).to(weights.device)
        self.cache.allocate()

    def prefill(self, sequences, num_tokens):
        chunks = [Chunk(row, n) for row, n in zip(self.rows, num_tokens, strict=True) if n]
        order = sorted(range(len(chunks)), key=lambda i: (prefill_group(chunks[i]), chunks[i].row.index))
        wanted = [i for i, n in enumerate(num_tokens) if n]
        attention = PrefillAttention([chunks[i] for i in order], self.weights.architecture, self.weights.final_norm)
        ids = [sequences[wanted[i]][chunks[i].row.cached : chunks[i].row.cached + chunks[i].num_tokens] for i in order]
        logits = self._logits(torch.cat(ids), attention).split([chunks[i].num_tokens for i in order])
        for chunk in chunks:
            chunk.row.cached += chunk.num_tokens
        return {wanted[i]: part for i, part in zip(order, logits, strict=True)}

    def decode(self, ids_by_sequence):
        by_row = {id(row): i for i, row in enumerate(self.rows)}
        order = [by_row[id(row)] for band in self.cache.bands for row in band.rows]
        attention = DecodeAttention(self.cache.bands, self.weights.architecture, self.weights.final_norm)
        logits = self._logits(torch.stack([ids_by_sequence[i] for i in order]), attention)
        for row in self.rows:
            row.cached += 1
        return {i: logits[place] for place, i in enumerate(order)}

    def _logits(self, ids, attention):
        return decode_logits(self.weights, decode_hidden(self.weights, ids, self.turns, attention))


@pytest.mark.parametrize("pack", [True, False])
def test_prefill_chunks_and_decoding_agree_with_transformers(folder, pack):
    """Sequences of different lengths, in chunks of different lengths, then token by token, in two bands."""
    lengths = [9, 21, 70, 5]
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, 320, (length + 3,), generator=generator) for length in lengths]
    with torch.inference_mode():
        model = reference_model(folder)
        expected = [model(ids[None]).logits[0] for ids in sequences]
        weights = load(folder, pack=pack)
        passes = Passes(weights, [length + 3 for length in lengths])
        got = [[] for _ in lengths]
        for counts in ([4, 21, 33, 0], [5, 0, 37, 5]):
            for i, logits in passes.prefill(sequences, counts).items():
                got[i].append(logits)
        for step in range(3):
            for i, row in passes.decode([ids[n + step] for ids, n in zip(sequences, lengths, strict=True)]).items():
                got[i].append(row[None])
        for parts, logits in zip(got, expected, strict=True):
            ours, theirs = torch.cat(parts).log_softmax(-1), logits.log_softmax(-1)
            assert float((ours - theirs).abs().max()) < 1e-4


def test_a_prefill_waits_for_nothing_that_the_device_computes(tmp_path):
    """The device meta has no values: a shape that depends on one raises."""
    architecture = read_architecture(tiny_model(tmp_path / "m"))
    weights = DecoderWeights(architecture, torch.float32, torch.device("meta"), pack=False)
    passes = Passes(weights, [9, 30, 30])
    sequences = [torch.zeros(30, dtype=torch.int64, device="meta") for _ in range(3)]
    for counts in ([4, 20, 17], [5, 0, 13]):  # padded to each other, and then rows that are not neighbours
        passes.prefill(sequences, counts)


def test_every_tensor_reads_back_as_it_is_in_the_folder(folder, monkeypatch):
    with torch.inference_mode():
        weights = load(folder)
        parameters = dict(reference_model(folder).named_parameters())
        parts = {part for stack in weights.stacks for part in weights.parts_of(stack)}
        assert weights.parameters.keys() - parts | weights.stacks.keys() == parameters.keys()
        for name, tensor in parameters.items():
            assert torch.equal(weights.read(name), tensor), name
        weights.freeze()
        assert weights.layers[0].qkv._packed is not None
        for name, tensor in parameters.items():
            assert torch.equal(weights.read(name), tensor), f"{name} after packing again"
        weights.freeze()
        monkeypatch.setattr(torch.Tensor, "to_dense", None)  # a whole update unpacks nothing
        writer = WeightWriter(weights, ValueError, "an update")
        for name, tensor in parameters.items():
            writer.write(name, tensor + 1)
        for name, tensor in parameters.items():
            assert torch.equal(weights.read(name), tensor + 1), f"{name} after an update"


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_a_prefix_that_is_read_once_attends_as_copies_of_it(tmp_path, dtype, bound):
    """Rows behind one prefix, in two bands, beside a row of its own, against rows that hold all their tokens."""
    architecture, num_prefix = read_architecture(tiny_model(tmp_path / "m")), 150
    like, own = torch.empty(0, dtype=dtype), [3, 70, 20, 64]
    generator = torch.Generator().manual_seed(0)
    heads, num_kv, dim = architecture.num_heads, architecture.num_kv_heads, architecture.head_dim

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    shared, plain = (KVCache(architecture, 1 << 14, 512, like) for _ in range(2))
    prefix = shared.add_prefix(num_prefix)
    rows = [shared.add(num + 1, prefix) for num in own] + [shared.add(31)]
    wholes = [plain.add(num_prefix + num + 1) for num in own] + [plain.add(31)]
    shared.allocate()
    plain.allocate()
    prefix.row.kv.copy_(draw(*prefix.row.kv.shape))
    prefix.row.cached = num_prefix
    for row, whole, num in zip(rows, wholes, [*own, 30], strict=True):
        start = num_prefix if row.band.prefix else 0
        row.kv[:, :, :, :num] = draw(*row.kv.shape[:3], num, dim)
        row.cached, whole.cached = num, start + num
        if start:
            whole.kv[:, :, :, :start] = prefix.row.kv
        whole.kv[:, :, :, start : start + num] = row.kv[:, :, :, :num]
    qkv = draw(len(rows), heads + 2 * num_kv, dim)
    found = []
    for cache, places in ((shared, rows), (plain, wholes)):
        order = [places.index(row) for band in cache.sample_bands for row in band.rows]
        attention = DecodeAttention(cache.sample_bands, architecture, like)
        assert attention.positions_N.tolist() == [places[i].end for i in order]
        out = torch.empty(len(rows), heads * dim, dtype=dtype)
        out[order] = attention(1, qkv[order])
        found.append(out.float())
    assert float((found[0] - found[1]).abs().max()) < bound


@pytest.mark.parametrize("num_rows", [1, 3])
def test_the_fused_attention_of_few_short_rows_agrees_with_two_products(tmp_path, monkeypatch, num_rows):
    architecture, like = read_architecture(tiny_model(tmp_path / "m")), torch.empty(0, dtype=torch.bfloat16)
    cache = KVCache(architecture, 1 << 14, 512, like)
    for number in range(num_rows):
        cache.add(60).cached = 50 - 9 * number
    cache.allocate()
    cache.bands[0].blocks[0].kv.normal_(generator=torch.Generator().manual_seed(0))
    shape = (num_rows, architecture.num_heads + 2 * architecture.num_kv_heads, architecture.head_dim)
    qkv = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    fused = DecodeAttention(cache.bands, architecture, like)(0, qkv)
    monkeypatch.setattr(_attention, "FUSED_UP_TO_TOKENS", 0)
    plain = DecodeAttention(cache.bands, architecture, like)(0, qkv)
    assert not torch.equal(fused, plain), "the same operators ran twice"
    assert float((fused - plain).abs().max()) < 0.03


def test_bfloat16_stays_close(tmp_path):
    folder = tiny_model(tmp_path / "m", "qwen3", hidden_size=192)
    ids = torch.randint(0, 320, (30,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = reference_model(folder)(ids[None]).logits[0].log_softmax(-1)
        passes = Passes(load(folder, dtype=torch.bfloat16), [30])
        got = passes.prefill([ids], [29])[0].log_softmax(-1)
        last = passes.decode([ids[29]])[0].log_softmax(-1)
    assert float((got - expected[:29]).abs().mean()) < 0.1
    assert float((last - expected[29]).abs().mean()) < 0.1


@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_a_bfloat16_decoder_are_not_rounded_where_its_matrices_are_packed(tmp_path, tied):
    if not can_pack(torch.device("cpu"), torch.bfloat16):
        pytest.skip("this processor has no product of bfloat16 matrices")
    folder = tiny_model(tmp_path / "m", "qwen3", tied=tied, hidden_size=192)
    with torch.inference_mode():
        weights = load(folder, dtype=torch.bfloat16)
        hidden = torch.randn(5, 192, generator=torch.Generator().manual_seed(0)).bfloat16()
        found = decode_logits(weights, hidden)
        name = "model.embed_tokens.weight" if tied else "lm_head.weight"
        head, norm = (reference_model(folder).state_dict()[each].bfloat16() for each in (name, "model.norm.weight"))
        assert torch.equal(weights.read(name), head)
        normed = rms_norm(hidden.double(), (192,), norm.double(), weights.architecture.norm_eps)
        wanted = normed @ head.double().T
    assert float((found - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())
    assert float((found.bfloat16() - wanted).abs().max()) > 1e-4 * float(wanted.abs().max())


def test_rotations_are_those_of_transformers():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from offbeat_rollout_torch._families import _architecture, _rope_parameters

    shape = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1, "max_position_embeddings": 512}
    config = LlamaConfig(**shape, rope_parameters=LLAMA3)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(300)[None])
    ours = rotations(_architecture("llama", config.to_dict()), 300)
    np.testing.assert_allclose(ours[..., 0], cos[0, :, :16], atol=1e-5)
    np.testing.assert_allclose(ours[..., 1], sin[0, :, :16], atol=1e-5)
    assert _rope_parameters({"rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 2}}) == {
        "type": "linear",
        "rope_type": "linear",
        "rope_theta": 5.0,
        "factor": 2,
    }


def test_logits_of_bfloat16_weights_are_not_rounded_on_a_gpu():
    """On tensors that have a device and no memory: a CPU has no product of bfloat16 with a float32 result."""
    names = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    with FakeTensorMode():
        like = torch.empty(0, device="cuda", dtype=torch.bfloat16)
        head = Linear(
            300, 64, bias=False, like=like, pack=False, shared=torch.empty(300, 64, device="cuda", dtype=like.dtype)
        )
        x = torch.empty(7, 64, device="cuda", dtype=torch.bfloat16)
        with Names():
            logits = head.in_float32(x)
    assert (logits.dtype, logits.shape) == (torch.float32, (7, 300))
    assert "aten::mm" in names
    assert "aten::_to_copy" not in names

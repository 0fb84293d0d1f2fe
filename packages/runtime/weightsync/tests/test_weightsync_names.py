"""The name map knows where each tensor lies in the engine; a LoRA adapter travels alone, and is merged."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offbeat_core import WeightSyncError
from offbeat_weightsync import (
    EXPERTS,
    GATE_UP,
    QKV,
    InProcessStream,
    NameMap,
    describe_tensors,
    merge_adapter,
    select_adapter,
)
from offbeat_weightsync._names import Fusion

TIED = {"lm_head.weight": "model.embed_tokens.weight"}


def llama(layers: int = 2, bias: bool = True, experts: int = 0) -> dict[str, Tensor]:
    """A small decoder: 8 query heads and 2 key-value heads of 4, under Hugging Face names."""
    draw = torch.Generator().manual_seed(layers)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (11, 16)}
    rows = {"q": 32, "k": 8, "v": 8}
    for layer in range(layers):
        start = f"model.layers.{layer}"
        shapes |= {f"{start}.self_attn.{part}_proj.weight": (size, 16) for part, size in rows.items()}
        if bias:
            shapes |= {f"{start}.self_attn.{part}_proj.bias": (size,) for part, size in rows.items()}
        for prefix in [f"{start}.mlp.experts.{expert}" for expert in range(experts)] or [f"{start}.mlp"]:
            shapes |= {f"{prefix}.gate_proj.weight": (24, 16), f"{prefix}.up_proj.weight": (24, 16)}
            shapes |= {f"{prefix}.down_proj.weight": (16, 24)}
        shapes |= {f"{start}.input_layernorm.weight": (16,)}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def test_fused_matrices_are_the_concatenation_of_their_parts() -> None:
    tensors = llama()
    names = NameMap.build(describe_tensors(tensors.items()), [QKV, GATE_UP])
    fused = names.fuse(tensors.items())
    start = "model.layers.1"
    for kind in ("weight", "bias"):
        parts = [tensors[f"{start}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
        assert torch.equal(fused[f"{start}.self_attn.qkv_proj.{kind}"], torch.cat(parts))
    parts = [tensors[f"{start}.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(fused[f"{start}.mlp.gate_up_proj.weight"], torch.cat(parts))
    assert torch.equal(fused[f"{start}.mlp.down_proj.weight"], tensors[f"{start}.mlp.down_proj.weight"])
    assert [spec.name for spec in names.engine_specs] == list(fused)


def test_interleaved_rows_come_group_by_group() -> None:
    tensors = llama(layers=1)
    fusion = Fusion("self_attention.linear_qkv", QKV.parts, num_groups=2)
    fused = NameMap.build(describe_tensors(tensors.items()), [fusion]).fuse(tensors.items())
    q, k, v = (tensors[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv")
    by_hand = torch.cat([q[:16], k[:4], v[:4], q[16:], k[4:], v[4:]])
    assert torch.equal(fused["model.layers.0.self_attention.linear_qkv.weight"], by_hand)


def test_experts_are_stacked() -> None:
    tensors = llama(layers=1, experts=3)
    names = NameMap.build(describe_tensors(tensors.items()), [QKV, *EXPERTS])
    fused = names.fuse(tensors.items())
    start = "model.layers.0.mlp.experts"
    for expert in range(3):
        gate, up = (tensors[f"{start}.{expert}.{part}_proj.weight"] for part in ("gate", "up"))
        assert torch.equal(fused[f"{start}.w13_weight"][expert], torch.cat([gate, up]))
        assert torch.equal(fused[f"{start}.w2_weight"][expert], tensors[f"{start}.{expert}.down_proj.weight"])


@given(st.booleans(), st.sampled_from([0, 1, 4]), st.sampled_from([1, 2]), st.booleans())
def test_what_is_fused_is_split_again(bias: bool, experts: int, groups: int, tied: bool) -> None:
    tensors = llama(1, bias, experts)
    if tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    names = NameMap.build(
        describe_tensors(tensors.items()),
        [Fusion("qkv", QKV.parts, groups), GATE_UP, *EXPERTS],
        renamed={"model.": "language_model.model."},
        tied=TIED if tied else None,
    )
    fused = names.fuse(tensors.items())
    back = dict(names.split(fused.__getitem__))
    assert list(back) == list(tensors)
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)
    again = names.fuse(back.items())
    assert all(torch.equal(again[name], fused[name]) for name in fused)
    distinct = {name for name in tensors if name != "lm_head.weight"}
    assert sum(tensor.numel() for tensor in fused.values()) == sum(tensors[name].numel() for name in distinct)
    assert all(name.startswith("language_model.model.") for name in fused)


def test_a_stream_loads_into_fused_tensors_and_proves_them() -> None:
    tensors = llama(experts=2)
    fusions = [Fusion("linear_qkv", QKV.parts, 2), *EXPERTS]
    names = NameMap.build(describe_tensors(tensors.items(), "bfloat16"), fusions)
    held = {spec.name: torch.zeros(spec.shape, dtype=torch.bfloat16) for spec in names.engine_specs}
    stream = InProcessStream(tensors.items(), 1, dtype="bfloat16", bucket_bytes=256)
    stream.load(names.target(held.__getitem__))
    stream.prove(names.read(held.__getitem__))
    assert all(torch.equal(held[name], tensor.bfloat16()) for name, tensor in names.fuse(tensors.items()).items())
    held["model.layers.1.linear_qkv.weight"][5, 3] += 1
    with pytest.raises(WeightSyncError, match=r"other bytes than were sent, in bucket \d+ of .*model.layers.1.s"):
        stream.prove(names.read(held.__getitem__))


def without(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key != name}


UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (without(llama(), "model.layers.0.self_attn.k_proj.weight"), "qkv_proj.weight needs self_attn.k_proj, which"),
        (without(llama(experts=3), "model.layers.0.mlp.experts.1.up_proj.weight"), "needs experts.1.up_proj.weight"),
        (llama() | {UP: torch.ones(24, 17)}, r"up_proj.weight is float32 \(24, 17\), which does not fit"),
        (llama() | {UP: torch.ones(24, 16).half()}, "up_proj.weight is float16 .* does not fit"),
    ],
)
def test_parts_that_do_not_make_a_whole_are_refused(tensors: dict[str, Tensor], words: str) -> None:
    with pytest.raises(WeightSyncError, match=words):
        NameMap.build(describe_tensors(tensors.items()), [QKV, GATE_UP, *EXPERTS])


def test_tied_tensors_lie_in_one_place_and_must_be_equal() -> None:
    tensors = llama(layers=1) | {"lm_head.weight": torch.ones(11, 16)}
    names = NameMap.build(describe_tensors(tensors.items()), [QKV], tied=TIED)
    assert names.slices["lm_head.weight"] == names.slices["model.embed_tokens.weight"]
    with pytest.raises(WeightSyncError, match=r"lm_head.weight is tied to model.embed_tokens.weight, but their values"):
        names.fuse(tensors.items())
    for other, what in (
        (torch.ones(12, 16), r"float32 \(12, 16\)"),
        (torch.ones(11, 16).half(), r"float16 \(11, 16\)"),
    ):
        tied = tensors | {"lm_head.weight": other}
        with pytest.raises(WeightSyncError, match=rf"is tied to .*, but {what} is not float32 \(11, 16\)"):
            NameMap.build(describe_tensors(tied.items()), tied=TIED)
    with pytest.raises(WeightSyncError, match=r"lm_head.weight is tied to nothing, which the trainer does not have"):
        NameMap.build(describe_tensors(tensors.items()), tied={"lm_head.weight": "nothing"})


PREFIX = "base_model.model.model.layers.0.self_attn"


def trainer_tensors() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (9, 8),
        "model.layers.0.self_attn.q_proj.weight": (8, 8),
        f"{PREFIX}.q_proj.lora_A.weight": (2, 8),
        f"{PREFIX}.q_proj.lora_B.weight": (8, 2),
        f"{PREFIX}.k_proj.lora_A.weight": (2, 8),
        f"{PREFIX}.k_proj.lora_B.weight": (4, 2),
        "model.layers.0.self_attn.k_proj.weight": (4, 8),
    }
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def test_the_adapter_alone_travels_and_is_proved() -> None:
    adapter = select_adapter(trainer_tensors().items())
    assert len(adapter) == 4
    stream = InProcessStream(adapter, 1)
    held = {name: tensor.clone() for name, tensor in stream}
    assert stream.prove(held.__getitem__).num_tensors == 4
    assert stream.plan.num_bytes == 4 * (16 + 16 + 16 + 8)


def test_merged_weights_are_base_plus_scaled_product() -> None:
    tensors = trainer_tensors()
    merged = dict(merge_adapter(tensors.__getitem__, select_adapter(tensors.items()), scale=0.5))
    assert list(merged) == [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qk"]
    for name, weight in merged.items():
        start = f"base_model.model.{name.removesuffix('.weight')}"
        down, up = tensors[f"{start}.lora_A.weight"].double(), tensors[f"{start}.lora_B.weight"].double()
        assert torch.allclose(weight.double(), tensors[name].double() + 0.5 * up @ down, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "the trainer has none"),
        ({"a.lora_A.weight": (2, 8)}, "a.lora_A.weight needs a.lora_B.weight"),
        ({"a.lora_A.weight": (2, 8), "a.lora_B.weight": (8, 3)}, "rank 2 of lora_A is not rank 3 of lora_B"),
    ],
)
def test_an_adapter_that_is_not_whole_is_refused(change: dict[str, tuple[int, ...]], words: str) -> None:
    with pytest.raises(WeightSyncError, match=words):
        select_adapter((name, torch.ones(shape)) for name, shape in change.items())

"""FP8 blocks stay within the error that e4m3's mantissa allows, whatever the block holds."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat_core import TensorSpec, WeightSyncError
from offbeat_weightsync import (
    BucketPlan,
    DequantizedStream,
    InProcessStream,
    dequantize_blocks,
    describe_tensors,
    fp8_specs,
    is_fp8_weight,
    quantize_blocks,
    quantize_tensors,
)

FLOAT32_ROUNDING = 2.0**-22
"""Relative error of the division by the scale and the product with it."""


def check_bound(weight: torch.Tensor) -> None:
    quantized, scales = quantize_blocks(weight)
    assert quantized.dtype == torch.float8_e4m3fn
    assert quantized.shape == weight.shape
    assert scales.dtype == torch.float32
    assert scales.shape == tuple(-(-size // 128) for size in weight.shape)
    error = (dequantize_blocks(quantized, scales).double() - weight.double()).abs()
    rows, columns = weight.shape
    spread = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    bound = torch.maximum(weight.abs() * 2.0**-4, spread * 2.0**-10)  # half a step of e4m3, of its own size
    bound = bound.double() + weight.double().abs() * FLOAT32_ROUNDING + 2.0**-149
    assert bool((error <= bound).all()), (error / bound).max()


@given(st.integers(1, 300), st.integers(1, 300), st.integers(-40, 30), st.integers(0, 2**31))
@settings(max_examples=40)
def test_every_element_is_within_its_bound(rows: int, columns: int, exponent: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    spread = torch.randn(rows, columns, generator=draw).mul(4).exp2()  # several orders of magnitude in one block
    check_bound(torch.randn(rows, columns, generator=draw) * spread * 2.0**exponent)


def test_the_bound_is_reached_and_so_not_larger_than_it_need_be() -> None:
    # With 448 in the block the scale is 1. Halfway between two numbers of e4m3: off by |w| / 17, bound |w| / 16.
    weight = torch.tensor([[448.0, 17.0, 2.0**-10, -(2.0**-10)]])
    quantized, scales = quantize_blocks(weight)
    assert scales.tolist() == [[1.0]]
    error = (dequantize_blocks(quantized, scales) - weight).abs()[0].tolist()
    assert error == [0.0, 1.0, 2.0**-10, 2.0**-10]
    check_bound(weight)


@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros(130, 260),
        torch.full((128, 128), 2.0**-149),  # float32's smallest number
        torch.full((3, 200), 1e-40),  # denormal
        torch.cat([torch.full((128, 128), 1e-40), torch.full((128, 128), 3e38)]),
        torch.tensor([[3.4e38, -3.4e38, 0.0, 1.0]]),
        torch.cat([torch.zeros(128, 128), torch.ones(1, 128)]),
    ],
    ids=["zeros", "smallest", "denormal", "extremes", "largest", "edge row"],
)
def test_odd_blocks_are_within_their_bound(weight: torch.Tensor) -> None:
    check_bound(weight)


def test_zeros_stay_zeros_and_a_block_knows_nothing_of_its_neighbour() -> None:
    weight = torch.zeros(129, 129)
    weight[128, 128] = 5.0
    quantized, scales = quantize_blocks(weight)
    assert torch.equal(dequantize_blocks(quantized, scales), weight)
    assert scales[1, 1] == 5.0 / 448
    assert (scales[0] < 1e-30).all()


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (torch.ones(3), "needs a matrix"),
        (torch.tensor([[1.0, float("nan")]]), "needs finite weights"),
        (torch.tensor([[float("inf"), 1.0]]), "needs finite weights"),
    ],
)
def test_what_cannot_be_quantised_is_refused(weight: torch.Tensor, words: str) -> None:
    with pytest.raises(WeightSyncError, match=words):
        quantize_blocks(weight)


@pytest.mark.parametrize(
    ("name", "shape", "is_quantised"),
    [
        ("model.layers.0.mlp.up_proj.weight", (128, 128), True),
        ("model.layers.0.mlp.up_proj.weight", (127, 512), False),
        ("model.layers.0.mlp.up_proj.weight", (512, 127), False),
        ("model.layers.0.mlp.up_proj.bias", (512, 512), False),
        ("model.layers.0.input_layernorm.weight", (512,), False),
        ("model.visual.patch_embed.weight", (512, 3, 512), False),
        ("model.embed_tokens.weight", (512, 512), False),
        ("model.visual.pos_embed.weight", (512, 512), False),
        ("lm_head.weight", (512, 512), False),
    ],
)
def test_matrices_of_a_block_at_least_are_quantised_and_no_tables(
    name: str, shape: tuple[int, ...], is_quantised: bool
) -> None:
    assert is_fp8_weight(TensorSpec(name, "float32", shape)) is is_quantised
    names = [spec.name for spec in fp8_specs([TensorSpec(name, "float32", shape)])]
    assert names == [name, f"{name}_scale_inv"][: 1 + is_quantised]


def test_a_model_is_quantised_on_its_way_and_proved() -> None:
    tensors = {
        "model.embed_tokens.weight": torch.randn(300, 160),
        "model.layers.0.mlp.up_proj.weight": torch.randn(200, 160),
        "model.layers.0.input_layernorm.weight": torch.randn(160),
        "model.layers.0.mlp.down_proj.weight": torch.randn(160, 200),
        "lm_head.weight": torch.randn(300, 160),
    }
    plan = BucketPlan.build(fp8_specs(describe_tensors(tensors.items(), "bfloat16")))
    sent = dict(quantize_tensors(tensors.items()))
    assert [spec.name for spec in plan.specs] == list(sent)
    assert sent["model.layers.0.mlp.up_proj.weight_scale_inv"].shape == (2, 2)
    kinds = [spec.dtype for spec in plan.specs]
    assert kinds == ["bfloat16", "float8_e4m3fn", "float32", "bfloat16", "float8_e4m3fn", "float32", "bfloat16"]
    stream = InProcessStream(quantize_tensors(tensors.items()), 1)
    held = {name: tensor.clone() for name, tensor in stream}
    assert stream.prove(held.__getitem__).num_tensors == 7
    assert plan.num_bytes < sum(tensor.numel() for tensor in tensors.values()) * 2


class ReusingStream(InProcessStream):
    """Hands all tensors out in one memory: as of any stream, each is valid until the next one is asked for."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        memory = torch.empty(self.plan.num_bytes, dtype=torch.uint8)
        for name, tensor in super().__iter__():
            part = memory[: tensor.nbytes].copy_(tensor.reshape(-1).view(torch.uint8))
            yield name, part.view(tensor.dtype).view(tensor.shape)


@pytest.mark.parametrize("held_as", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_an_engine_that_holds_the_values_proves_the_blocks(held_as: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(2)
    tensors = {
        "a.weight": torch.randn(200, 160, generator=draw) * torch.randn(200, 160, generator=draw).mul(3).exp2(),
        "a.norm": torch.randn(160, generator=draw),
    }
    stream = DequantizedStream(ReusingStream(quantize_tensors(tensors.items()), 3))
    held = {name: tensor.to(held_as if tensor.dim() == 2 else tensor.dtype, copy=True) for name, tensor in stream}
    assert held.keys() == tensors.keys()
    expected = dequantize_blocks(*quantize_blocks(tensors["a.weight"]))
    assert torch.equal(held["a.weight"], expected.to(held_as))
    assert stream.prove(held.__getitem__).num_tensors == 3
    held["a.weight"][7, 7] *= 1.2
    with pytest.raises(WeightSyncError, match="holds other bytes than were sent"):
        stream.prove(held.__getitem__)


def test_blocks_and_scales_come_in_pairs() -> None:
    (_, blocks), (_, scales) = quantize_tensors([("a.weight", torch.ones(128, 128))])
    for tensors, words in (
        ([("a.weight", blocks), ("b.norm", torch.ones(3))], "followed by a.weight_scale_inv, got b.norm"),
        ([("a.weight", blocks)], "got nothing"),
        ([("a.weight_scale_inv", scales)], "without its weight"),
    ):
        with pytest.raises(WeightSyncError, match=words):
            list(DequantizedStream(InProcessStream(tensors, 1)))

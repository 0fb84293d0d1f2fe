"""The plan lays out every byte once, the same way everywhere, and buckets are filled by it on any device."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offbeat_core import TENSOR_DTYPES, TensorSpec, WeightSyncError
from offbeat_weightsync import BucketPlan, describe_tensors
from offbeat_weightsync._plan import ALIGNMENT, agreed_plan
from offbeat_weightsync._tensors import RUN_BYTES, PlannedTensors

SHAPES = st.lists(st.integers(1, 40), max_size=3).map(tuple)
BUCKET_BYTES = st.integers(1, 64).map(lambda number: number * ALIGNMENT)


@st.composite
def tensor_specs(draw: st.DrawFn) -> list[TensorSpec]:
    names = draw(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=12, unique=True))
    return [TensorSpec(name, draw(st.sampled_from(TENSOR_DTYPES)), draw(SHAPES)) for name in names]


def test_a_receiver_whose_plan_differs_from_the_announced_one_refuses_it() -> None:
    specs = (TensorSpec("a", "float32", (3,)),)
    plan = BucketPlan.build(specs, ALIGNMENT)
    assert agreed_plan(specs, ALIGNMENT, plan.digest, "trainer-0") == plan
    with pytest.raises(WeightSyncError, match=f"the plans differ: 00ff at trainer-0, {plan.digest} here"):
        agreed_plan(specs, ALIGNMENT, "00ff", "trainer-0")


@given(tensor_specs(), BUCKET_BYTES)
def test_every_byte_of_every_tensor_travels_once_and_in_order(specs: list[TensorSpec], bucket_bytes: int) -> None:
    plan = BucketPlan.build(specs, bucket_bytes)
    pieces = [piece for bucket in plan.buckets for piece in bucket.pieces]
    expected = 0, 0
    for piece in pieces:
        assert (piece.tensor, piece.tensor_offset) == expected
        end = piece.tensor_offset + piece.num_bytes
        expected = (piece.tensor + 1, 0) if end == specs[piece.tensor].num_bytes else (piece.tensor, end)
    assert expected == (len(specs), 0)
    assert plan.num_bytes == sum(piece.num_bytes for piece in pieces)


@given(tensor_specs(), BUCKET_BYTES)
def test_pieces_lie_aligned_in_their_bucket_without_touching(specs: list[TensorSpec], bucket_bytes: int) -> None:
    for bucket in BucketPlan.build(specs, bucket_bytes).buckets:
        used = 0
        for piece in bucket.pieces:
            assert piece.bucket_offset >= used
            assert piece.bucket_offset % ALIGNMENT == 0
            assert piece.num_bytes % TensorSpec("", specs[piece.tensor].dtype, ()).num_bytes == 0
            used = piece.bucket_offset + piece.num_bytes
        assert 0 < used == bucket.num_bytes <= bucket_bytes


@given(tensor_specs(), BUCKET_BYTES)
def test_only_a_tensor_longer_than_a_bucket_is_split(specs: list[TensorSpec], bucket_bytes: int) -> None:
    plan = BucketPlan.build(specs, bucket_bytes)
    pieces = [piece.tensor for bucket in plan.buckets for piece in bucket.pieces]
    for index, spec in enumerate(specs):
        assert pieces.count(index) == -(-spec.num_bytes // bucket_bytes)


def _as_long_as(dtype: str) -> str:
    """Another dtype, whose numbers take as many bytes where there is such a one."""
    num_bytes = TensorSpec("", dtype, ()).num_bytes
    others = [each for each in TENSOR_DTYPES if each != dtype]
    return min(others, key=lambda each: abs(TensorSpec("", each, ()).num_bytes - num_bytes))


@given(tensor_specs(), BUCKET_BYTES)
def test_equal_plans_and_only_they_have_equal_digests(specs: list[TensorSpec], bucket_bytes: int) -> None:
    plan = BucketPlan.build(specs, bucket_bytes)
    assert BucketPlan.build(iter(specs), bucket_bytes) == plan
    first, rest = specs[0], specs[1:]
    others = [
        BucketPlan.build(specs, bucket_bytes + ALIGNMENT),
        BucketPlan.build([TensorSpec(first.name, first.dtype, (*first.shape, 1)), *rest], bucket_bytes),
        BucketPlan.build([TensorSpec(first.name + "*" * 9, first.dtype, first.shape), *rest], bucket_bytes),
        BucketPlan.build([TensorSpec(first.name, _as_long_as(first.dtype), first.shape), *rest], bucket_bytes),
        *([BucketPlan.build([*rest, first], bucket_bytes)] if rest else []),
    ]
    assert plan.digest not in {other.digest for other in others}


def test_the_digest_is_the_same_in_another_process() -> None:
    imports = "from offbeat_core import TensorSpec; from offbeat_weightsync import *"
    code = f"{imports}; print(BucketPlan.build([TensorSpec('ä', 'bfloat16', (3, 4))], 128).digest)"
    here = BucketPlan.build([TensorSpec("ä", "bfloat16", (3, 4))], 128).digest
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout.strip()
    assert here == there
    assert len(here) == 16


@pytest.mark.parametrize(
    ("specs", "bucket_bytes", "words"),
    [
        ([], 64, "at least one tensor"),
        ([("a", "float32", (2,)), ("a", "float32", (3,))], 64, "a: the name comes twice"),
        ([("a", "float32", (2, 0))], 64, r"a: a tensor needs at least one element: got shape \(2, 0\)"),
        ([("a", "complex64", (2,))], 64, "a: dtype must be one of .*bfloat16.*: got 'complex64'"),
        ([("a", "float32", (2,))], 100, "bucket_bytes must be a multiple of 64 above 0: got 100"),
        ([("a", "float32", (2,))], 0, "got 0"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    specs: list[tuple[str, str, tuple[int, ...]]], bucket_bytes: int, words: str
) -> None:
    with pytest.raises(WeightSyncError, match=words):
        BucketPlan.build([TensorSpec(*spec) for spec in specs], bucket_bytes)


class Elsewhere(Tensor):
    """Memory that says it is not the host's, so that no code reads it as such."""

    is_cpu = property(lambda _: False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_device_gets_the_bytes_that_the_host_gets(dtype: str) -> None:
    draw = torch.Generator().manual_seed(0)
    weights = {
        "long": torch.randn(RUN_BYTES // 2 + 8, generator=draw),  # several runs, in several buckets
        "scalar": torch.randn((), generator=draw),
        "wide": torch.randn(70, 300, generator=draw),
    }
    plan = BucketPlan.build(describe_tensors(weights.items(), dtype), RUN_BYTES + 64)
    assert len(plan.buckets) > 1

    def fill(memory: Tensor) -> tuple[list[Tensor], tuple[str, ...]]:
        planned, found = PlannedTensors(plan, weights.items()), []
        for bucket in plan.buckets:
            memory.zero_()
            assert list(planned.fill(bucket, memory))[-1] == bucket.num_bytes
            found.append(memory.as_subclass(Tensor)[: bucket.num_bytes].clone())
        return found, planned.finish()

    host, checksums = fill(torch.empty(RUN_BYTES + 64, dtype=torch.uint8))
    device, theirs = fill(torch.empty(RUN_BYTES + 64, dtype=torch.uint8).as_subclass(Elsewhere))
    runs = PlannedTensors(plan, weights.items())
    sent = [[(run, bytes(data)) for run, data in runs.runs(bucket)] for bucket in plan.buckets]
    assert runs.finish() == theirs == checksums
    assert all(torch.equal(one, other) for one, other in zip(host, device, strict=True))
    for bucket, pieces in zip(host, sent, strict=True):
        for run, data in pieces:
            assert bucket[run.bucket_offset : run.bucket_offset + run.num_bytes].numpy().tobytes() == data

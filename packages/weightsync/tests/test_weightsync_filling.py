"""What is filled into memory of a device is what is filled into host memory, with the same checksums."""

import pytest
import torch
from torch import Tensor

from offbeat_weightsync import BucketPlan, describe_tensors
from offbeat_weightsync._tensors import RUN_BYTES, PlannedTensors


class Elsewhere(Tensor):
    """Memory that says it is not the host's, so that nobody looks at it as such."""

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

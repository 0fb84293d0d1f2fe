"""What is filled into memory of a device is what is filled into host memory, with the same checksums."""

import pytest
import torch
from torch import Tensor

from offbeat_weightsync import BucketPlan, describe_tensors
from offbeat_weightsync._filling import CHUNK_BYTES, PlannedTensors
from offbeat_weightsync._windows import cut_windows


class Elsewhere(Tensor):
    """Memory that says it is not the host's, so that nobody looks at it as such."""

    is_cpu = property(lambda _: False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("are_held", [False, True], ids=["one by one", "all held"])
def test_a_device_gets_the_bytes_that_the_host_gets(dtype: str, are_held: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    weights = {
        "long": torch.randn(CHUNK_BYTES // 2 + 8, generator=draw),  # several runs, in several windows
        "scalar": torch.randn((), generator=draw),
        "wide": torch.randn(70, 300, generator=draw),
    }
    plan = BucketPlan.build(describe_tensors(weights.items(), dtype), 2 * CHUNK_BYTES)
    windows = cut_windows(plan, CHUNK_BYTES + 64)
    assert len(windows) > 1

    def fill(memory: Tensor) -> tuple[list[Tensor], tuple[str, ...]]:
        planned = PlannedTensors(plan, weights.items())
        filler = planned.spread(1)[0] if are_held else planned
        found = []
        for window in windows:
            memory.zero_()
            filler.fill(window, memory, filler.plan_copies(window, memory))
            found.append(memory.as_subclass(Tensor)[: window.num_bytes].clone())
        return found, filler.finish()

    host, checksums = fill(torch.empty(CHUNK_BYTES + 64, dtype=torch.uint8))
    device, theirs = fill(torch.empty(CHUNK_BYTES + 64, dtype=torch.uint8).as_subclass(Elsewhere))
    assert theirs == checksums
    assert all(torch.equal(one, other) for one, other in zip(host, device, strict=True))

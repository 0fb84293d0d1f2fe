"""Hangs of public projects (docs/hanglint.md) in small programs: the faulty form hangs, the fixed form does not."""

import contextlib
import time
from datetime import timedelta

import pytest
import torch
import torch._dynamo  # a DTensor imports it when first made: here once, not in each forked rank
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

TIMEOUT_S = 1.0
pytestmark = pytest.mark.ranks(2, compare=False, liveness=False, deadline_s=60)


def is_stuck(body, *, is_mended):
    """Return whether this rank waits in a collective of the body until the group's timeout."""
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    try:
        body(group)
    except RuntimeError as error:
        if "timed out" not in str(error).lower():
            raise
        return True
    if not is_mended:
        time.sleep(2 * TIMEOUT_S)  # a rank that ended would end the connection in which the other waits
    return False


def load_model(rank, group, is_mended):
    """Ranks that have nothing to load return; rank 0 ends in a barrier."""
    dist.barrier(group=group)
    if rank == 0 or is_mended:
        dist.barrier(group=group)


def load_full_state(rank, group, names, saved, is_mended):
    """Rank 0 sends every tensor it has; a name that it lacks is an error, of which it notifies no rank or all ranks."""
    missing = [name not in saved if rank == 0 else False for name in names]
    if is_mended:
        has_failed = torch.tensor([any(missing)])
        dist.broadcast(has_failed, src=0, group=group)
        if has_failed.item():
            raise KeyError("a parameter is missing on rank 0")
    for name, is_missing in zip(names, missing, strict=True):
        if is_missing:
            raise KeyError(name)
        dist.broadcast(saved[name] if rank == 0 else torch.empty(2), src=0, group=group)


def build_cache(rank, group, folder, is_mended):
    """A rank that sees the file reads it; one that does not computes it together with the others."""
    exists = (folder / f"node-{rank}" / "cache").exists()  # each node has a disk of its own
    if is_mended:
        seen = torch.tensor([exists])
        dist.all_reduce(seen, op=dist.ReduceOp.MIN, group=group)
        exists = bool(seen.item())
    if exists:
        return "read"
    dist.barrier(group=group)
    return "computed"


def sample_while_training(rank, group, is_mended):
    """A sharded model writes an example, on rank 0 alone, or on all ranks, and one of them prints it."""
    model = fully_shard(nn.Linear(4, 4), mesh=DeviceMesh.from_group(group, "cpu"))
    if rank == 0 or is_mended:
        model(torch.ones(1, 4))


@pytest.mark.parametrize("is_mended", [False, True])
def test_a_forward_of_a_sharded_model_on_one_rank_waits_for_the_others(rank, is_mended):
    stuck = is_stuck(lambda group: sample_while_training(rank, group, is_mended), is_mended=is_mended)
    assert stuck is (rank == 0 and not is_mended)


@pytest.mark.parametrize("is_mended", [False, True])
def test_a_return_before_the_last_barrier_leaves_rank_0_in_it(rank, is_mended):
    stuck = is_stuck(lambda group: load_model(rank, group, is_mended), is_mended=is_mended)
    assert stuck is (rank == 0 and not is_mended)


@pytest.mark.parametrize("is_mended", [False, True])
def test_an_error_of_rank_0_alone_leaves_the_others_in_the_broadcast(rank, is_mended):
    def body(group):
        with pytest.raises(KeyError) if rank == 0 or is_mended else contextlib.nullcontext():
            load_full_state(rank, group, ["a", "b"], {"a": torch.ones(2)}, is_mended)

    assert is_stuck(body, is_mended=is_mended) is (rank == 1 and not is_mended)


@pytest.mark.parametrize("is_mended", [False, True])
def test_a_file_that_one_rank_sees_lets_it_pass_a_barrier_of_all(rank, is_mended, tmp_path):
    (tmp_path / f"node-{rank}").mkdir(exist_ok=True)
    if rank == 0:
        (tmp_path / "node-0" / "cache").touch()
    stuck = is_stuck(lambda group: build_cache(rank, group, tmp_path, is_mended), is_mended=is_mended)
    assert stuck is (rank == 1 and not is_mended)

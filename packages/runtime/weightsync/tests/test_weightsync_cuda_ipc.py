"""CUDA IPC: torch's own API is what we call, and what a handle holds survives the wire. The rest needs a GPU."""

import inspect
import re
from typing import Any

import msgspec
import pytest
import torch
from torch.multiprocessing import reductions
from weightsync_peers import Weights, plan_of

from offbeat_core import TensorSpec, WeightSyncError
from offbeat_weightsync import SharedMemorySender
from offbeat_weightsync._connection import CudaHandle, Message, Offer

SHARED = (
    "device",
    "handle",
    "storage_size_bytes",
    "storage_offset_bytes",
    "ref_counter_handle",
    "ref_counter_offset",
    "event_handle",
    "event_sync_required",
)
"""What `_share_cuda_` returns, in order, as torch's own caller names it."""


def test_torch_still_shares_storages_by_these_eight_values_in_this_order() -> None:
    source = inspect.getsource(reductions.reduce_tensor)
    unpacked = re.search(r"\(\s*((?:\w+,\s*)+)\) = storage\._share_cuda_\(\)", source)
    assert unpacked is not None
    assert tuple(re.findall(r"\w+", unpacked[1])) == SHARED
    assert len(msgspec.structs.fields(CudaHandle)) == len(SHARED) + 1  # and the device's uuid


def test_torch_still_opens_storages_by_these_values_in_this_order() -> None:
    source = inspect.getsource(reductions.rebuild_cuda_tensor)
    passed = re.search(r"_new_shared_cuda\(([^)]*)\)", source)
    assert passed is not None
    assert tuple(re.findall(r"\w+", passed[1])) == ("storage_device", "storage_handle", *SHARED[2:])


def test_the_methods_exist_on_the_storages_that_we_use() -> None:
    assert callable(torch.UntypedStorage._share_cuda_)
    assert callable(torch.UntypedStorage._new_shared_cuda)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_torch_without_cuda_says_so_and_so_do_we(address: str, weights: Weights) -> None:
    new: Any = torch.UntypedStorage._new_shared_cuda
    with pytest.raises(RuntimeError, match=r"CUDA is not available|CUDA driver"):  # of a build without CUDA, or with
        new(0, b"", 1, 0, b"", 0, b"", False)
    plan = plan_of(weights)
    with pytest.raises(WeightSyncError, match="CUDA IPC needs a CUDA device, and there is none here"):
        SharedMemorySender(address, plan, device="cuda:0")
    SharedMemorySender(address, plan).close()  # the address is free again


def test_a_handle_survives_the_wire() -> None:
    handle = CudaHandle(0, b"\x01" * 66, 1 << 25, 4096, b"/torch_1_2", 3, b"\0" * 64, True, "GPU-1")
    offer = Offer((TensorSpec("a", "float32", (2, 3)),), 64, "0" * 16, "", 4096, handle)
    again: Any = msgspec.msgpack.decode(msgspec.msgpack.encode(offer), type=Message)
    assert again == offer
    assert msgspec.structs.astuple(again.cuda)[1:-1] == msgspec.structs.astuple(handle)[1:-1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_weights_go_through_device_memory(address: str, weights: Weights, start_engine: Any) -> None:
    with SharedMemorySender(address, plan_of(weights), deadline_s=60, device="cuda:0") as sender:
        engine = start_engine(sender.address)
        sender.send(((name, tensor.cuda()) for name, tensor in weights.items()), 1, 1)
        total = sum(float(tensor.double().sum()) for tensor in weights.values())
        assert engine.next_text() == f"holds 8 tensors of version 1, sum {total:.6f}"

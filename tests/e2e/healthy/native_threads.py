"""Rank 0 waits for threads that compute in C without Python: a tokenizer in Rust, a kernel in C++."""

import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist


def digest(part: int) -> str:
    """Hash; OpenSSL gives the GIL back for the whole of it."""
    end_s, text = time.monotonic() + float(os.environ["PAUSE_S"]), ""
    while time.monotonic() < end_s:
        text = hashlib.pbkdf2_hmac("sha256", b"shard", bytes([part]), 200_000).hex()
        time.sleep(0.1)
    return text


dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    with ThreadPoolExecutor(2) as executor:
        assert len(set(executor.map(digest, range(2)))) == 2
dist.barrier()
print(f"rank {rank}: done")

"""Rank 0 waits for one call into C that computes all the while, in a thread, and shows no new line."""

import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    took_s = []
    for _ in range(5):
        began_s = time.monotonic()
        hashlib.pbkdf2_hmac("sha256", b"shard", b"", 20_000)
        took_s.append(time.monotonic() - began_s)
    rounds = int(20_000 * float(os.environ["PAUSE_S"]) / min(took_s))
    with ThreadPoolExecutor(1) as executor:
        executor.submit(hashlib.pbkdf2_hmac, "sha256", b"shard", b"", rounds).result()
dist.barrier()
print(f"rank {rank}: done")

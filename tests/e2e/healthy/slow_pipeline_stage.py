"""A pipeline whose first stage takes long over each batch: the other stages wait for what it sends."""

import os
import time

import torch
import torch.distributed as dist

NUM_BATCHES = 3

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
for _ in range(NUM_BATCHES):
    block = torch.zeros(4)
    if rank == 0:
        time.sleep(float(os.environ["PAUSE_S"]) / 2)
        block += 1
    else:
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, block, rank - 1)]):
            work.wait()
    if rank < size - 1:
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, block, rank + 1)]):
            work.wait()
    assert block.tolist() == [1.0] * 4
dist.barrier()
print(f"rank {rank}: done")

"""A user looks at rank 0 in pdb and continues it after a while."""

import pdb

import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    pdb.set_trace()
dist.barrier()
print(f"rank {rank}: done")

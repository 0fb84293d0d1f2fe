"""Rank 0 asks at its terminal whether to overwrite the folder; the answer takes a while."""

import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
answer = [""]
if rank == 0:
    answer = [input("overwrite? ")]
dist.broadcast_object_list(answer, src=0)
assert answer == ["yes"]
print(f"rank {rank}: done")

"""One reduction for each entry of a dictionary that is not the same on all ranks."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
metrics = {"loss": torch.ones(1)}
if dist.get_rank() == 0:
    metrics["images"] = torch.ones(1)
for value in metrics.values():
    dist.all_reduce(value)  # waits
dist.broadcast(torch.ones(8), src=0)  # missing

"""Two groups of the same ranks, used in another order by one rank."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
everybody = list(range(dist.get_world_size()))
data, model = dist.new_group(everybody), dist.new_group(everybody)
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(1), group=data)  # missing
    dist.all_reduce(torch.ones(1), group=model)
else:
    dist.all_reduce(torch.ones(1), group=model)  # waits
    dist.all_reduce(torch.ones(1), group=data)

"""Rank 0 compiles its model first, the others find the cache when they leave the barrier."""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.registry import lookup_backend


def slow_compiler(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
    """The backend, which takes as long as a large model would."""
    time.sleep(float(os.environ["PAUSE_S"]) / 2)
    return lookup_backend(os.environ.get("COMPILE_BACKEND", "eager"))(graph, inputs)


dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.compile(nn.Linear(4, 4), backend=slow_compiler)
if rank == 0:
    model(torch.ones(2, 4)).sum().backward()
dist.barrier()
print(f"rank {rank}: done")

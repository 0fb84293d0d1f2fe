"""FSDP2: a rank without images skips the vision tower, whose parameters the others gather."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Model(nn.Module):
    """A trunk and a vision tower of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.vision, self.text = nn.Sequential(nn.Linear(16, 12), nn.Linear(12, 8)), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, image: torch.Tensor | None) -> torch.Tensor:
        """The tower runs only for a batch with images."""
        if image is not None:
            x = x + self.vision(image)  # waits
        return self.text(x)  # missing


dist.init_process_group("gloo")
for _ in range(5):  # a few healthy steps
    dist.all_reduce(torch.ones(1))
    time.sleep(0.2)
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
model = Model()
for layer in (*model.vision, model.text):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
has_image = dist.get_rank() != 0
model(torch.ones(2, 8), torch.ones(2, 16) if has_image else None).sum().backward()
dist.barrier()

"""Stacks of experts cut over the ranks of ep, and their rows over those of edp: the other way of counting dp and cp.

Ranks that are neighbours hold the experts between them, so that tokens travel within a host where ep ranks fit on it.
"""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from offbeat_core import ConfigError
from offbeat_engine_torch._layers.balance import find_expert_layers
from offbeat_engine_torch._layers.experts import ExpertParallel
from offbeat_mesh import Mesh


def find_stacks(whole: nn.Module) -> list[nn.Module]:
    """Return the layers of experts whose weights lie in one tensor per projection, [X, ...] for X experts."""
    return [layer for _, layer in find_expert_layers(whole)]


def check_expert_parallel(whole: Any, size: int) -> None:
    """Refuse a model whose experts `size` ranks cannot hold between them, each as many.

    Raises:
        ConfigError: it has none, they are no stacks, or `size` does not divide them.
    """
    family, config, stacks = type(whole).__name__, whole.config.get_text_config(), find_stacks(whole)
    if not stacks:
        names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
        has_experts = any(getattr(config, name, None) for name in names)
        what = "keeps its experts in layers of their own, and not in stacks" if has_experts else "has no experts"
        raise ConfigError(f"ep = {size} needs experts to share out: {family} {what}; set expert_parallel to 1")
    for stack in stacks:
        count = int(getattr(stack, "num_experts", 0))
        for name, each in stack.named_parameters():
            if "." in name or len(each) != count:
                raise ConfigError(
                    f"ep = {size}: {name} in {type(stack).__name__} is no stack of {count} experts; set it to 1"
                )
        if count % size:
            raise ConfigError(f"ep = {size} must divide the experts of {family}: got {count} of them in a layer")


def cut_stacks(whole: nn.Module, mesh: Mesh) -> DeviceMesh:
    """Leave each rank of ep its experts, in place; return the ranks that have the same ones, which cut their rows.

    Raises:
        ConfigError: as `check_expert_parallel`.
    """
    check_expert_parallel(whole, mesh.axes["ep"])
    ranks = ExpertParallel.of(mesh, "ep")
    meshes = mesh.device_mesh_over(("edp",), ("ep",))
    for stack in find_stacks(whole):
        for name, parameter in list(stack.named_parameters(recurse=False)):
            cut = distribute_tensor(parameter, meshes["ep"], [Shard(0)], src_data_rank=None)
            stack.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))
        stack.ranks = ranks  # type: ignore[assignment]
    return meshes["edp"]

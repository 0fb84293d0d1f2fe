"""Reading the layout and the groups of somebody else's mesh: torch's DeviceMesh, Megatron's parallel_state."""

from collections.abc import Iterator, Mapping
from itertools import permutations
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from offbeat_mesh._layout import GRID_AXES, Layout
from offbeat_types import ConfigError

Groups: TypeAlias = dict[tuple[str, ...], dist.ProcessGroup]

MEGATRON_GROUPS: Final[tuple[tuple[tuple[str, ...], str, dict[str, bool]], ...]] = (
    (("tp",), "get_tensor_model_parallel_group", {}),
    (("pp",), "get_pipeline_model_parallel_group", {}),
    (("cp",), "get_context_parallel_group", {}),
    (("dp",), "get_data_parallel_group", {}),
    (("dp", "cp"), "get_data_parallel_group", {"with_context_parallel": True}),
    (("cp", "tp"), "get_tensor_and_context_parallel_group", {}),
    (("dp", "tp"), "get_tensor_and_data_parallel_group", {}),
    (("dp", "cp", "tp"), "get_tensor_and_data_parallel_group", {"with_context_parallel": True}),
    (("tp", "pp"), "get_model_parallel_group", {}),
    (("ep",), "get_expert_model_parallel_group", {}),
    (("edp",), "get_expert_data_parallel_group", {}),
)
"""Axes, in our order, and how Megatron hands out the group. Source: megatron/core/parallel_state.py."""


def read_device_mesh(device_mesh: DeviceMesh, names: Mapping[str, str]) -> tuple[Layout, Groups]:
    """Layout and groups of a DeviceMesh that covers the world.

    Raises:
        ConfigError: a dim without an axis of ours, two dims for one axis, or ranks that no order of the axes gives.
    """
    dims = device_mesh.mesh_dim_names or ()
    axes = [names.get(dim, dim) for dim in dims]
    if not dims or not set(axes) <= set(GRID_AXES) or len(set(axes)) < len(axes):
        raise ConfigError(
            f"each dim of a DeviceMesh must be one of {', '.join(GRID_AXES)}: got {dims or 'no names'}"
            f"{f' read as {axes}' if names else ''}; name them, such as axes={{'fsdp': 'dp'}}"
        )
    sizes = dict(zip(axes, device_mesh.mesh.shape, strict=True))
    ranks = device_mesh.mesh
    for layout in _layouts(sizes):
        grid = torch.arange(layout.size).view([layout.axes[axis] for axis in layout.order[::-1]])
        present = [axis for axis in layout.order[::-1] if axis in axes]
        ours = grid.squeeze([layout.order[::-1].index(axis) for axis in layout.order if axis not in axes])
        if torch.equal(ours.permute([present.index(axis) for axis in axes]), ranks):
            return layout, {(axis,): device_mesh.get_group(dim) for axis, dim in zip(axes, dims, strict=True)}
    raise ConfigError(
        f"a DeviceMesh must hold ranks 0 to {ranks.numel() - 1} once each, in an order that its dims explain: "
        f"got {ranks.tolist()}"
    )


def read_parallel_state(parallel_state: Any) -> tuple[Layout, Groups]:
    """Layout and groups of Megatron, found by comparing its groups with ours for every order of the axes.

    Raises:
        ConfigError: it is not initialised, its experts are tensor parallel in another way, or no order fits.
    """
    if not parallel_state.model_parallel_is_initialized():
        raise ConfigError("Megatron's parallel_state is not initialised: call initialize_model_parallel() first")
    sizes = {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_world_size(),
        "dp": parallel_state.get_data_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
    }
    groups = _megatron_groups(parallel_state)
    rank = dist.get_rank()
    held = {axes: tuple(dist.get_process_group_ranks(group)) for axes, group in groups.items()}
    grid = {axes: ranks for axes, ranks in held.items() if not {"ep", "edp"} & set(axes)}
    for layout in _layouts(sizes):
        if layout.size != dist.get_world_size():
            break
        if all(layout.members(axes, rank) == ranks for axes, ranks in grid.items()):
            alike = {axes for axes, ranks in held.items() if layout.members(axes, rank) == ranks}
            if sizes["ep"] > 1 and not {("ep",), ("edp",)} <= alike:
                raise ConfigError(
                    f"experts must be laid over dp·cp·tp with expert tensor parallel 1: Megatron's expert groups of "
                    f"rank {rank} are {held.get(('ep',))} and {held.get(('edp',))}; set expert_tensor_parallel_size=1"
                )
            return layout, {axes: groups[axes] for axes in alike}
    raise ConfigError(f"Megatron's groups of rank {rank} fit no order of {', '.join(GRID_AXES)} with {sizes}: {grid}")


def _megatron_groups(parallel_state: Any) -> Groups:
    """The groups that this version of Megatron has and has made."""
    groups: Groups = {}
    for axes, getter, options in MEGATRON_GROUPS:
        if not hasattr(parallel_state, getter):
            continue
        try:
            group = getattr(parallel_state, getter)(**options)
        except AssertionError:  # Megatron's way to say that it has not made that group
            continue
        if group is not None:
            groups[axes] = group
    return groups


def _layouts(sizes: Mapping[str, int]) -> Iterator[Layout]:
    """Layouts of these sizes in every order, the default one first."""
    for order in permutations(GRID_AXES):
        yield Layout(**sizes, order=order)

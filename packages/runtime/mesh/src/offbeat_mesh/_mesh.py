"""The mesh: named axes over the processes of a run, made here or read off a DeviceMesh or Megatron, and its groups."""

import os
from collections.abc import Iterator, Mapping
from itertools import permutations
from typing import Any, Final, Self, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from offbeat_core import ConfigError
from offbeat_device import Device, open_device
from offbeat_mesh._calls import Membership, group_name, make_process_group, name_for_liveness, open_calls
from offbeat_mesh._group import Group
from offbeat_mesh._guard import Guard, Place, check_guards
from offbeat_mesh._layout import GRID_AXES, Layout
from offbeat_mesh._world import DEADLINE_S, World, current_world, join_world

CHECK_VARIABLE = "OFFBEAT_CHECK"
"""Set to 1, it turns on `check` of every mesh that does not say otherwise."""


class Mesh:
    """The processes of the world, arranged along named axes. All of them make it, with the same sizes.

    A mesh of one process needs no world. Where torch.distributed is initialised already, by other code, the world is
    joined here.

    Args:
        dp, cp, tp, pp: data, context, tensor and pipeline parallel; their product is the world's size.
        ep: expert parallel, a second way of counting the ranks of a stage: divides dp·cp·tp.
        device: where this process computes: "auto", a kind, a kind with an index, or an open device; the world's
            by default.
        deadline_s: for each call of a group that does not bring its own; the world's by default.
        check: compare the members' tensors before each call; by default only if OFFBEAT_CHECK=1. See `Group`.

    Raises:
        ConfigError: the sizes do not make up the world.
    """

    def __init__(
        self,
        *,
        dp: int = 1,
        cp: int = 1,
        tp: int = 1,
        pp: int = 1,
        ep: int = 1,
        device: str | Device | None = None,
        deadline_s: float | None = None,
        check: bool | None = None,
    ) -> None:
        layout = Layout(dp=dp, cp=cp, tp=tp, pp=pp, ep=ep)
        self._set_up(layout, device=device, deadline_s=deadline_s, check=check)

    def _set_up(
        self, layout: Layout, *, device: str | Device | None, deadline_s: float | None, check: bool | None
    ) -> None:
        world = current_world()
        if world is None and dist.is_available() and dist.is_initialized():
            world = join_world(device=device or "auto", deadline_s=DEADLINE_S if deadline_s is None else deadline_s)
        size = world.size if world else 1
        if layout.size != size:
            given = ", ".join(f"{axis}={layout.axes[axis]}" for axis in ("dp", "cp", "tp", "pp"))
            hint = f"choose sizes whose product is {size}" if world else "join_world() first: this process is alone"
            raise ConfigError(f"a mesh with {given} needs {layout.size} processes: the world has {size}; {hint}")
        self.layout = layout
        self.rank = world.rank if world else 0
        self.device = _opened(device, world)
        self.deadline_s = deadline_s or (world.deadline_s if world else DEADLINE_S)
        self.check = os.environ.get(CHECK_VARIABLE) == "1" if check is None else check
        self._world = world
        self._number = world.count_mesh() if world else 0
        self._groups: dict[tuple[tuple[str, ...], str], Group] = {}
        self._adopted: dict[tuple[str, ...], dist.ProcessGroup] = {}
        self._device_meshes: dict[tuple[tuple[str, ...], ...], DeviceMesh] = {}

    @property
    def axes(self) -> dict[str, int]:
        """Size of each axis."""
        return self.layout.axes

    @property
    def size(self) -> int:
        """Return how many processes."""
        return self.layout.size

    @property
    def coordinates(self) -> dict[str, int]:
        """Place of this process along each axis."""
        return self.layout.coordinates(self.rank)

    def where(self, **places: Place) -> Guard:
        """Return whether this rank passes, as in `where(pp="last", cp=0)`, and a guard over collectives: see `Guard`.

        Args:
            places: for an axis an index, several, "first" or "last".

        Raises:
            ConfigError: an unknown axis, or a place outside it.
        """
        return Guard(self.layout, self.rank, places)

    def group(self, *axes: str, channel: str = "") -> Group:
        """Return the group of this process along `axes`; no axis at all gives the group of itself alone.

        The first time it is a call of the group: all members ask for it, in the same order relative to their other
        groups; after that it is looked up.

        Args:
            axes: in any order; see `Layout.members` for what ep and edp mean beside the others.
            channel: a second thread's own group over the same ranks, by a name of your choice.

        Raises:
            ConfigError: an axis that the mesh does not have.
            DeadlineError: members that did not ask for it.
        """
        key = (self.layout.ordered(axes), channel)
        if key not in self._groups:
            self._groups[key] = self._make_group(*key)
        return self._groups[key]

    def group_except(self, *axes: str, channel: str = "") -> Group:
        """Return the group along all axes of the grid but `axes`: `group_except("dp")` is one replica."""
        self.layout.ordered(axes)
        return self.group(*(axis for axis in GRID_AXES if axis not in axes), channel=channel)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The torch DeviceMesh with the dims "pp", "dp", "cp", "tp", over this mesh's groups.

        The first time it is a call of all processes, as `group` is for each of the four axes.

        Raises:
            ConfigError: no world has been joined.
        """
        return self.device_mesh_over(*((axis,) for axis in self.layout.order[::-1]))

    def device_mesh_over(self, *dims: tuple[str, ...]) -> DeviceMesh:
        """Return the torch DeviceMesh whose dims are these axes, or several of them as one: "dp_cp" for dp and cp.

        The first time it is a call of all processes, as `group` is for each of the dims.

        Args:
            dims: all axes along which the mesh has more than one process, each once, the slowest first.

        Raises:
            ConfigError: no world has been joined.
        """
        if dims not in self._device_meshes:
            groups = [self.group(*axes) for axes in dims]
            grid = torch.arange(self.size).view([group.size for group in groups])
            self._device_meshes[dims] = DeviceMesh.from_group(
                [group.process_group for group in groups],
                self.device.torch_device.type,
                mesh=grid,
                mesh_dim_names=tuple("_".join(group.axes) for group in groups),
            )
        return self._device_meshes[dims]

    def _make_group(self, axes: tuple[str, ...], channel: str) -> Group:
        ranks = self.layout.members(axes, self.rank)
        name = group_name(self.layout, self._number, axes, ranks, channel)
        membership = Membership(
            key=name, axes=axes, ranks=ranks, rank=self.rank, channel=channel, label=self.layout.label
        )
        check_guards("mesh.group", membership.text, ranks)
        process_group = None if channel else self._adopted.get(axes)
        if process_group is None and self._world is not None:
            process_group = make_process_group(self._world, name, ranks, axes, self.deadline_s)
        calls, control = open_calls(process_group, self._world, membership, self.deadline_s)
        return Group(axes, calls, process_group, control, self.device, check=self.check)

    @classmethod
    def from_device_mesh(
        cls,
        device_mesh: DeviceMesh,
        *,
        axes: Mapping[str, str] | None = None,
        deadline_s: float | None = None,
        check: bool | None = None,
    ) -> Self:
        """Return a mesh over the groups of a torch DeviceMesh that covers the world; all processes make it.

        Args:
            device_mesh: with named dims.
            axes: which of our axes each dim is, such as {"fsdp": "dp"}; a dim of one of our names needs no entry.
            deadline_s: as in `Mesh`.
            check: as in `Mesh`.

        Raises:
            ConfigError: dims without an axis, or ranks that no order of the axes gives.
        """
        layout, groups = read_device_mesh(device_mesh, axes or {})
        return cls._over(layout, groups, deadline_s, check)

    @classmethod
    def from_megatron(cls, parallel_state: Any, *, deadline_s: float | None = None, check: bool | None = None) -> Self:
        """Return a mesh over Megatron's groups; all processes make it, after `initialize_model_parallel`.

        Args:
            parallel_state: the module `megatron.core.parallel_state`, or what answers like it.
            deadline_s: as in `Mesh`.
            check: as in `Mesh`.

        Raises:
            ConfigError: it is not initialised, or its groups are not those of any order of the axes.
        """
        layout, groups = read_parallel_state(parallel_state)
        return cls._over(layout, groups, deadline_s, check)

    @classmethod
    def _over(
        cls,
        layout: Layout,
        groups: Mapping[tuple[str, ...], dist.ProcessGroup],
        deadline_s: float | None,
        check: bool | None,
    ) -> Self:
        mesh = cls.__new__(cls)
        mesh._set_up(layout, device=None, deadline_s=deadline_s, check=check)
        mesh._adopted.update(groups)
        for axes, group in groups.items():
            name_for_liveness(group, axes)
        return mesh


def _opened(device: str | Device | None, world: World | None) -> Device:
    """Return the device of a mesh: as asked, else the world's, else the first kind that is here."""
    if device is None:
        return world.device if world else open_device()
    return open_device(device) if isinstance(device, str) else device


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
    """Layout and groups of a DeviceMesh that covers the world."""
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
    """Layout and groups of Megatron, found by comparing its groups with ours for every order of the axes."""
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
    """Return the groups that this version of Megatron has and has made."""
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

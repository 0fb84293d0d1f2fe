"""Meshes and groups over process groups of other code: torch's DeviceMesh, Megatron, a plain process group."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from offbeat_core import ConfigError, GuardError
from offbeat_mesh import Group, Layout, Mesh, join_world


@pytest.mark.ranks(4)
def test_a_device_mesh_keeps_its_groups(rank):
    theirs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mesh = Mesh.from_device_mesh(theirs)
    assert mesh.layout == Layout(dp=2, tp=2)
    for axis in ("dp", "tp"):
        assert mesh.group(axis).process_group is theirs.get_group(axis)
        assert mesh.group(axis).ranks == tuple(dist.get_process_group_ranks(theirs.get_group(axis)))
        assert mesh.group(axis).rank == theirs.get_local_rank(axis)
        second = mesh.group(axis, channel="second thread")
        assert second.process_group is not mesh.group(axis).process_group
        assert second.all_gather_data(rank) == list(mesh.group(axis).ranks)
    assert mesh.group("dp", "tp").all_gather_data(rank) == [0, 1, 2, 3]
    with mesh.where(tp=0) as here:
        if here:
            mesh.group("dp").barrier()
            with pytest.raises(GuardError, match="share tp"):
                mesh.group("tp").barrier()


@pytest.mark.ranks(4)
def test_dims_of_other_names_and_orders_are_read(rank):
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "model"))
    mesh = Mesh.from_device_mesh(named, axes={"fsdp": "dp", "model": "tp"})
    assert mesh.group("tp").process_group is named.get_group("model")
    swapped = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))  # dp is the fastest here
    mesh = Mesh.from_device_mesh(swapped)
    assert mesh.group("dp").ranks == ((0, 1), (0, 1), (2, 3), (2, 3))[rank]
    assert mesh.coordinates["tp"] == rank // 2
    transposed = DeviceMesh("cpu", torch.arange(4).view(2, 2).t().contiguous(), mesh_dim_names=("dp", "tp"))
    mesh = Mesh.from_device_mesh(transposed)
    assert mesh.group("dp").ranks == ((0, 1), (0, 1), (2, 3), (2, 3))[rank]
    assert mesh.group("dp").all_gather_data(rank) == list(mesh.group("dp").ranks)


@pytest.mark.ranks(4)
def test_a_device_mesh_that_says_too_little_is_refused(rank):
    with pytest.raises(ConfigError, match="each dim of a DeviceMesh must be one of tp, cp, dp, pp: got no names"):
        Mesh.from_device_mesh(init_device_mesh("cpu", (4,)))
    with pytest.raises(ConfigError, match="name them, such as axes="):
        Mesh.from_device_mesh(init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",)))
    with pytest.raises(ConfigError, match="in an order that its dims explain"):
        Mesh.from_device_mesh(DeviceMesh("cpu", [[0, 3], [2, 1]], mesh_dim_names=("dp", "tp")))


@pytest.mark.ranks(4)
def test_a_plain_process_group_gets_our_calls(rank):
    plain = dist.new_group([1, 3])
    with join_world(device="cpu") as world:
        if rank in (1, 3):
            group = Group.adopt(plain, axes=("dp",))
            assert (group.axes, group.ranks, group.rank) == (("dp",), (1, 3), rank // 2)
            assert group.process_group is plain
            assert group.all_reduce(torch.ones(1)).item() == 2
            assert group.broadcast_data(rank, source=1) == 3
            with Mesh(dp=2, tp=2, device=world.device).where(dp=0), pytest.raises(GuardError, match="share dp"):
                group.barrier()
        else:
            Mesh(dp=2, tp=2)


def test_adopting_needs_the_world():
    with pytest.raises(ConfigError, match="call join_world"):
        Group.adopt(None, axes=("dp",))


def parallel_state(layout, made):
    """The part of megatron.core.parallel_state that is read, over real process groups in Megatron's arrangement."""

    def group(*axes):
        for ranks in layout.groups(axes):  # Megatron makes all groups of a kind on all ranks, in one order
            one = dist.new_group(list(ranks))
            if dist.get_rank() in ranks:
                made[axes] = one
        return made[axes]

    groups = {axes: group(*axes) for axes in (("tp",), ("pp",), ("cp",), ("dp",), ("dp", "cp"), ("ep",), ("edp",))}

    def never_made():
        raise AssertionError("tensor and context parallel group is not initialized")

    return SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        get_tensor_model_parallel_world_size=lambda: layout.tp,
        get_pipeline_model_parallel_world_size=lambda: layout.pp,
        get_context_parallel_world_size=lambda: layout.cp,
        get_data_parallel_world_size=lambda: layout.dp,
        get_expert_model_parallel_world_size=lambda: layout.ep,
        get_tensor_model_parallel_group=lambda: groups["tp",],
        get_pipeline_model_parallel_group=lambda: groups["pp",],
        get_context_parallel_group=lambda: groups["cp",],
        get_data_parallel_group=lambda with_context_parallel=False: (
            groups["dp", "cp"] if with_context_parallel else groups["dp",]
        ),
        get_expert_model_parallel_group=lambda: groups["ep",],
        get_expert_data_parallel_group=lambda: groups["edp",],
        get_tensor_and_context_parallel_group=never_made,
    )


@pytest.mark.ranks(4)
def test_megatron_s_groups_are_adopted_in_its_order(rank):
    for order in (("tp", "cp", "dp", "pp"), ("tp", "cp", "pp", "dp")):
        layout = Layout(dp=2, cp=1, tp=1, pp=2, ep=2, order=order)
        made = {}
        mesh = Mesh.from_megatron(parallel_state(layout, made))
        assert mesh.layout == layout
        for axes, group in made.items():
            assert mesh.group(*axes).process_group is group
            assert mesh.group(*axes).ranks == layout.members(axes, rank)
        with mesh.where(pp="last") as takes_part:
            if takes_part:
                assert mesh.group("dp", "cp").all_reduce(torch.ones(1)).item() == 2
        assert mesh.group("dp", "tp").all_gather_data(rank) == list(layout.members(("dp", "tp"), rank))


@pytest.mark.ranks(4)
def test_a_megatron_that_does_not_fit_is_refused(rank):
    with pytest.raises(ConfigError, match="not initialised"):
        Mesh.from_megatron(SimpleNamespace(model_parallel_is_initialized=lambda: False))
    state = parallel_state(Layout(dp=2, tp=2, ep=2), {})
    state.get_expert_model_parallel_group = state.get_data_parallel_group
    with pytest.raises(ConfigError, match="set expert_tensor_parallel_size=1"):
        Mesh.from_megatron(state)
    state.get_tensor_model_parallel_group = state.get_data_parallel_group
    with pytest.raises(ConfigError, match="fit no order of tp, cp, dp, pp"):
        Mesh.from_megatron(state)

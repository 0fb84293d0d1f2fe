"""megatron-core's groups in this process: one layout at a time, shared by the engines that ask for the same one."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch._C._distributed_c10d import HashStore

from offbeat_engine_megatron._layout import Parallel
from offbeat_mesh import Mesh, World, current_world, join_world
from offbeat_training import TrainerRanks
from offbeat_types import ConfigError, Floats


@dataclass(kw_only=True)
class _Held:
    parallel: Parallel
    mesh: Mesh
    world: World | None  # of this process alone, when nobody had joined one
    num_engines: int = 0


_held: list[_Held] = []


def join_groups(parallel: Parallel, given: Mesh | None, device: str, seed: int) -> Mesh:
    """Make megatron-core's groups, or take part in those that are there; each call needs a `leave_groups`.

    Args:
        parallel: sizes of the axes.
        given: the caller's mesh over the same ranks; None for one process without a world.
        device: for a world of one process.
        seed: of megatron-core's random state.

    Returns:
        A mesh over megatron-core's own groups.

    Raises:
        ConfigError: an engine of another layout is open in this process, or the world is larger than one process.
    """
    if _held and _held[0].parallel != parallel:
        raise ConfigError(
            f"megatron-core holds one layout per process: an open engine has {_held[0].parallel}, asked for is "
            f"{parallel}; close that engine first"
        )
    if not _held:
        _held.append(_make(parallel, given, device))
    model_parallel_cuda_manual_seed(seed)
    _held[0].num_engines += 1
    return _held[0].mesh


def leave_groups() -> None:
    """One engine less; the last one gives the groups up."""
    held = _held[0]
    held.num_engines -= 1
    if held.num_engines == 0:
        _held.clear()
        parallel_state.destroy_model_parallel()
        # It forgets some (0.16.1: _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP), whose threads a fork lacks.
        for name, value in list(vars(parallel_state).items()):
            if isinstance(value, dist.ProcessGroup):
                setattr(parallel_state, name, None)
        if held.world is not None:
            held.world.leave()


def _make(parallel: Parallel, given: Mesh | None, device: str) -> _Held:
    world = current_world()
    if given is None and world is not None and world.size > 1:
        raise ConfigError(
            f"this process is one of {world.size}, and megatron-core's groups cover all of them: "
            f"pass a mesh, MegatronTrainEngine.create(config, Mesh(dp={world.size}))"
        )
    if parallel_state.model_parallel_is_initialized():
        raise ConfigError(
            "megatron-core's parallel_state is initialised already, by somebody else: the engine makes "
            "its own groups; call destroy_model_parallel() first"
        )
    own = join_world(rank=0, size=1, store=HashStore(), device=device) if world is None else None
    deadline_s = given.deadline_s if given is not None else (own or world).deadline_s  # type: ignore[union-attr]
    initialise_groups(parallel, deadline_s)
    check = given.check if given is not None else None
    return _Held(
        parallel=parallel,
        mesh=Mesh.from_megatron(parallel_state, deadline_s=deadline_s, check=check),
        world=own,
    )


def initialise_groups(parallel: Parallel, deadline_s: float) -> None:
    """Make megatron-core's groups over the joined world; all ranks call it."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=deadline_s / 60,
        create_gloo_process_groups=False,
    )


class Ranks(TrainerRanks):
    """The ranks of a trainer. The first of tp and cp on the last stage reports what its share has found."""

    def __init__(self, mesh: Mesh) -> None:
        self._pp = mesh.group("pp")
        speaks = bool(mesh.where(pp="last", tp=0, cp=0))
        super().__init__(mesh.group("dp", "cp", "tp", "pp"), mesh.group("dp"), speaks=speaks)

    def gather_shares(self, values: Floats, counts: Sequence[int], device: torch.device) -> list[Floats]:
        """Values of every share, found on its last stage; `counts` says how many each has."""
        padded = torch.zeros(max(counts), dtype=torch.float32)
        if self._pp.rank == self._pp.size - 1:
            padded[: len(values)] = torch.from_numpy(values)
        padded = padded.to(device)
        if self._pp.size > 1:
            self._pp.broadcast(padded, source=self._pp.size - 1)
        found = self._dp.all_gather(padded).cpu().numpy()
        return [np.asarray(row[:count]) for row, count in zip(found, counts, strict=True)]

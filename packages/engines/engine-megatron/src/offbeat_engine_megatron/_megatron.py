"""megatron-core in this process: its import, its groups, and how it runs on the CPU over gloo.

Groups: one layout at a time, shared by the engines that ask for the same one.

megatron-core writes "cuda" for "the device". The shim for the CPU is applied around the engine's own calls
and undone when they return; importing this module changes nothing. On an accelerator of any kind it is never applied.
What it does, each because megatron-core 0.16 would fail without it:
- devices named "cuda" in torch calls become the CPU, pinned memory becomes plain memory, `Tensor.cuda` stays put;
- `Tensor.type()` says "torch.cuda.FloatTensor" to callers in megatron, which compare it with that;
- `torch.cuda` streams, events and `synchronize` do nothing, its random state is the CPU generator's;
- gloo has no average and wants split sizes as lists: `all_reduce` adds and divides, `all_to_all_single` converts;
- the router's product does without TransformerEngine, whose absence one test of megatron-core's does not see.
"""

import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.overrides import TorchFunctionMode

from offbeat_core import INSTALL_LINES, BackendError, ConfigError
from offbeat_engine_megatron._layout import Parallel
from offbeat_mesh import Mesh, World, current_world, join_world

NOTICES = (
    "(Transformer Engine and )?Apex (is|are) not installed",
    "full scope is deprecated",
    "When using (sequence parallelism|async grad allreduce) it is recommended",
    "`torch.distributed.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated",
    "The .grad attribute of a Tensor that is not a leaf Tensor is being accessed",
)
"""Warnings of megatron-core, and of torch about it, at every start: nothing that a user could act upon."""

MODULES = (
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.parallel_state",
    "megatron.core.pipeline_parallel",
    "megatron.core.tensor_parallel",
    "offbeat_engine_megatron._checkpoint",
    "offbeat_engine_megatron._passes",
)
"""Modules that the engine uses of megatron-core, and its own modules that import more of it."""


def require_megatron() -> None:
    """Raise when megatron-core is not installed.

    Raises:
        BackendError: with the install line.
    """
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        line = INSTALL_LINES["offbeat.engine", "megatron"]
        raise BackendError(f"the megatron engine needs megatron-core, which is not installed; install it with: {line}")


def load_megatron(*, compiled: bool = False) -> None:
    """Import `MODULES`, and silence `NOTICES`; the second time is without effect.

    Args:
        compiled: let megatron-core wrap its small functions in torch.compile. On a CPU compiling them costs more
            than it ever saves, and their import would load the compiler (6.4 s instead of 4.0 s).

    Raises:
        BackendError: it is not installed.
    """
    if all(name in sys.modules for name in MODULES):
        return
    require_megatron()
    for notice in NOTICES:
        warnings.filterwarnings("ignore", message=notice)
    original = torch.compile
    if not compiled:
        torch.compile = _as_it_is
    try:
        for name in MODULES:
            import_module(name)
    finally:
        torch.compile = original
    # 0.16.1 asks for this name in every router, and defines it only where TransformerEngine is installed.
    moe_utils: Any = import_module("megatron.core.transformer.moe.moe_utils")
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)
    # And takes what stands there for its classes for them: `isinstance` of that raises.
    latent: Any = import_module("megatron.core.transformer.multi_latent_attention")
    latent.HAVE_TE = latent.HAVE_TE and isinstance(latent.TELinear, type)


def _as_it_is(model: Any = None, **options: Any) -> Any:
    """torch.compile, doing nothing: as a function or as a decorator with options."""
    return model if model is not None else lambda wrapped: wrapped


@dataclass(kw_only=True)
class _JoinedWorld:
    parallel: Parallel
    mesh: Mesh
    world: World | None  # of this process alone, if it had joined none
    num_engines: int = 0


_held: list[_JoinedWorld] = []


def join_groups(parallel: Parallel, given: Mesh | None, device: str, seed: int) -> Mesh:
    """Make megatron-core's groups, or take part in those that are there; each call needs a `leave_groups`.

    Args:
        parallel: sizes of the axes.
        given: the caller's mesh over the same ranks; None for one process without a world.
        device: for a world of one process.
        seed: of megatron-core's random state.

    Returns:
        A mesh over megatron-core's own groups.
    """
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    if _held and _held[0].parallel != parallel:
        raise ConfigError(
            f"megatron-core holds one layout per process: an open engine has {_held[0].parallel}, asked for is "
            f"{parallel}; close that engine first"
        )
    if not _held:
        _held.append(_make_groups(parallel, given, device))
    model_parallel_cuda_manual_seed(seed)
    _held[0].num_engines += 1
    return _held[0].mesh


def leave_groups() -> None:
    """Count one engine less; the last one destroys the groups."""
    from megatron.core import parallel_state

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


def _make_groups(parallel: Parallel, given: Mesh | None, device: str) -> _JoinedWorld:
    from megatron.core import parallel_state

    world = current_world()
    if given is None and world is not None and world.size > 1:
        raise ConfigError(
            f"this process is one of {world.size}, and megatron-core's groups cover all of them: "
            f"pass a mesh, MegatronTrainEngine.create(config, Mesh(dp={world.size}))"
        )
    if parallel_state.model_parallel_is_initialized():
        raise ConfigError(
            "megatron-core's parallel_state is initialised already, by other code: the engine makes "
            "its own groups; call destroy_model_parallel() first"
        )
    own = join_world(rank=0, size=1, store=HashStore(), device=device) if world is None else None
    deadline_s = given.deadline_s if given is not None else (own or world).deadline_s  # type: ignore[union-attr]
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
    check = given.check if given is not None else None
    mesh = Mesh.from_megatron(parallel_state, deadline_s=deadline_s, check=check)
    return _JoinedWorld(parallel=parallel, mesh=mesh, world=own)


ACCELERATOR = "cuda"
"""Name that megatron-core gives every device."""

HOST = torch.device("cpu").type

_ABSENT = object()
"""Stands for an attribute that was not there."""


def shim_for(device: torch.device) -> AbstractContextManager[Any]:
    """Make the block around calls into megatron-core on this device: nothing on accelerators.

    Of these "cuda" is what megatron-core expects; for others it has been patched by their own package.
    """
    return CpuShim() if device.type == HOST else nullcontext()


class CpuShim:
    """Applies the replacements on entering, outermost first, and restores everything on leaving.

    It may be entered again while it is applied, by the same thread.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._mode = _OnCpu()
        self._restore: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Self:
        self._depth += 1
        if self._depth == 1:
            for owner, attributes in _replacements():
                for name, value in attributes.items():
                    self._restore.append((owner, name, getattr(owner, name, _ABSENT)))
                    setattr(owner, name, value)
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            while self._restore:
                owner, name, value = self._restore.pop()
                delattr(owner, name) if value is _ABSENT else setattr(owner, name, value)


class _OnCpu(TorchFunctionMode):
    """Rewrites the arguments of torch's own functions."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs and _caller_is_megatron():
            return func(*args).replace("torch.", f"torch.{ACCELERATOR}.")
        if kwargs:
            kwargs = {name: _on_cpu(name, value) for name, value in kwargs.items()}
        if func is torch.Tensor.to:
            args = tuple(_on_cpu("device", value) for value in args)
        return func(*args, **(kwargs or {}))


def _on_cpu(name: str, value: Any) -> Any:
    """Return the argument of a torch function, for the CPU."""
    if name == "device" and isinstance(value, str | torch.device) and torch.device(value).type == ACCELERATOR:
        return torch.device("cpu")
    return False if name == "pin_memory" else value


def _caller_is_megatron() -> bool:
    """Return whether the nearest caller outside torch and this module is megatron-core."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("torch."):
        frame = frame.f_back
    return bool(frame.f_globals.get("__name__", "").startswith("megatron."))


class _Idle:
    """A stream or event on which nothing is ever queued."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait(self, *args: Any) -> None:
        """Do nothing: there is nothing to wait for."""

    record = synchronize = wait_stream = wait_event = wait

    def record_event(self, *args: Any) -> "_Idle":
        """Return one more of the same."""
        return _Idle()

    def __enter__(self) -> "_Idle":
        return self

    def __exit__(self, *error: object) -> None:
        pass


def _replacements() -> list[tuple[Any, dict[str, Any]]]:
    """Owner, and what takes the place of its attributes."""
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import moe_utils

    cuda = {
        "current_device": lambda: torch.device("cpu"),
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        **dict.fromkeys(("Stream", "Event", "stream", "current_stream", "default_stream"), _Idle),
    }
    random_state = {
        "_get_cuda_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "_set_cuda_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
    }
    collectives = {
        "all_reduce": _averaging(dist.all_reduce),
        "all_to_all_single": _with_list_splits(dist.all_to_all_single),
    }
    return [
        (torch.cuda, cuda),
        (torch.cuda.random, {"get_rng_state": cuda["get_rng_state"]}),
        (megatron_random, random_state),
        (moe_utils, {"te_general_gemm": None}),
        (dist, collectives),
    ]


def _averaging(all_reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Return an all_reduce that also averages over gloo."""

    def reduce(
        tensor: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        if op != dist.ReduceOp.AVG:
            return all_reduce(tensor, op=op, group=group, async_op=async_op)
        assert not async_op, "an average over gloo is not asynchronous"
        all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
        tensor.div_(dist.get_world_size(group))
        return None

    return reduce


def _with_list_splits(all_to_all: Callable[..., Any]) -> Callable[..., Any]:
    """Return an all_to_all_single that takes its split sizes as tensors too."""

    def exchange(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        **rest: Any,
    ) -> Any:
        splits = (output_split_sizes, input_split_sizes)
        sizes = [each.tolist() if isinstance(each, torch.Tensor) else each for each in splits]
        return all_to_all(output, input, *sizes, **rest)

    return exchange

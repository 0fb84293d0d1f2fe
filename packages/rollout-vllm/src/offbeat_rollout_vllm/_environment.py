"""Environment variables that vLLM reads while it starts, and that nothing else should see afterwards."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from offbeat_types import RolloutEngineConfig

SHARED_MEMORY: Final = Path("/dev/shm")


def remove_shared_memory(prefix: str) -> None:
    """Remove what tensor-parallel workers on a CPU leave behind when they are killed.

    Source: vllm 0.32.0, vllm/distributed/device_communicators/cpu_communicator.py (names begin with VLLM_DIST_IDENT).
    """
    if prefix and SHARED_MEMORY.is_dir():
        for path in SHARED_MEMORY.glob(f"{prefix}*"):
            path.unlink(missing_ok=True)


@contextmanager
def environment(defaults: Mapping[str, str], required: Mapping[str, str]) -> Iterator[None]:
    """Set variables, and put everything back afterwards, what vLLM has changed itself included.

    Args:
        defaults: what the user may have set differently.
        required: what must be so.
    """
    before = dict(os.environ)
    os.environ.update({name: value for name, value in defaults.items() if name not in before} | dict(required))
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


def start_variables(config: RolloutEngineConfig, num_ranks: int) -> dict[str, str]:
    """What the engine and its child processes start with.

    Args:
        config: device and threads.
        num_ranks: tensor-parallel ranks times pipeline stages.
    """
    variables = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads: a fork could inherit a held lock
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if config.device in ("auto", "cpu"):
        variables["TORCH_COMPILE_DISABLE"] = "1"  # one small function of the sampler: 26 s at the first token ever
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(_core_lists(config.num_threads, num_ranks))
        variables["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"  # vLLM would leave a core idle for its scheduler
    return variables


def _core_lists(num_threads: int, num_ranks: int) -> list[str]:
    """Cores of each rank: its share of those this process may use, at most `num_threads`. 0 threads: no limit."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    share = max(1, len(cores) // num_ranks)
    lists = []
    for rank in range(num_ranks):
        first = rank * share % len(cores)
        mine = cores[first : first + share]
        lists.append(",".join(str(core) for core in mine[: num_threads or share]))
    return lists

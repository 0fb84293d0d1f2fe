"""Axes that a name speaks of: names of ranks, of predicates about ranks, and of groups.

An axis is "dp", "cp", "tp", "pp", "ep" or one of three general ones: "world" (a rank among all), "node" (a rank within
its machine) and "rank" (a rank within a group about which nothing else is known).
"""

import re
from collections.abc import Set
from functools import lru_cache
from typing import Final

Axes = frozenset[str]

WORLD: Final[Axes] = frozenset(("world",))
NONE: Final[Axes] = frozenset()
UNKNOWN: Final[Axes] = frozenset(("unknown",))

_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_BRACKETS: Final = re.compile(r"\[(\w+)\]")
_AXIS_OF_WORD: Final = {
    **dict.fromkeys(("dp", "data", "fsdp", "hsdp", "ddp", "replicate", "shard", "dpxcp", "edp", "zero"), "dp"),
    **dict.fromkeys(("cp", "context", "sp", "sequence", "ulysses", "ring", "dpxcp", "seq"), "cp"),
    **dict.fromkeys(("tp", "tensor", "mp", "model"), "tp"),
    **dict.fromkeys(("pp", "pipe", "pipeline", "embedding", "embd", "stage"), "pp"),
    **dict.fromkeys(("ep", "expert", "moe", "experts"), "ep"),
    **dict.fromkeys(("node", "local", "machine", "host", "intra"), "node"),
    **dict.fromkeys(("world", "global"), "world"),
}
# Words of groups that mean no axis there: "data" of `data_group` does, "model" of `model_update_group` does not.
_UPDATE_WORDS: Final = frozenset(
    ("update", "weight", "weights", "sync", "transfer", "nccl", "vllm", "sglang", "engine", "rollout")
)
_NOT_A_RANK: Final = frozenset(
    (
        "lora",
        "low",
        "single",
        "ranks",
        "size",
        "num",
        "count",
        "world",
        "effective",
        "matrix",
        "svd",
        "max",
        "min",
        "full",
        "reward",
        "from",
        "only",
        "broadcast",
        "per",
        "config",
        "cfg",
        "fn",
        "map",
        "list",
        "offset",
        "info",
        "top",
        "bm25",
        "mrr",
        *("generator", "enum", "iterator", "table", "dict"),
    )
)
_LEADERS: Final = frozenset(
    (
        "main",
        "master",
        "leader",
        "primary",
        "chief",
        "coordinator",
        "representative",
        "rank0",
        "lead",
        "logging",
        "head",
        "src",
        "source",
    )
)
_PROCESS: Final = frozenset(("process", "rank", "worker", "proc", "node", "host", "member", "zero", "replica"))
_LEADER_NAMES: Final = frozenset(
    (
        *(
            "is_main",
            "is_master",
            "is_leader",
            "is_primary",
            "is_chief",
            "is_coordinator",
            "is_global_zero",
            "is_world_process_zero",
        ),
        *(
            "is_local_process_zero",
            "is_rank_zero",
            "should_save",
            "is_saving_process",
            "is_rank0",
            "is_rank_0",
            "is_zero_rank",
            "process_index",
            "local_process_index",
            "is_log_rank",
        ),
        *(
            "proc_id",
            "procid",
            "is_root",
            "am_master",
            "master_process",
            "main_process",
            "is_driver_rank",
            "is_head_node",
            "is_logger",
            "process_id",
        ),
    )
)
_STAGE: Final = re.compile(
    r"(first|last)_(pp_|pipeline_)?stage|pipeline_(first|last)_stage|is_(first|last)_(pp|pipeline)|(has|is)_(first|last)_stage|stage_(id|idx|index)$"
)
_RANK_VARIABLES: Final = re.compile(
    r"^(RANK|LOCAL_RANK|GROUP_RANK|NODE_RANK|SLURM_PROCID|SLURM_LOCALID|OMPI_COMM_WORLD_(LOCAL_)?RANK|PMI_RANK|.*_RANK)$"
)


@lru_cache(maxsize=100_000)
def words(name: str) -> tuple[str, ...]:
    """Return the words of an identifier, in lower case, for `getDataParallelRank` as for `get_data_parallel_rank`."""
    return tuple(word.lower() for word in _WORD.findall(name))


@lru_cache(maxsize=100_000)
def rank_axes(name: str) -> Axes:
    """Return axes on which a value of this name depends; none if it is no name of a rank. `name` has no dots."""
    if _STAGE.search(name.lower()):
        return frozenset(("pp",))
    parts = words(name)
    plain = "_".join(parts)
    if plain in _LEADER_NAMES or (name.startswith("is_") and _LEADERS & set(parts) and _PROCESS & set(parts)):
        return frozenset(("node",)) if "local" in parts else _axes_of(parts, leader=True)
    if "rank" not in parts and "coordinate" not in parts:
        return NONE
    if _NOT_A_RANK & set(parts) and parts not in (("world", "rank"), ("get", "world", "rank")):
        return (
            _axes_of(parts, leader=False) if "world" not in parts and parts[-1] == "rank" and _is_axis(parts) else NONE
        )
    return _axes_of(parts, leader=False)


# Holders whose `rank` is that of a matrix, and holders whose `should_save` is that of a step.
_HOLDERS_OF_OTHERS: Final = frozenset(("lora", "peft", "adapter", "svd", "dora", "galore"))
_HOLDERS_OF_STEPS: Final = frozenset(("control", "state"))


@lru_cache(maxsize=100_000)
def attribute_axes(text: str) -> Axes:
    """Return `rank_axes` of the last name in a dotted text; none for `config.lora.rank` and `control.should_save`."""
    holder, _, last = text.rpartition(".")
    held_by = set(words(holder.rpartition(".")[2]))
    if (held_by & _HOLDERS_OF_OTHERS and last == "rank") or (held_by & _HOLDERS_OF_STEPS and last == "should_save"):
        return NONE
    return rank_axes(last)


def _is_axis(parts: tuple[str, ...]) -> bool:
    return "parallel" in parts and not {"num", "size", "ranks", "count"} & set(parts)


def _axes_of(parts: tuple[str, ...], *, leader: bool) -> Axes:
    """Axes of the words of a rank's name; "world" where there are none."""
    found = {_AXIS_OF_WORD[word] for word in parts if word in _AXIS_OF_WORD}
    if leader:
        found -= {"world"}
    if "expert" in parts and "model" in parts:  # Megatron's expert_model_parallel is expert parallelism
        found.discard("tp")
    elif "model" in parts and "parallel" in parts and "tensor" not in parts and "pipeline" not in parts:
        found |= {"tp", "pp"}
    if "mp" in parts:
        found |= {"tp", "pp"}
    return frozenset(found) or WORLD


_LEADER_DECORATORS: Final = frozenset(
    (
        *("rank_zero_only", "rank0_only", "master_only", "main_process_only", "on_main_process", "only_on_rank0"),
        *("on_local_main_process", "local_main_process_only", "on_last_process", "only_rank_zero", "run_on_rank0"),
        *("rank_zero_fn", "is_main_process_only", "master_process_only", "run_on_main_process", "on_rank_0"),
    )
)


def decorator_axes(name: str) -> Axes:
    """Axes on which it depends whether a function with this decorator does anything: `@rank_zero_only`."""
    last = name.rsplit(".", 1)[-1]
    if last not in _LEADER_DECORATORS:
        return NONE
    return frozenset(("node",)) if "local" in last else WORLD


@lru_cache(maxsize=100_000)
def environment_axes(variable: str) -> Axes:
    """Axes of an environment variable that a launcher sets per process."""
    if not _RANK_VARIABLES.match(variable):
        return NONE
    return frozenset(("node",)) if "LOCAL" in variable else WORLD


@lru_cache(maxsize=100_000)
def group_axes(text: str) -> Axes:
    """Axes that the group spans which an expression of this text gives: `mpu.get_tensor_model_parallel_group()`.

    Returns:
        WORLD for the default group, UNKNOWN where the text names no axis.
    """
    if text in ("", "None", "WORLD") or text.endswith((".WORLD", "get_world_group()", "_get_default_group()")):
        return WORLD
    head, _, options = text.partition("(")
    last = head.rsplit(".", 1)[-1]
    parts = words(last)
    chosen = _BRACKETS.findall(head)
    if chosen and (head.endswith("]") or last in ("get_group", "group")):  # mesh["tp"].get_group()
        parts = words(chosen[-1]) or parts
    if {"get", "group"} == set(parts) and options:  # mesh.get_group("tp")
        parts = words(options)
    if "exclude" in parts or "no" in parts or "without" in parts:
        return frozenset(("tp", "pp", "cp")) if "dp" in parts or "data" in parts else UNKNOWN
    if _UPDATE_WORDS & set(parts):
        return UNKNOWN
    found = {_AXIS_OF_WORD[word] for word in parts if word in _AXIS_OF_WORD}
    if parts in (("model", "parallel", "group"), ("get", "model", "parallel", "group"), ("mp", "group")):
        found |= {"tp", "pp"}
    elif "model" in parts and (not {"parallel", "tensor"} & set(parts) or {"pipeline", "expert"} & set(parts)):
        found.discard("tp")
    if "with_context_parallel=True" in options or "with_context_parallel]" in options:
        found.add("cp")
    if "gloo" in parts and not found:
        return UNKNOWN
    return frozenset(found) or UNKNOWN


def meet(guard: Set[str], spanned: Set[str]) -> bool:
    """Return whether members of one group over the axes `spanned` can differ in a condition on the axes `guard`.

    Expert parallelism divides the ranks of data, context and tensor parallelism anew, so it meets them all.
    """
    if not guard:
        return False
    if spanned & {"world", "unknown", "node"} or guard & {"world", "node", "rank"}:
        return True
    if ("ep" in guard and spanned & {"dp", "cp", "tp"}) or ("ep" in spanned and guard & {"dp", "cp", "tp"}):
        return True
    return bool(guard & spanned)

"""Variables that a script exports to what it starts: which are needed here, and which the user has to set."""

import os
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

from offbeat_recipes._imports.shell.reading import ShellReading

_NOT_NEEDED: Final[Mapping[str, str]] = {
    "VLLM_USE_V1": "the vLLM that is supported has its engine V1 alone",
    "VLLM_ENABLE_V1_MULTIPROCESSING VLLM_WORKER_MULTIPROC_METHOD": "an engine is started as a process of its own",
    "VLLM_ALLREDUCE_USE_SYMM_MEM VLLM_DISABLE_COMPILE_CACHE": "the adapter chooses what vLLM is started with",
    "TOKENIZERS_PARALLELISM": "texts are encoded before processes are forked",
    "HYDRA_FULL_ERROR": "there is no hydra here",
    "RAY_DEDUP_LOGS RAY_BACKEND_LOG_LEVEL RAY_ADDRESS RAY_EXPERIMENTAL_NOSET_*": "see section cluster",
    "PYTHONUNBUFFERED PYTHONPATH VERL_* WORKING_DIR RUNTIME_ENV": "it belongs to what the script starts",
}
_BY_HAND: Final = (
    "set it yourself before the run where your machine needs it (processes on this machine inherit it; with Ray, set "
    "it on every node before `ray start`)"
)


def describe_exports(reading: ShellReading, text: str) -> Sequence[str]:
    """Return a line for each exported variable that the script makes no use of itself.

    Args:
        reading: of the script.
        text: of the script.
    """
    lines = []
    for name, value in reading.exports.items():
        if re.search(rf"\$\{{?{name}\b", text):
            continue
        reasons = (reason for names, reason in _NOT_NEEDED.items() if _is_one_of(name, names))
        reason = next(reasons, "")
        lines.append(f"{name} = {value}: " + (f"not needed: {reason}" if reason else _BY_HAND))
    return lines


def describe_defaults(reading: ShellReading, options: Mapping[str, Any]) -> Sequence[str]:
    """Return a line for each default of the script that stands although this machine sets the variable otherwise."""
    used = {str(value) for value in options.values()}
    return [
        f"{name} = {default} stands, the default of the script; it is {os.environ[name]} here: --set {name}="
        f"{os.environ[name]}"
        for name, default in reading.defaults.items()
        if default in used and "/" not in default and os.environ.get(name, default) != default
    ]


def _is_one_of(name: str, patterns: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns.split())

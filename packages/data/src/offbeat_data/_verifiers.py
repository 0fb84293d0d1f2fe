"""Environments of verifiers: found by name, and their data as rows.

Source: https://github.com/PrimeIntellect-ai/verifiers, verifiers/legacy/utils/env_utils.py (`load_environment`),
verifiers/legacy/envs/environment.py (`get_dataset`, `tool_defs`, `requires_group_rollouts`).
"""

import json
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from typing import Any, Final

from offbeat_data._plain import pack, to_plain
from offbeat_types import BackendError, ConfigError

ENTRY_FIELD: Final = "verifiers"
"""Field of a prompt that holds its environment, the environment's arguments and the row; `reset` reads it."""


def draw_rows(name: str, *, split: str, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of an environment's own data, with the columns `prompt`, `answer`, `tools` and `verifiers`.

    Args:
        name: of the environment, as `verifiers.load_environment` takes it.
        split: "train", or "eval" for its evaluation data.
        options: its arguments.

    Raises:
        BackendError: verifiers is not installed.
        ConfigError: no such environment or split, or one that scores whole groups.
    """
    if split not in ("train", "eval"):
        raise ConfigError(f"data.split: verifiers:{name} has the splits train and eval, got {split!r}")
    options_json = json.dumps(dict(options), sort_keys=True)
    environment = load_environment(name, options_json)
    dataset = environment.get_dataset() if split == "train" else environment.get_eval_dataset()
    tools = [_tool_schema(tool) for tool in environment.tool_defs or []]
    return [_row(name, options_json, row, tools) for row in dataset]


def _row(name: str, options_json: str, row: dict[str, Any], tools: list[dict[str, Any]]) -> dict[str, Any]:
    kept = {"environment": name, "options": options_json, "row": pack(to_plain(row))}
    return {"prompt": row["prompt"], "answer": row.get("answer"), "tools": tools, ENTRY_FIELD: kept}


def _tool_schema(tool: Any) -> dict[str, Any]:
    """A tool as chat templates expect it."""
    described = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": described}


def import_verifiers() -> Any:
    """The package, which takes seconds to import.

    Raises:
        BackendError: it is not installed.
    """
    line = 'pip install "verifiers>=0.3,<0.3.2"'
    try:
        with _own_signals():
            verifiers = import_module("verifiers")
    except ImportError as error:
        raise BackendError(f"environments of verifiers need that package ({error}); install it with: {line}") from error
    if not hasattr(verifiers, "load_environment"):  # after 0.3.1 there is only its v1, whose agents are programs
        raise BackendError(
            f"verifiers {verifiers.__version__} has no environments with turns any more, 0.3.1 had: {line}; "
            "agents of its v1 roll out through a server of the rollout engine"
        )
    return verifiers


@lru_cache(maxsize=8)
def load_environment(name: str, options_json: str) -> Any:
    """An environment, once per process.

    Raises:
        ConfigError: there is none, it refuses the options, or it scores whole groups.
    """
    verifiers = import_verifiers()
    try:
        with _own_signals():
            environment = verifiers.load_environment(name, **json.loads(options_json))
    except Exception as error:
        raise ConfigError(
            f"data.path: verifiers cannot load the environment {name!r} with {options_json}: {error}; is its package "
            f"installed, and are data.task_options what it takes?"
        ) from error
    if not hasattr(environment, "rollout") or getattr(environment, "requires_group_rollouts", False):
        raise ConfigError(
            f"data.path: the environment {name!r} scores groups of rollouts; one rollout each is supported"
        )
    return environment


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this process's handlers: an environment takes SIGINT and SIGTERM when it is made."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)

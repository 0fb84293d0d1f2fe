"""Libraries of tasks, reasoning-gym and verifiers: their rows and judges.

Source: https://github.com/open-thought/reasoning-gym (`score_answer(answer, entry)`);
https://github.com/PrimeIntellect-ai/verifiers, verifiers/legacy: utils/env_utils.py (`load_environment`),
envs/environment.py (`get_dataset`, `tool_defs`, `requires_group_rollouts`).
"""

import difflib
import json
import signal
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from typing import Any, Final

from offbeat_core import BackendError, ConfigError, DataError
from offbeat_data._sources.rows import Row, pack, to_plain, unpack

REASONING_GYM = "reasoning_gym"
"""Field of a prompt that holds its task, the task's options and the entry; `score_entry` reads it."""


def draw_entries(task: str, *, num_items: int, seed: int, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Draw problems of a task as rows with the columns `prompt`, `answer` and `reasoning_gym`."""
    options_json = json.dumps(dict(options), sort_keys=True)
    dataset = _make_dataset(task, num_items, seed, options_json)
    rows = []
    for entry in (dataset[index] for index in range(len(dataset))):
        kept = {"task": task, "options": options_json, "entry": pack(entry)}
        rows.append({"prompt": entry["question"], "answer": entry["answer"], REASONING_GYM: kept})
    return rows


def score_entry(answer: str, fields: Mapping[str, Any]) -> float | None:
    """Return the task's own score, in [0, 1], of an answer to the entry in a prompt's fields.

    None when it cannot read it.
    """
    kept = fields.get(REASONING_GYM)
    if kept is None:
        raise DataError("the reward reasoning_gym judges its own tasks: set data.path to reasoning-gym:TASK")
    dataset, entry = _make_dataset(kept["task"], 1, 0, kept["options"]), unpack(kept["entry"])
    try:
        return float(dataset.score_answer(answer=answer, entry=entry))
    except Exception:  # noqa: BLE001
        # Some judges take for granted that an answer has the right form: prime_factorization calls int() on whatever
        # the model wrote. What they raise says something about the answer and nothing about the run.
        return None


def import_reasoning_gym() -> tuple[Any, Mapping[str, Any]]:
    """Return the package, which takes seconds to import, and its tasks by name."""
    try:
        with warnings.catch_warnings():  # a dependency of it has `is "text"` in its code
            warnings.simplefilter("ignore", SyntaxWarning)
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
    except ImportError as error:
        line = 'pip install "offbeat-data[reasoning-gym]"'
        raise BackendError(f"tasks of reasoning-gym need that package; install it with: {line}") from error
    return reasoning_gym, DATASETS


@lru_cache(maxsize=8)
def _make_dataset(task: str, size: int, seed: int, options_json: str) -> Any:
    reasoning_gym, tasks = import_reasoning_gym()
    if task not in tasks:
        near = ", ".join(difflib.get_close_matches(task, tasks)) or "chain_sum, basic_arithmetic, countdown"
        raise ConfigError(f"data.path: reasoning-gym has no task {task!r}; nearest: {near}")
    try:
        return reasoning_gym.create_dataset(task, size=size, seed=seed, **json.loads(options_json))
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"data.task_options: reasoning-gym:{task} refuses {options_json}: {error}") from error


VERIFIERS: Final = "verifiers"
"""Field of a prompt that holds its environment, the environment's arguments and the row; `reset` reads it."""


def without_judgement(row: Row) -> Row:
    """Return a row without what these libraries judge by, which holds the answer; other rows as they are."""
    if REASONING_GYM not in row and VERIFIERS not in row:
        return row
    return {name: value for name, value in row.items() if name not in (REASONING_GYM, VERIFIERS, "answer")}


def draw_rows(name: str, *, split: str, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of an environment's data, "train" or "eval", with the columns `prompt`, `answer`, `tools`, `verifiers`."""
    if split not in ("train", "eval"):
        raise ConfigError(f"data.split: verifiers:{name} has the splits train and eval, got {split!r}")
    options_json = json.dumps(dict(options), sort_keys=True)
    environment = load_environment(name, options_json)
    dataset = environment.get_dataset() if split == "train" else environment.get_eval_dataset()
    tools = [_tool_schema(tool) for tool in environment.tool_defs or []]
    rows = []
    for row in dataset:
        kept = {"environment": name, "options": options_json, "row": pack(to_plain(row))}
        rows.append({"prompt": row["prompt"], "answer": row.get("answer"), "tools": tools, VERIFIERS: kept})
    return rows


def _tool_schema(tool: Any) -> dict[str, Any]:
    """Return a tool as chat templates expect it."""
    described = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": described}


def import_verifiers() -> Any:
    """Return the package, which takes seconds to import."""
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
    """Return an environment, once per process."""
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

"""Tasks of reasoning-gym: problems drawn on the spot, each with its own judge.

Source: https://github.com/open-thought/reasoning-gym
"""

import difflib
import json
import warnings
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from offbeat_data._plain import pack, unpack
from offbeat_types import BackendError, ConfigError, DataError

ENTRY_FIELD = "reasoning_gym"
"""Field of a prompt that holds its task, the task's options and the entry; `score_entry` reads it."""


def draw_entries(task: str, *, num_items: int, seed: int, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Draw problems as rows with the columns `prompt`, `answer` and `reasoning_gym`.

    Raises:
        BackendError: reasoning-gym is not installed.
        ConfigError: no such task (nearest names), or options it does not take.
    """
    options_json = json.dumps(dict(options), sort_keys=True)
    dataset = _make_dataset(task, num_items, seed, options_json)
    return [_row(task, options_json, dataset[index]) for index in range(len(dataset))]


def _row(task: str, options_json: str, entry: dict[str, Any]) -> dict[str, Any]:
    kept = {"task": task, "options": options_json, "entry": pack(entry)}
    return {"prompt": entry["question"], "answer": entry["answer"], ENTRY_FIELD: kept}


def score_entry(answer: str, fields: Mapping[str, Any]) -> float | None:
    """The task's own score, in [0, 1], of an answer to the entry in a prompt's fields; None when it cannot read it.

    Raises:
        DataError: the prompt was not drawn from reasoning-gym.
    """
    kept = fields.get(ENTRY_FIELD)
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
    """The package, which takes seconds to import, and its tasks by name.

    Raises:
        BackendError: it is not installed.
    """
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

"""Training rows and held-out rows of whatever `data.path` names."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat_data._arithmetic import draw_additions, draw_products
from offbeat_data._config import SourceConfig
from offbeat_data._files import Row, read_rows, refuse_split
from offbeat_data._order import permutation
from offbeat_data._reasoning_gym import draw_entries
from offbeat_data._verifiers import draw_rows
from offbeat_types import ConfigError, DataError

_DEFAULT_DRAWS = 1000
_PROBLEMS = {"arithmetic": draw_additions, "products": draw_products}


@dataclass(frozen=True, kw_only=True)
class RowSets:
    """Rows to train on and rows held out; no question is in both.

    Args:
        train: at least one.
        held_out: may be empty.
        num_shared: training rows left out because their question is held out.
    """

    train: list[Row]
    held_out: list[Row]
    num_shared: int


def read_sources(config: SourceConfig, question: Callable[[Row], Any]) -> RowSets:
    """Read what the configuration names; equal configurations give equal rows in equal order.

    Args:
        config: the `data` section.
        question: what a row asks, as JSON data; None when it cannot be told.

    Raises:
        DataError, ConfigError, BackendError: see `read_rows`, `draw_entries`, `draw_additions`.
    """
    if not config.path:
        raise ConfigError(
            "data.path is empty: name a file, a folder, reasoning-gym:TASK, verifiers:NAME, arithmetic:DIGITS or "
            "products:DIGITS"
        )
    train, held_out = _read_apart(config) if config.eval_path or config.eval_split else _read_once(config)

    def key(row: Row) -> str:
        return json.dumps(question(row), sort_keys=True, default=str)

    # Files repeat questions, and small tasks draw them twice: what is held out must not be trained on.
    hidden = {key(row) for row in held_out if question(row) is not None}
    kept = [row for row in train if key(row) not in hidden] if hidden else train
    if not kept:
        raise DataError(
            f"{config.path}: every row is held out as well, which leaves nothing to train on; "
            f"lower data.eval_size, or hold out other data"
        )
    return RowSets(train=kept, held_out=held_out, num_shared=len(train) - len(kept))


def _read_apart(config: SourceConfig) -> tuple[list[Row], list[Row]]:
    """Training rows, and held-out rows from a path or split of their own."""
    path = config.eval_path or config.path
    split = config.eval_split or ("train" if path != config.path else config.split)
    if (path, split) == (config.path, config.split):
        raise ConfigError("data.eval_path names the training data: set data.eval_size to hold out some of it")
    train = _read_one(config, config.path, config.split, config.num_items, config.seed)
    return train, _read_one(config, path, split, config.eval_size, config.seed + 1)


def _read_once(config: SourceConfig) -> tuple[list[Row], list[Row]]:
    """Training rows, and as many held-out rows of the same source as the configuration wants."""
    drawn = _draw(config, config.path, config.split, config.num_items, config.eval_size, config.seed)
    return drawn or _hold_out(config, _read(config, config.path, config.split, config.num_items))


def _read_one(config: SourceConfig, path: str, split: str, limit: int, seed: int) -> list[Row]:
    drawn = _draw(config, path, split, limit, 0, seed)
    return drawn[0] if drawn else _read(config, path, split, limit)


def _draw(
    config: SourceConfig, path: str, split: str, num_train: int, num_held_out: int, seed: int
) -> tuple[list[Row], list[Row]] | None:
    """Training and held-out rows of a generator; None when path is none."""
    scheme, colon, name = path.partition(":")
    if not colon or scheme not in (*_PROBLEMS, "reasoning-gym"):
        return None
    refuse_split(path, split)
    num_train = num_train or _DEFAULT_DRAWS
    if scheme in _PROBLEMS:
        train, held_out = _PROBLEMS[scheme](num_train, num_held_out, seed=seed, digits=_digits(scheme, name))
        return list(train), list(held_out)
    rows = draw_entries(name, num_items=num_train + num_held_out, seed=seed, options=config.task_options)
    return rows[:num_train], rows[num_train:]


def _read(config: SourceConfig, path: str, split: str, limit: int) -> list[Row]:
    """Rows of a file or folder, or of the data that an environment of verifiers brings."""
    scheme, _, name = path.partition(":")
    if scheme == "verifiers":
        return draw_rows(name, split=split, options=config.task_options)[: limit or None]
    return read_rows(_as_path(path), split, limit)


def _hold_out(config: SourceConfig, rows: list[Row]) -> tuple[list[Row], list[Row]]:
    if config.eval_size >= len(rows):
        raise DataError(
            f"data.eval_size = {config.eval_size} leaves nothing to train on: {config.path} has {len(rows)} rows"
        )
    if not config.eval_size:
        return rows, []
    chosen = {int(at) for at in permutation(len(rows), config.seed)[: config.eval_size]}
    held_out = [row for at, row in enumerate(rows) if at in chosen]
    return [row for at, row in enumerate(rows) if at not in chosen], held_out


def _digits(scheme: str, name: str) -> int:
    if not name.isdecimal():
        raise ConfigError(f"data.path: {scheme}:DIGITS needs a number of digits, such as {scheme}:2; got {name!r}")
    return int(name)


def _as_path(path: str) -> Path:
    return Path(path).expanduser()

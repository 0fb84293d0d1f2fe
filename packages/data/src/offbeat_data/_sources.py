"""Training rows and held-out rows of whatever `data.path` names."""

from dataclasses import dataclass
from pathlib import Path

from offbeat_data._arithmetic import draw_additions
from offbeat_data._config import DataConfig
from offbeat_data._files import Row, read_rows
from offbeat_data._order import permutation
from offbeat_data._reasoning_gym import draw_entries
from offbeat_types import ConfigError, DataError

_DEFAULT_DRAWS = 1000


@dataclass(frozen=True, kw_only=True)
class RowSets:
    """Rows to train on and rows held out, none in both."""

    train: list[Row]
    held_out: list[Row]


def read_sources(config: DataConfig) -> RowSets:
    """Read what the configuration names; equal configurations give equal rows in equal order.

    Raises:
        DataError, ConfigError, BackendError: see `read_rows`, `draw_entries`, `draw_additions`.
    """
    if not config.path:
        raise ConfigError("data.path is empty: name a file, a folder, reasoning-gym:TASK or arithmetic:DIGITS")
    if config.eval_path or config.eval_split:
        path, split = config.eval_path or config.path, config.eval_split or config.split
        if (path, split) == (config.path, config.split):
            raise ConfigError("data.eval_path names the training data: set data.eval_size to hold out some of it")
        train = _read_one(config, config.path, config.split, config.num_items, config.seed)
        return RowSets(train=train, held_out=_read_one(config, path, split, config.eval_size, config.seed + 1))
    return _draw_both(config) or _hold_out(config, read_rows(_as_path(config.path), config.split, config.num_items))


def _draw_both(config: DataConfig) -> RowSets | None:
    """Training and held-out rows of one generator; None when path is no generator."""
    scheme, name = _scheme(config.path)
    if scheme == "arithmetic":
        train, held_out = draw_additions(
            config.num_items or _DEFAULT_DRAWS, config.eval_size, seed=config.seed, digits=_digits(name)
        )
        return RowSets(train=list(train), held_out=list(held_out))
    if scheme == "reasoning-gym":
        num_train = config.num_items or _DEFAULT_DRAWS
        rows = draw_entries(name, num_items=num_train + config.eval_size, seed=config.seed, options=config.task_options)
        held_out = rows[num_train:]
        # Small tasks draw the same question twice: what is held out must not be trained on.
        hidden = {row["prompt"] for row in held_out}
        train = [row for row in rows[:num_train] if row["prompt"] not in hidden]
        if not train:
            raise DataError(f"{config.path}: every question drawn is also held out; lower data.eval_size")
        return RowSets(train=train, held_out=held_out)
    return None


def _read_one(config: DataConfig, path: str, split: str, limit: int, seed: int) -> list[Row]:
    scheme, name = _scheme(path)
    if scheme == "arithmetic":
        return list(draw_additions(limit or _DEFAULT_DRAWS, 0, seed=seed, digits=_digits(name))[0])
    if scheme == "reasoning-gym":
        return draw_entries(name, num_items=limit or _DEFAULT_DRAWS, seed=seed, options=config.task_options)
    return read_rows(_as_path(path), split, limit)


def _hold_out(config: DataConfig, rows: list[Row]) -> RowSets:
    if config.eval_size >= len(rows):
        raise DataError(
            f"data.eval_size = {config.eval_size} leaves nothing to train on: {config.path} has {len(rows)} rows"
        )
    if not config.eval_size:
        return RowSets(train=rows, held_out=[])
    chosen = {int(at) for at in permutation(len(rows), config.seed)[: config.eval_size]}
    held_out = [row for at, row in enumerate(rows) if at in chosen]
    return RowSets(train=[row for at, row in enumerate(rows) if at not in chosen], held_out=held_out)


def _scheme(path: str) -> tuple[str, str]:
    scheme, colon, name = path.partition(":")
    return (scheme, name) if colon else ("", path)


def _digits(name: str) -> int:
    if not name.isdecimal():
        raise ConfigError(f"data.path: arithmetic:DIGITS needs a number of digits, such as arithmetic:2; got {name!r}")
    return int(name)


def _as_path(path: str) -> Path:
    return Path(path).expanduser()

"""The `data` section: where rows come from, which are held out, and in which order items are served."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from offbeat_core import REQUIRED, ConfigError, DataError, as_written, find_hub_name, setting, user_path
from offbeat_data._chat.template import DECIDED_VARIABLES
from offbeat_data._sources.hub_rows import fetch_split
from offbeat_data._sources.openenv_server import draw_tasks
from offbeat_data._sources.rows import Row, read_files, read_rows, refuse_split, require_path
from offbeat_data._sources.task_libraries import draw_entries, draw_rows


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """Settings that prompts and conversations share: where rows come from, their rendering and their order."""

    path: str = setting(
        REQUIRED,
        "Training rows: a file, a folder, a data set of the Hub or a generator. A .jsonl or .parquet file, a folder "
        "of them (or with them in data/, as the Hub has it), a folder written by datasets' save_to_disk, a data set of "
        "the Hub (openai/gsm8k, openai/gsm8k:main/train@REVISION), reasoning-gym:TASK, verifiers:NAME, openenv:URL, "
        "arithmetic:DIGITS (sums) or products:DIGITS.",
        hub="dataset",
    )
    split: str = setting(
        "train", "Split to read where path holds several: a saved DatasetDict, or files such as train-*.parquet."
    )
    num_items: int = setting(0, "Items to draw or read at most; 0: all of a file, 1000 of a generator.", "items", ge=0)
    max_fetch_gib: float = setting(
        64.0, "Most to fetch of a data set of the Hub; of a larger one num_items takes the first rows.", "GiB", gt=0
    )
    seed: int = setting(0, "Seed of what a generator draws, of what is held out, and of the order.", ge=0)
    task_options: dict[str, Any] = setting(
        {},
        "Options of the reasoning-gym task, such as {min_terms = 2}; arguments of the verifiers environment; of an "
        "OpenEnv server: reset (arguments of it), observation_field, token_env.",
    )

    eval_path: str = setting(
        "", "Held-out data, in any form path takes; empty: hold out eval_size items of path.", hub="dataset"
    )
    eval_split: str = setting(
        "", "Split to read as held-out data: of eval_path (empty: train), or of path when eval_path is empty."
    )
    eval_size: int = setting(
        0,
        "Items held out of path for validation, or read from eval_path at most; 0: none of path, all of eval_path.",
        "items",
        ge=0,
    )

    prompt_column: str = setting("prompt", "Column of the prompt: a text, or a list of chat messages.")

    system_prompt: str = setting("", "Put before every conversation that has no system message of its own.")
    chat_template: str = setting(
        "auto", "Use the tokenizer's chat template: auto does when it has one.", choices=("auto", "on", "off")
    )
    template_options: dict[str, Any] = setting(
        {}, "Variables for the chat template, such as {enable_thinking = false}."
    )

    max_image_pixels: int = setting(
        40_000_000,
        "Largest image, width times height, of a row or of an environment; read off its header before it is decoded.",
        "pixels",
        ge=1,
        le=2**27,  # Pillow itself refuses 4/3 of this
    )

    shuffle: bool = setting(True, "Serve items in a new random order each epoch.")
    epochs: int = setting(1, "Passes over the data; 0: until the run ends for another reason.", "epochs", ge=0)

    def __post_init__(self) -> None:
        if given := [name for name in DECIDED_VARIABLES if name in self.template_options]:
            raise ConfigError(
                f"data.template_options: {', '.join(given)} has no effect, since it is set for each conversation: "
                "leave it out"
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig(SourceConfig):
    """Prompts for reinforcement learning: where they come from, what their columns mean, how long they may be."""

    answer_column: str = setting(
        "answer", "Column of the reference answer that rewards compare with; reward_model.ground_truth: a part of one."
    )
    max_prompt_tokens: int = setting(1024, "Longer prompts are left out and counted.", "tokens", ge=1)


@dataclass(frozen=True, kw_only=True)
class ConversationConfig(SourceConfig):
    """Conversations to learn, or to compare: where they come from, their columns, how long they may be."""

    messages_column: str = setting("messages", "Column of whole conversations.")
    completion_column: str = setting("completion", "Column of the answer to learn, beside prompt_column.")
    text_column: str = setting("text", "Column of plain text to learn as it stands.")
    chosen_column: str = setting("chosen", "Column of the better of two answers: a text or chat messages.")
    rejected_column: str = setting("rejected", "Column of the worse of two answers: a text or chat messages.")
    label_column: str = setting("label", "Column that says whether the completion is good: true or false, or 1 or 0.")
    max_sequence_tokens: int = setting(4096, "Longest sequence; see too_long.", "tokens", ge=2)
    too_long: str = setting(
        "filter", "Leave longer sequences out, or cut off their end.", choices=("filter", "truncate")
    )


@lru_cache(maxsize=4)
def permutation(num_items: int, *seeds: int) -> npt.NDArray[np.int64]:
    """Random order of `num_items` items, [num_items] int64, read-only.

    It sorts raw 64-bit draws instead of calling `Generator.permutation`: numpy promises the raw stream of a bit
    generator never to change (NEP 19), and makes no such promise for Generator's methods.
    """
    draws = np.random.PCG64(np.random.SeedSequence(seeds)).random_raw(num_items)
    order = np.argsort(draws, kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


class EpochOrder:
    """Maps a position, counted from the start of the run, to (epoch, item).

    Every epoch serves every item once, in an order of its own. There is no state: to resume, continue counting.

    Args:
        num_items: items of one epoch, >= 1.
        seed: of the order.
        shuffle: False serves items in their own order.

    Raises:
        DataError: num_items < 1.
    """

    def __init__(self, num_items: int, seed: int = 0, shuffle: bool = True) -> None:
        if num_items < 1:
            raise DataError(f"an epoch needs at least one item: got {num_items}; give a data set that is not empty")
        self.num_items, self.seed, self.shuffle = num_items, seed, shuffle

    def __call__(self, position: int) -> tuple[int, int]:
        """Return the epoch and the item at `position` >= 0."""
        if position < 0:
            raise IndexError(f"positions count from 0: got {position}")
        epoch, place = divmod(position, self.num_items)
        return epoch, int(permutation(self.num_items, self.seed, epoch)[place]) if self.shuffle else place

    def num_positions(self, epochs: int) -> int:
        """Positions in `epochs` epochs."""
        return epochs * self.num_items


_DEFAULT_DRAWS: Final = 1000
_SEEDS_APART: Final = 1_000_000
"""Between the first seeds that an OpenEnv server gets of one `data.seed` and of the next."""


@dataclass(frozen=True, kw_only=True)
class RowSets:
    """Rows to train on and held-out rows; `num_shared` training rows were left out, for their question is held out."""

    train: list[Row]
    held_out: list[Row]
    num_shared: int


Pair = tuple[int, int]
_SIGNS: Final = {"arithmetic": "+", "products": "*"}
_SCHEMES: Final = (*_SIGNS, "openenv", "reasoning-gym", "verifiers")
"""Beginnings of a path, before a colon, where it names no file or folder."""


def draw_problems(
    sign: str, num_train: int, num_held_out: int, *, seed: int = 0, digits: int = 2
) -> tuple[list[Row], list[Row]]:
    """Draw sums or products such as {"prompt": "47+85=", "answer": "132"}, as rows to train on and rows held out.

    No pair of numbers is in both sets, in either order. Within a set no problem comes twice. Equal seeds draw equal
    problems, on every machine. With `num_train` 0 all that are left are drawn (about 8000 for two digits).
    """
    train, held_out = _draw_pairs(num_train, num_held_out, seed, digits)
    return [_problem(*pair, sign) for pair in train], [_problem(*pair, sign) for pair in held_out]


def _draw_pairs(num_train: int, num_held_out: int, seed: int, digits: int) -> tuple[list[Pair], list[Pair]]:
    if not 1 <= digits <= 3:
        raise DataError(f"arithmetic problems have 1 to 3 digits: got {digits}")
    low, high = (0 if digits == 1 else 10 ** (digits - 1)), 10**digits
    pairs = [(first, second) for first in range(low, high) for second in range(first, high)]
    if num_held_out >= len(pairs):
        raise DataError(f"there are {len(pairs)} pairs of {digits}-digit numbers: hold out fewer, got {num_held_out}")
    order = permutation(len(pairs), seed, 0)
    swap = permutation(len(pairs), seed, 1) % 2
    held_out = [pairs[at][::-1] if swap[at] else pairs[at] for at in order[:num_held_out]]
    rest = sorted({ordered for at in order[num_held_out:] for ordered in (pairs[at], pairs[at][::-1])})
    return [rest[at] for at in permutation(len(rest), seed, 2)[: num_train or None]], held_out


def _problem(first: int, second: int, sign: str) -> Row:
    return {"prompt": f"{first}{sign}{second}=", "answer": str(first + second if sign == "+" else first * second)}


def check_data_paths(config: SourceConfig) -> None:
    """Refuse paths where nothing is, without reading their contents.

    Raises:
        DataError: with the path, and what it may be.
    """
    for path in filter(None, (config.path, config.eval_path)):
        if _is_local(path):
            with suppress(OSError):  # such as no right to look: the reader says so
                require_path(user_path(path), path)


def check_rows(config: SourceConfig) -> None:
    """Read rows of files without a tokenizer; those that would be fetched or drawn are left out.

    Raises:
        DataError: they cannot be read, or there are too few.
        ConfigError: a setting does not fit them.
    """
    check_data_paths(config)
    if config.path and all(map(_is_local, filter(None, (config.path, config.eval_path)))):
        read_sources(config, lambda _: None)


def _is_local(path: str) -> bool:
    return path.partition(":")[0] not in _SCHEMES and find_hub_name(path, "dataset") is None


def read_sources(config: SourceConfig, question: Callable[[Row], Any]) -> RowSets:
    """Read what the configuration names; `question` gives what a row asks as JSON data, None when it is unknown."""
    if not config.path:
        raise ConfigError(
            "data.path is empty: name a file, a folder, reasoning-gym:TASK, verifiers:NAME, openenv:URL, "
            "arithmetic:DIGITS or products:DIGITS"
        )
    train, held_out = _read_apart(config) if config.eval_path or config.eval_split else _read_once(config)

    def key(row: Row) -> str:
        return json.dumps(question(row), sort_keys=True, default=str)

    # Files repeat questions, and small tasks draw them twice: what is held out must not be trained on.
    hidden = {key(row) for row in held_out if question(row) is not None}
    kept = [row for row in train if key(row) not in hidden] if hidden else train
    if not kept:
        raise DataError(
            f"{as_written(config.path)}: every row is held out as well, which leaves nothing to train on; "
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
    if not colon or scheme not in (*_SIGNS, "openenv", "reasoning-gym"):
        return None
    refuse_split(path, split)
    num_train = num_train or _DEFAULT_DRAWS
    if scheme in _SIGNS:
        if not name.isdecimal():
            raise ConfigError(f"data.path: {scheme}:DIGITS needs a number of digits, such as {scheme}:2; got {name!r}")
        return draw_problems(_SIGNS[scheme], num_train, num_held_out, seed=seed, digits=int(name))
    num_items, options = num_train + num_held_out, config.task_options
    if scheme == "openenv":
        rows = draw_tasks(name, num_items=num_items, first_seed=seed * _SEEDS_APART, options=options)
    else:
        rows = draw_entries(name, num_items=num_items, seed=seed, options=options)
    return rows[:num_train], rows[num_train:]


def _read(config: SourceConfig, path: str, split: str, limit: int) -> list[Row]:
    """Rows of a file or folder, of a data set of the Hub, or of the data that an environment of verifiers brings."""
    if (on_hub := find_hub_name(path, "dataset")) is not None:
        return read_files(fetch_split(on_hub, split, is_part=bool(limit), max_gib=config.max_fetch_gib), limit)
    scheme, _, name = path.partition(":")
    if scheme != "verifiers":
        return read_rows(user_path(path), split, limit)
    return draw_rows(name, split=split, options=config.task_options)[: limit or None]


def _hold_out(config: SourceConfig, rows: list[Row]) -> tuple[list[Row], list[Row]]:
    if config.eval_size >= len(rows):
        raise DataError(
            f"data.eval_size = {config.eval_size} leaves nothing to train on: {as_written(config.path)} has "
            f"{len(rows)} rows"
        )
    if not config.eval_size:
        return rows, []
    chosen = {int(at) for at in permutation(len(rows), config.seed)[: config.eval_size]}
    held_out = [row for at, row in enumerate(rows) if at in chosen]
    return [row for at, row in enumerate(rows) if at not in chosen], held_out

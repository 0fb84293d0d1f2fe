"""verl's validation in our words: which files, how many rows of them, and how they are sampled."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Final

from grpo_async_app._imports.table_names import table_names
from offbeat_recipes import RecipeBuilder

SHUFFLES: Final = ("data.shuffle", "data.shuffle_train_dataloader")
_FILES: Final = "data.val_files"
_ROLLOUT: Final = "actor_rollout_ref.rollout."
_SAMPLING: Final[Mapping[str, tuple[str, ...]]] = {
    "temperature": (f"{_ROLLOUT}val_kwargs.temperature", f"{_ROLLOUT}val_temperature"),
    "n": (f"{_ROLLOUT}val_kwargs.n", f"{_ROLLOUT}n_val"),
    "top_p": (f"{_ROLLOUT}val_kwargs.top_p",),
    "top_k": (f"{_ROLLOUT}val_kwargs.top_k",),
}
"""Options by our key of a table [eval.sets.NAME]."""
_USUAL: Final = {"temperature": 0, "n": 1, "top_p": 1, "top_k": 0}
"""verl's defaults (rollout/rollout.yaml), which are also those of held-out prompts here; all tokens are -1 there."""


def write_validation(draft: RecipeBuilder) -> None:
    """Write data.eval_path for one file that is sampled as usual, or else a table of eval.sets for each file."""
    given = {key: draft.number(*names, default=_USUAL[key]) for key, names in _SAMPLING.items()}
    given["top_k"] = max(given["top_k"], 0)
    sampling = {key: value for key, value in given.items() if value != _USUAL[key]}
    files = draft.take(_FILES)
    paths = files if isinstance(files, list) else [files] if files is not None else []
    others = [key for key in sampling if key != "temperature"]
    if len(paths) > 1 or (paths and others):
        _write_sets(draft, list(map(str, paths)), sampling)
        return
    if paths:
        draft.put("data.eval_path", paths[0], _FILES)
        write_num_rows(draft, "val", "eval.max_prompts")
    draft.copy("eval.temperature", *_SAMPLING["temperature"])
    for key in others:
        draft.lose(draft.named(*_SAMPLING[key]), "no file is named: a table [eval.sets.NAME] has n, top_p and top_k")


def _write_sets(draft: RecipeBuilder, paths: list[str], sampling: dict[str, Any]) -> None:
    if sampling.get("n", 1) > 1 and not sampling.get("temperature"):
        draft.change(draft.named(*_SAMPLING["n"]), "at temperature 0 all samples are the same: one is drawn here")
        del sampling["n"]
    write_num_rows(draft, "val", "eval.max_prompts")
    if rows := draft.entries.pop("eval.max_prompts", None):
        sampling["max_prompts"] = rows.value
    stems = [PurePath(path).stem for path in paths]
    called = [
        f"{PurePath(path).parent.name}_{stem}" if stems.count(stem) > 1 else stem
        for path, stem in zip(paths, stems, strict=True)
    ]
    tables = {name: {"path": path, **sampling} for name, path in zip(table_names(called), paths, strict=True)}
    names = [draft.named(*names) for names in (*_SAMPLING.values(), _NUM_ROWS["val"]) if any(map(draft.has, names))]
    draft.put("eval.sets", tables, _FILES, *names)


_NUM_ROWS: Final = {part: (f"data.{part}_max_samples", f"data.{part}_data_num") for part in ("train", "val")}


def write_num_rows(draft: RecipeBuilder, part: str, key: str) -> None:
    """Write how many rows of a file are used.

    Source: verl/utils/dataset/rl_dataset.py: at random with data.shuffle, which is on in data/legacy_data.yaml.

    Args:
        draft: to add to.
        part: of the data there: train or val.
        key: of ours.
    """
    names = _NUM_ROWS[part]
    if (number := draft.number(*names, default=-1)) > 0:
        draft.put(key, number, *names)
        if draft.take(*SHUFFLES, default=True):
            draft.change(
                draft.named(*names), "chosen at random there, as data.shuffle is on; here the first rows of the file"
            )


def validates(draft: RecipeBuilder) -> bool:
    """Return whether something is validated on."""
    return "data.eval_path" in draft.entries or "eval.sets" in draft.entries

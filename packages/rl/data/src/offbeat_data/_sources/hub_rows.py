"""Rows of a data set of the Hugging Face Hub: which files of the repository hold a split, and these alone are fetched.

Source: huggingface/datasets, docs, "Structure your repository" and "Manual configuration": the settings `configs` at
the head of a README, else files by their folder and by the split in their names.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from offbeat_core import (
    DATASET_FORMS,
    DataError,
    HubName,
    HubRepository,
    fetch_hub_files,
    open_hub_repository,
    pin_hub_name,
)

_SPLIT_WORDS: Final = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words for a split in names of files. Source: huggingface/datasets, data_files.py, SPLIT_KEYWORDS."""


def fetch_split(name: HubName, split: str, *, is_part: bool, max_gib: float) -> Iterator[Path]:
    """Yield the files that hold a split of a data set, in the Hub's cache on this machine.

    Args:
        name: of the data set; its own split counts before the other.
        split: such as "train".
        is_part: fetch each file when it is asked for, since not all may be; else all of them before the first.
        max_gib: most to fetch, GiB.

    Raises:
        DataError: no such data set, config or split, no file that is read here, more to fetch than that, or the
            download failed.
    """
    split = name.split or split
    repository = open_hub_repository(pin_hub_name(name, "dataset"), "dataset")
    if not any(file.endswith(DATASET_FORMS) for file in repository.sizes):
        raise DataError(
            f"{name.shown} has no file of {', '.join(DATASET_FORMS)}: leave its revision out to take the Hub's own "
            "conversion, or convert it"
        )
    files, num_bytes = _files_of(repository, split), 0
    for together in [[file] for file in files] if is_part else [files]:
        num_bytes += sum(repository.sizes[file] for file in together)
        if num_bytes > max_gib * 2**30:
            advice = "lower data.num_items (data.eval_size)" if is_part else "take its first rows by data.num_items"
            raise DataError(
                f"{name.shown}: {num_bytes / 2**30:.2f} GiB of split {split!r} are to be fetched, and at most "
                f"{max_gib:g} GiB may be: {advice}, or raise data.max_fetch_gib"
            )
        folder = fetch_hub_files(repository.name, "dataset", together)
        yield from (folder / file for file in together)


def _files_of(repository: HubRepository, split: str) -> list[str]:
    """Return the files of a split by their path in the repository."""
    readable = sorted(file for file in repository.sizes if file.endswith(DATASET_FORMS) and not file.startswith("."))
    name, configs = repository.name, _configs(repository.card)
    if configs:
        config = _chosen_config(name, configs)
        by_split = _declared(config, readable)
        folder = str(config.get("data_dir") or "")
    else:
        by_split, folder = {}, name.config
    if not by_split:
        inside = [file for file in readable if file.startswith(f"{folder}/")] if folder else _first_folders(readable)
        if not inside:
            raise _no_config(name, sorted({file.partition("/")[0] for file in readable if "/" in file}))
        by_split = _by_name(inside)
    if split not in by_split:
        raise DataError(
            f"{name.shown} has no split {split!r}: set data.split (data.eval_split) to one of {', '.join(by_split)}"
        )
    return by_split[split]


def _configs(card: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = card.get("configs")
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _chosen_config(name: HubName, configs: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the config that a name means: its own, the default, or the only one."""
    names = {str(each.get("config_name", "default")): each for each in configs}
    if name.config:
        if name.config not in names:
            raise _no_config(name, list(names))
        return names[name.config]
    default = next((each for each in configs if each.get("default")), names.get("default"))
    if default is None and len(names) > 1:
        raise DataError(
            f"{name.shown} has several configs: write {name.repository}:CONFIG with one of {', '.join(names)}"
        )
    return default or configs[0]


def _declared(config: Mapping[str, Any], readable: Sequence[str]) -> dict[str, list[str]]:
    """Return the files of each split that a config declares; empty where it declares none."""
    given = config.get("data_files")
    if given is None:
        return {}
    entries = given if isinstance(given, list) else [given]
    by_split: dict[str, list[str]] = {}
    for entry in entries:
        split, patterns = (
            (entry.get("split", "train"), entry.get("path")) if isinstance(entry, dict) else ("train", entry)
        )
        wanted = [patterns] if isinstance(patterns, str) else list(patterns or ())
        # In these patterns ** stands for any folders, which a plain * does here.
        fitting = [file for file in readable if any(fnmatchcase(file, each.replace("**", "*")) for each in wanted)]
        by_split.setdefault(split, []).extend(fitting)
    return {split: files for split, files in by_split.items() if files}


def _first_folders(readable: Sequence[str]) -> list[str]:
    """Return the files of the repository's first folder, else those of its folder `data`."""
    top = [file for file in readable if "/" not in file]
    inside = [file for file in readable if file.startswith("data/")]
    only = {file.partition("/")[0] for file in readable}
    return top or inside or (list(readable) if len(only) == 1 else [])


def _by_name(files: Iterable[str]) -> dict[str, list[str]]:
    """Return files by the split in their name or folder; all are "train" where none has one."""
    by_split: dict[str, list[str]] = {}
    for file in files:
        words = re.split(r"[/._\-\s]", file)
        split = next((split for split, names in _SPLIT_WORDS.items() if any(word in names for word in words)), "")
        by_split.setdefault(split, []).append(file)
    unnamed = by_split.pop("", [])
    return by_split or {"train": unnamed}


def _no_config(name: HubName, names: Sequence[str]) -> DataError:
    given = f"no config {name.config!r}" if name.config else "no file in a folder that is read without a config"
    return DataError(f"{name.shown} has {given}: write {name.repository}:CONFIG with one of {', '.join(names)}")

"""Names of the model, the data and the reward in a configuration file, for people: not their folders."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from offbeat_core import as_written

_IN_HUB_CACHE: Final = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/")


def hub_name(path: str) -> str:
    """Return the name on the Hub of a folder in its cache; elsewhere a folder's name says nothing to the Hub."""
    found = _IN_HUB_CACHE.search(path)
    return f"{found[1]}/{found[2]}" if found else ""


def model_name(path: str) -> str:
    """Return the name of a model folder."""
    return hub_name(path) or Path(path).name or path


def source_name(path: str) -> str:
    """Return a generator such as arithmetic:2 as it is, a file or a folder by its name."""
    written = as_written(path)
    return written if ":" in written else Path(path).name


def describe_task(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows of (what, name) of a run: its model, its data, and its judges; without those that are not set."""
    data, reward = _table(config, "data"), _table(config, "reward")
    mixed = [source_name(str(_table(data.get("mix"), name).get("path", name))) for name in _table(data, "mix")]
    judges = [str(reward.get("name") or ""), *_table(reward, "weights")]
    command = _table(config, "agent").get("command")
    judges = list(map(as_written, judges))
    rows = [
        ("model", model_name(str(_table(config, "model").get("path", "")))),
        ("data", ", ".join(mixed) or source_name(str(data.get("path", "")))),
        ("reward", " + ".join(dict.fromkeys(filter(None, judges)))),
        ("environment", as_written(str(_table(config, "environment").get("name", "")))),
        ("agent", " ".join(as_written(str(word)) for word in command) if isinstance(command, list) else ""),
        ("preference", str(_table(config, "preference").get("loss", ""))),
    ]
    return [(what, name) for what, name in rows if name and name != "none"]


def _table(config: Any, name: str) -> Mapping[str, Any]:
    """Return a table of a file that a hand may have damaged."""
    found = config.get(name) if isinstance(config, Mapping) else None
    return found if isinstance(found, Mapping) else {}

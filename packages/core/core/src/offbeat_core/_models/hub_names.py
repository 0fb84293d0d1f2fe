"""Paths of users that lead nowhere: names of the Hugging Face Hub and addresses, which are not fetched yet."""

import os
import re
from pathlib import Path
from typing import Final

from offbeat_core._errors import ConfigError

# Source: huggingface_hub, utils/_validators.py, REPO_ID_REGEX. Here with an owner: one word alone is any folder.
_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/([A-Za-z0-9][\w.-]*)")
# A path that went through pathlib has one slash left of two.
_ADDRESS: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/+(.*)")
_OF_THE_HUB: Final = re.compile(r"(?:(?:www\.)?huggingface\.co/|hf\.co/)?(datasets/|models/)?([^/]+/[^/@?#]+)")
_VARIABLE: Final = re.compile(r"\$([A-Za-z_]\w*)")


def download_advice(path: str, *, is_dataset: bool = False) -> str:
    """Say what to type where a missing path may be a name of the Hub, such as "Qwen/Qwen3-0.6B", or no path at all.

    Args:
        path: as the user wrote it.
        is_dataset: the name would be of a data set, and not of a model.

    Returns:
        A sentence; empty where the path is neither such a name, nor an address, a pattern, a list of several, or one
        with a variable that only a shell expands.
    """
    if address := _ADDRESS.fullmatch(path):
        return _of_address(address[1].lower(), address[2], is_dataset=is_dataset)
    if variable := _VARIABLE.search(path):
        return f"variables are written in braces here: ${{{variable[1]}}} in place of ${variable[1]}"
    if "*" in path or "," in path:
        kind = "a pattern" if "*" in path else "a list"
        return f"{kind} is not read: give one path" + (", or a folder of the files" if is_dataset else "")
    found = _NAME.fullmatch(path)
    if found is None or os.path.isdir(os.path.dirname(path)):
        return ""
    return _fetching_line(path, is_dataset=is_dataset)


def _of_address(scheme: str, rest: str, *, is_dataset: bool) -> str:
    if scheme == "file":
        return f"give the path alone: /{rest.lstrip('/')}"
    found = _OF_THE_HUB.match(rest) if scheme == "hf" or "huggingface.co/" in rest or "hf.co/" in rest else None
    if found and _NAME.fullmatch(found[2]):
        return _fetching_line(found[2], is_dataset=is_dataset or found[1] == "datasets/")
    return "addresses are not fetched: download it and give the path"


def _fetching_line(name: str, *, is_dataset: bool) -> str:
    folder = name.partition("/")[2]
    kind = "--repo-type dataset " if is_dataset else ""
    line = f"hf download {name} {kind}--local-dir {folder}"
    return f"Hub names are not fetched yet: run `{line}` and give the folder, {folder}"


def user_path(path: str | os.PathLike[str]) -> Path:
    """Return a path of a user's, with `~` as the home folder.

    Raises:
        ConfigError: it begins with `~name`, and there is no such user here.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{os.fspath(path)}: there is no home folder of {Path(path).parts[0]} here; write the whole path"
        ) from error

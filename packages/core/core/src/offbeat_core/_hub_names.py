"""Names of the Hugging Face Hub in place of local paths, and advice on paths that lead nowhere."""

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from offbeat_core._errors import ConfigError

HubKind = Literal["model", "dataset"]

# Source: huggingface_hub, utils/_validators.py, REPO_ID_REGEX.
_REPOSITORY: Final = r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?"
_NAME: Final = re.compile(
    rf"(?P<forced>hub:)?(?P<repository>{_REPOSITORY})"
    r"(?::(?P<config>[\w.+-]+)(?:/(?P<split>[\w.+-]+))?)?(?:@(?P<revision>[\w./+-]+))?"
)
_SHOWN_DIGITS: Final = 12
"""Digits of a commit in messages."""
_FILE_ENDINGS: Final = (
    ".jsonl",
    ".json",
    ".ndjson",
    ".parquet",
    ".csv",
    ".txt",
    ".arrow",
    ".toml",
    ".gguf",
    ".gz",
    ".zst",
)
"""Endings of files: a path with one of them is a file that is not there, and no name."""
# A path that went through pathlib has one slash left of two.
_ADDRESS: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/+(.*)")
_OF_THE_HUB: Final = re.compile(r"(?:(?:www\.)?huggingface\.co/|hf\.co/)?(?:datasets/|models/)?([^/]+/[^/@?#]+)")
_VARIABLE: Final = re.compile(r"\$([A-Za-z_]\w*)")

RELATIVE_FROM: Final = "/./"
"""Follows, in a path of a loaded configuration, the folder that what the user wrote is relative to."""


@dataclass(frozen=True, kw_only=True)
class HubName:
    """A repository of the Hub, as `model.path` and `data.path` take it: "Qwen/Qwen3-0.6B", "openai/gsm8k:main/train".

    Args:
        repository: "OWNER/NAME"; a few old ones have no owner.
        config: of a data set, such as "main"; empty: its only one, or its default.
        split: of a data set, such as "train"; empty: as the settings say.
        revision: a branch, a tag or a commit; empty: the newest.
    """

    repository: str
    config: str = ""
    split: str = ""
    revision: str = ""

    @property
    def shown(self) -> str:
        """Return the name for people."""
        config = f":{self.config}" if self.config else ""
        split = f"/{self.split}" if self.split else ""
        revision = self.revision[:_SHOWN_DIGITS] if is_commit(self.revision) else self.revision
        return f"{self.repository}{config}{split}" + (f"@{revision}" if revision else "")

    def __str__(self) -> str:
        """Return the name as a setting takes it, which means the Hub whatever lies on this machine."""
        return f"hub:{replace(self, revision='').shown}" + (f"@{self.revision}" if self.revision else "")


def is_commit(revision: str) -> bool:
    """Return whether a revision is a whole commit, which stands for the same files for good."""
    return re.fullmatch("[0-9a-f]{40}", revision) is not None


def find_hub_name(path: str, kind: HubKind) -> HubName | None:
    """Read a path as a name of the Hub; None where it is none, or where such a file or folder is here.

    Args:
        path: as the user wrote it: OWNER/NAME, OWNER/NAME@REVISION, and of a data set OWNER/NAME:CONFIG/SPLIT; with
            hub: before it a local path of the same name is not looked for.
        kind: of the repository; a model has no config and no split.
    """
    if not is_hub_name(path):
        return None
    found = _NAME.fullmatch(path)
    assert found is not None
    if kind == "model" and found["config"]:
        raise ConfigError(f"{path}: a model has no part {found['config']}: give OWNER/NAME or OWNER/NAME@REVISION")
    return HubName(
        repository=found["repository"],
        config=found["config"] or "",
        split=found["split"] or "",
        revision=found["revision"] or "",
    )


def is_hub_name(path: str, folder: str = "") -> bool:
    """Return whether a path is a name of the Hub, and its owner no folder here.

    Args:
        path: as the user wrote it.
        folder: that relative paths are relative to; empty: the working folder.
    """
    found = _NAME.fullmatch(path)
    if found is None or found["forced"]:
        return found is not None
    is_local = os.path.isdir(os.path.join(folder, path.partition("/")[0]))
    return "/" in found["repository"] and not path.endswith(_FILE_ENDINGS) and not is_local


def path_advice(path: str, *, is_dataset: bool = False) -> str:
    """Say what to type where a missing path is an address, a pattern, a list of several, or has a shell's variable.

    Args:
        path: as the user wrote it.
        is_dataset: it would be a data set, and not a model.

    Returns:
        A sentence; empty where the path is none of these.
    """
    folder, _, written = path.partition(RELATIVE_FROM)
    folder, path = (folder, written) if written else ("", path)
    if address := _ADDRESS.fullmatch(path):
        return _of_address(address[1].lower(), address[2])
    if variable := _VARIABLE.search(path):
        return f"variables are written in braces here: ${{{variable[1]}}} in place of ${variable[1]}"
    if "*" in path or "," in path:
        kind = "a pattern" if "*" in path else "a list"
        return f"{kind} is not read: give one path" + (", or a folder of the files" if is_dataset else "")
    owner = path.partition("/")[0]
    is_here = os.path.isdir(os.path.join(folder, owner))
    if _NAME.fullmatch(path) and owner != path and is_here and not path.endswith(_FILE_ENDINGS):
        return f"write hub:{path} where the Hub is meant: the folder {owner} is here"
    return ""


def _of_address(scheme: str, rest: str) -> str:
    if scheme == "file":
        return f"give the path alone: /{rest.lstrip('/')}"
    found = _OF_THE_HUB.match(rest) if scheme == "hf" or "huggingface.co/" in rest or "hf.co/" in rest else None
    if found and _NAME.fullmatch(found[1]):
        return f"give its name on the Hub alone: {found[1]}"
    return "addresses are not fetched: download it and give the path"


def as_written(path: str) -> str:
    """Return a path of a loaded configuration as the user wrote it; also FILE.py:FUNCTION."""
    return path.partition(RELATIVE_FROM)[2] or path


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

"""Gives a checkpoint to others: to a local folder in the Hub's layout, or to the Hub."""

import importlib
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

from offbeat_core import (
    DIGEST_SUFFIX,
    BackendError,
    ConfigError,
    OffbeatError,
    RunFolderError,
    atomic_folder,
    hide_secrets,
    user_path,
)
from offbeat_run._checkpoints import Checkpoint
from offbeat_run._command.command import CommandWords, whole_number
from offbeat_run._console.printing import print_text
from offbeat_run._console.status import doing
from offbeat_run._folder.folder import RunFolder
from offbeat_run._folder.sessions import refuse_foreign_run
from offbeat_run._publish.card import CARD, model_card

HUB: Final = "hub:"
PUSH_OPTION: Final = "push-to"
_REPOSITORY: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SUFFIXES: Final = {".safetensors", ".json", ".jinja", ".txt", ".model", ".py"}
_OURS: Final = {"checkpoint.json", "loop.json", "optimizer.safetensors"}
"""Files of training, which are useless without it."""
_ADAPTER: Final = "adapter"
_LARGE_FILES: Final = "*.safetensors filter=lfs diff=lfs merge=lfs -text\n"


class PushError(OffbeatError):
    """A trained model could not be uploaded; it is still in the run folder."""


def check_destination(words: CommandWords) -> None:
    """See that what `--push-to` names will take the model, before hours of training.

    Raises:
        ConfigError: no name of a repository, or no token for the Hub.
        BackendError: huggingface_hub is not installed.
        RunFolderError: the folder is not empty.
    """
    destination = words.options.get(PUSH_OPTION)
    if destination is None:
        return
    if not destination.startswith(HUB):
        _check_folder(user_path(destination).absolute())
        return
    name = destination.removeprefix(HUB)
    if not _REPOSITORY.fullmatch(name):
        raise ConfigError(f"--push-to {HUB}OWNER/NAME names a repository of the Hub, got {destination!r}")
    if not _hub().get_token():
        raise ConfigError(
            f"--push-to {destination} needs a token of the Hub: set HF_TOKEN, or log in with: hf auth login; "
            "or give a folder"
        )


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"--push-to {folder}: is a file; choose a folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise RunFolderError(f"--push-to {folder}: is not empty; choose another folder, or empty it")
    there = next(parent for parent in folder.parents if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise RunFolderError(f"--push-to {folder}: {there} cannot be written to; choose another folder")


def push_command(words: CommandWords, folder: str, application: str) -> int:
    """`push RUN --push-to WHERE`: give away the best checkpoint of a run, or that of `--step`."""
    if PUSH_OPTION not in words.options:
        raise ConfigError(f"push needs a destination: --push-to FOLDER, or --push-to {HUB}OWNER/NAME")
    check_destination(words)
    with RunFolder.open(folder, write=False) as run:
        refuse_foreign_run(run, application)
        push(run, words, application)
    return 0


def push(run: RunFolder, words: CommandWords, application: str) -> None:
    """Publish a checkpoint to the destination of `--push-to`, if there is one, and report it.

    Raises:
        PushError: the Hub has not taken it, or the folder cannot be written; the text holds no token.
        RunFolderError: there is no such checkpoint, or the folder is not empty.
    """
    if (destination := words.options.get(PUSH_OPTION)) is None:
        return
    doing("pushing the checkpoint", destination)
    checkpoint = run.checkpoints.find(whole_number(words, "step")) if "step" in words.options else None
    checkpoint = checkpoint or run.checkpoints.chosen()
    if destination.startswith(HUB):
        address = _to_hub(run, checkpoint, destination.removeprefix(HUB), application)
    else:
        path = user_path(destination).absolute()
        _check_folder(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_folder(path) as folder:
                _fill(folder, run, checkpoint, application)
        except OSError as error:
            raise PushError(
                f"--push-to {path}: cannot be written: {error.strerror}; the checkpoint is in {checkpoint.path}, and "
                f"`{application} push {run.path} --push-to FOLDER` tries again"
            ) from error
        address = str(path)
    print_text(f"pushed the checkpoint of update {checkpoint.step} to {address}")


def _fill(folder: Path, run: RunFolder, checkpoint: Checkpoint, application: str) -> None:
    """Copy what others need of a checkpoint: weights, configuration, tokenizer, adapter, card."""
    for path in sorted(checkpoint.path.iterdir()):
        if path.is_file() and path.suffix in _SUFFIXES and path.name not in _OURS:
            shutil.copyfile(path, folder / path.name)
    if (checkpoint.path / _ADAPTER).is_dir():
        shutil.copytree(
            checkpoint.path / _ADAPTER, folder / _ADAPTER, ignore=shutil.ignore_patterns(f"*{DIGEST_SUFFIX}")
        )
    (folder / CARD).write_text(model_card(run, checkpoint, application))
    (folder / ".gitattributes").write_text(_LARGE_FILES)


def _to_hub(run: RunFolder, checkpoint: Checkpoint, name: str, application: str) -> str:
    hub = _hub()
    with tempfile.TemporaryDirectory(dir=run.logs) as held:
        folder = Path(held)
        _fill(folder, run, checkpoint, application)
        try:
            created = hub.create_repo(name, private=True, exist_ok=True)
            message = f"Checkpoint of update {checkpoint.step} of {run.path.name}"
            hub.upload_folder(repo_id=name, folder_path=folder, commit_message=message)
        except Exception as error:  # noqa: BLE001  of a library that has many kinds, and of HTTP beneath it
            said = hide_secrets(f"{type(error).__name__}: {error}".replace(hub.get_token() or "\0", "***"))
            raise PushError(
                f"the Hub has not taken {name}: {' '.join(said.split())}; the checkpoint is in {checkpoint.path}, and "
                f"`{application} push {run.path} --push-to {HUB}{name}` tries again"
            ) from None  # the library's own error may quote headers
    return str(created)


def _hub() -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError as error:
        line = 'pip install "offbeat-run[hub]"'
        raise BackendError(f"--push-to {HUB}... needs huggingface_hub; install it with: {line}") from error

"""Hub names in a configuration: pinned to a commit, and models fetched before a run looks at them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from offbeat_core import (
    HubKind,
    HubName,
    Setting,
    UserError,
    fetch_hub_model,
    find_hub_name,
    hub_digests,
    pin_hub_name,
    replace_settings,
)
from offbeat_run._command.examine import inspect_model
from offbeat_run._config.problems import Problems
from offbeat_run._console.status import doing

ConfigT = TypeVar("ConfigT")


@dataclass(frozen=True, kw_only=True)
class HubModels:
    """Models of the Hub that a configuration named, now on this machine.

    Args:
        pinned: name with its commit, by the folder that holds it.
        digests: of each file, by that name.
    """

    pinned: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def name_in(self, config: ConfigT) -> ConfigT:
        """Return a configuration with the names in place of the folders, so that a resume takes the same commit."""

        def named(_key: str, declared: Setting, value: Any) -> Any:
            return self.pinned.get(value, value) if declared.hub == "model" else value

        return replace_settings(config, named)


def has_hub_model(config: object) -> bool:
    """Return whether a setting names a model of the Hub."""
    return bool(_names_in(config, "model"))


def fetch_models(config: ConfigT) -> tuple[ConfigT, HubModels]:
    """Pin the Hub names of a configuration to commits, and fetch the models among them.

    Returns:
        The configuration with a folder in place of a model's name, and with its commit in a data set's.

    Raises:
        UserError: a name leads nowhere, or cannot be fetched; the text begins with the key.
    """
    models, datasets = _pinned_names(config, "model"), _pinned_names(config, "dataset")
    folders, digests = dict[HubName, str](), dict[str, Mapping[str, str]]()
    for key, name in models.items():
        if name not in folders:
            doing("fetching the model", name.shown)
            with _naming(key):
                folder = fetch_hub_model(name)
            folders[name], digests[str(name)] = str(folder), hub_digests(folder)
    here = {key: folders[name] for key, name in models.items()} | {key: str(name) for key, name in datasets.items()}
    config = replace_settings(config, lambda key, _, value: here.get(key, value))
    return config, HubModels(pinned={folder: str(name) for name, folder in folders.items()}, digests=digests)


def find_model_problems(sections: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the model folders that sections name, a text each, without asking the Hub for names.

    Args:
        sections: by name, which begins the keys in the texts.
    """
    problems = Problems()

    def look(key: str, declared: Setting, value: Any) -> Any:
        if declared.hub == "model" and value:
            with problems.collected():
                if find_hub_name(value, "model") is None:
                    inspect_model(value, key)
        return value

    for name, section in sections.items():
        replace_settings(section, look, f"{name}.")
    return problems.texts


def _pinned_names(config: object, kind: HubKind) -> dict[str, HubName]:
    """Return the Hub names of one kind, each with a commit, by the key of their setting."""
    names = _names_in(config, kind)
    for key, name in names.items():
        doing("asking the Hub for", name.shown)
        with _naming(key):
            names[key] = pin_hub_name(name, kind)
    return names


def _names_in(config: object, kind: HubKind) -> dict[str, HubName]:
    """Return the Hub names of one kind by the key of their setting."""
    names = {}

    def look(key: str, declared: Setting, value: Any) -> Any:
        if declared.hub == kind and value:
            with _naming(key):
                name = find_hub_name(value, kind)
            if name is not None:
                names[key] = name
        return value

    replace_settings(config, look)
    return names


@contextmanager
def _naming(key: str) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise type(error)(f"{key}: {error}") from error

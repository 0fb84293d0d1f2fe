"""Public scripts, option by option: what becomes of each, and that what is said to have no effect has none.

The scripts are in `import_options/scripts_*.txt`, options and values only; OFFBEAT_RENEW=1 writes what becomes of them
anew, to be read in the difference.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from grpo_async_app._config.resolved import resolve
from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._imports.openrlhf import import_openrlhf
from grpo_async_app._imports.prime_rl import import_prime_rl
from grpo_async_app._imports.trl import import_trl
from grpo_async_app._imports.verl import import_verl
from grpo_async_app._preflight.settings import check_settings
from offbeat_core import parse_config
from offbeat_recipes import OptionTable, Program, RecipeBuilder, read_option_table

LISTS = Path(__file__).parent / "import_options"
NO_TABLE = OptionTable({})
TABLES = {name: read_option_table("grpo_async_app._imports", name) for name in ("verl", "openrlhf", "prime_rl")}
WORDS = {
    "not supported here, and changes the result": "changes",
    "has another meaning here": "differs",
    "always the case here": "always",
    "has no effect here": "no effect",
    "not supported here, but harmless": "harmless",
}
OWN_EXAMPLES = (
    "volcengine/verl",
    "verl-project/verl",
    "huggingface/trl",
    "OpenRLHF/OpenRLHF",
    "PrimeIntellect-ai/prime-rl",
)


@dataclass(frozen=True)
class Script:
    """A public script: where it is, what it starts, its options, and what becomes of each."""

    head: str
    options: Mapping[str, Any]
    outcomes: Mapping[str, str]

    @property
    def repository(self) -> str:
        return self.head.split()[0]

    @property
    def program(self) -> Program:
        name, _, config = self.head.partition(" | ")[2].partition(" ")
        return Program(name, config)


def read_scripts(peer: str) -> list[Script]:
    scripts = []
    for line in (LISTS / f"scripts_{peer}.txt").read_text().splitlines():
        if line.startswith("## "):
            scripts.append(Script(line.removeprefix("## "), {}, {}))
        elif line and not line.startswith("#"):
            name, _, rest = line.partition(" = ")
            value, _, outcome = rest.rpartition(" -> ")
            scripts[-1].options[name], scripts[-1].outcomes[name] = json.loads(value), outcome
    return scripts


PEERS: Mapping[str, Callable[[Script, Mapping[str, Any]], RecipeBuilder]] = {
    "verl": lambda script, options: import_verl(options, script.program),
    "openrlhf": lambda _, options: import_openrlhf(options),
    "trl": lambda _, options: import_trl(options),
    "prime_rl": lambda _, options: import_prime_rl(options),
}
SCRIPTS = [(peer, script) for peer in PEERS for script in read_scripts(peer)]


def outcome(draft: RecipeBuilder, peer: str, name: str) -> str:
    """Keys of ours that an option sets, with their values where they are plain, and the remarks on it."""
    names = {name, *TABLES.get(peer, NO_TABLE).renamed({name: 0})[0]}
    keys = [
        key if isinstance(entry.value, dict | list) else f"{key} = {json.dumps(entry.value)}"
        for key, entry in draft.entries.items()
        if names & set(entry.source.split(" and "))
    ]
    return ", ".join(keys + [WORDS[title] for title, found in draft.messages().items() if names & set(found)])


def settings(draft: RecipeBuilder) -> dict[str, Any]:
    return {key: entry.value for key, entry in draft.entries.items()}


@pytest.mark.parametrize("peer", PEERS)
def test_each_option_of_a_public_script_gets_the_verdict_that_was_read(peer: str) -> None:
    path, others = LISTS / f"scripts_{peer}.txt", []
    for script in read_scripts(peer):
        draft = PEERS[peer](script, script.options)
        for name, value in script.options.items():
            found = outcome(draft, peer, name)
            if found != script.outcomes[name]:
                others.append((script.head, f"{name} = {json.dumps(value)}", script.outcomes[name], found))
    if os.environ.get("OFFBEAT_RENEW"):
        text = path.read_text()
        for head, line, before, after in others:
            place = text.index(f"## {head}\n")
            text = text[:place] + text[place:].replace(f"{line} -> {before}\n", f"{line} -> {after}\n", 1)
        path.write_text(text)
        return
    assert others == []


@pytest.mark.parametrize(("peer", "script"), SCRIPTS, ids=[f"{peer} {script.head}" for peer, script in SCRIPTS])
def test_an_option_that_is_said_to_change_nothing_changes_nothing(peer: str, script: Script) -> None:
    whole = settings(PEERS[peer](script, script.options))
    for name, found in script.outcomes.items():
        without = {other: value for other, value in script.options.items() if other != name}
        if found in ("no effect", "always", "harmless"):
            assert settings(PEERS[peer](script, without)) == whole, name


@pytest.mark.parametrize(("peer", "script"), SCRIPTS, ids=[f"{peer} {script.head}" for peer, script in SCRIPTS])
def test_the_file_that_is_written_is_a_configuration(peer: str, script: Script) -> None:
    """Without its section environment, where the user still has to name what answers the turns, as the import says."""
    draft = PEERS[peer](script, script.options)
    if any("set environment.name" in text for text in draft.lost.values()):
        draft.drop("environment")
    check_settings(resolve(parse_config(draft.as_toml("", {}), GrpoConfig, name="mine.toml")))


def test_there_are_sixty_scripts_of_projects_other_than_the_frameworks() -> None:
    repositories = {script.repository for _, script in SCRIPTS}
    assert len({script.head for _, script in SCRIPTS}) >= 60
    assert len(repositories) >= 30
    assert not repositories & set(OWN_EXAMPLES)


def test_every_option_has_a_verdict_unless_it_is_empty() -> None:
    for _, script in SCRIPTS:
        for name, found in script.outcomes.items():
            assert found or script.options[name] in (None, [], {}), f"{script.head}: {name}"

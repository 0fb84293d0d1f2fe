"""Every command and configuration that a page shows is one that the programs take, and those of the README run."""

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from doc_blocks import Block, blocks, command_lines, pages
from workspace import ROOT, packages

import grpo_async_app._commands.dispatch as grpo
import sft_app._commands as sft
from grpo_async_app._config.sections import GrpoConfig
from offbeat_core import parse_config
from offbeat_hanglint._config import load_config as load_hanglint_config
from offbeat_placement import read_nodes
from offbeat_run import Command, CommandWords, run_named_command
from sft_app._config import SftConfig

APPLICATIONS: Mapping[str, tuple[ModuleType, type]] = {
    "grpo-async-app": (grpo, GrpoConfig),
    "sft-app": (sft, SftConfig),
}
TOOLS = {
    "offbeat-serve": "offbeat_serve",
    "offbeat-simulation": "offbeat_simulation._command",
    "hanglint": "offbeat_hanglint",
}
PREFIX = re.compile(r"^(?:[A-Z_]+=\S+ +)*(?:uv run +|uvx +)?")
# What the tables of a page leave to the file around them.
REST = {"model.path": "m", "data.path": "rows.jsonl"}


def commands(*programs: str) -> Iterator[Any]:
    for page in pages():
        for block in blocks(page):
            if block.language in ("indented", "sh", "yaml") and not block.note:
                for line in command_lines(block):
                    words = PREFIX.sub("", line)
                    if words.partition(" ")[0] in programs:
                        yield pytest.param(words, id=f"{page}: {words}")


def configurations() -> Iterator[Any]:
    for page in pages():
        for block in blocks(page):
            if block.language == "toml" and not block.note:
                yield pytest.param(block, id=block.name)


@pytest.mark.parametrize("line", list(commands(*APPLICATIONS)))
def test_the_applications_take_the_command(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *words = shlex.split(re.split(r" [|>] | {2,}", line)[0])
    module, config_type = APPLICATIONS[program]

    def only_read(name: str, given: CommandWords) -> int:
        if "eval" not in given.options:
            parse_config("", config_type, [*rest_of(given.overrides), *given.overrides], name=name)
        return 0

    def recorded(name: str, command: Command) -> Command:
        return replace(command, run=lambda given, *_: only_read(name, given))

    known: Mapping[str, Command] = {name: recorded(name, command) for name, command in module._COMMANDS.items()}
    words = ["--format=json" if word == "--json" else word for word in words]
    assert run_named_command(words, known, config_type) == 0


def rest_of(given: tuple[str, ...] = ()) -> list[str]:
    """Return what a configuration requires, where neither a page nor a command line has it."""
    names = {word.removeprefix("--").partition("=")[0] for word in given}
    is_mixed = any(name.startswith("data.mix") for name in names)
    return [f"--{key}={value}" for key, value in REST.items() if key not in names and not (is_mixed and "data" in key)]


@pytest.mark.parametrize("block", list(configurations()))
def test_the_configuration_is_read(block: Block, tmp_path: Path) -> None:
    tables = tomllib.loads(block.text)
    if "nodes" in tables:
        (tmp_path / "nodes.toml").write_text(block.text)
        assert read_nodes(str(tmp_path / "nodes.toml"))
    elif "tool" in tables:
        file = tmp_path / "pyproject.toml"
        file.write_text(block.text)
        assert load_hanglint_config([tmp_path], file).file == file
    else:
        config_type = SftConfig if "sft-app" in str(block.page) or "preference" in tables else GrpoConfig
        given = tuple(f"--{section}.{key}=" for section, table in tables.items() for key in table)
        parse_config(block.text, config_type, rest_of(given), name=block.name)


@cache
def help_of(program: str, command: str) -> str:
    """Return what the program says about its options."""
    arguments = [command, "--help"] if command else ["--help"]
    ran = subprocess.run(
        [sys.executable, "-m", TOOLS[program], *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("line", list(commands(*TOOLS)))
def test_the_tools_have_the_options(line: str) -> None:
    program, *words = line.replace("[", " ").replace("]", " ").split()
    command = words[0] if program == "offbeat-simulation" else ""
    told = help_of(program, command)
    options = {word.partition("=")[0] for word in words if word.startswith("--")} - {"--section.key"}
    assert not [option for option in options if option not in told], told


@pytest.mark.parametrize("line", list(commands("pip", "uv")))
def test_what_is_installed_is_a_package_of_ours_with_this_extra(line: str) -> None:
    """Packages of others are not checked."""
    ours = {package.name: package for package in packages()}
    for word in shlex.split(line):
        name, _, extras = word.rstrip("]").partition("[")
        if name.startswith("offbeat-") or name in APPLICATIONS:
            assert name in ours, f"{line}: no package {name}"
            project = tomllib.loads((ours[name].folder / "pyproject.toml").read_text())["project"]
            missing = set(filter(None, extras.split(","))) - set(project.get("optional-dependencies", {}))
            assert not missing, f"{line}: {name} has no extra {sorted(missing)}"
        elif name.startswith("./"):
            assert (ROOT / name).is_dir(), f"{line}: no folder {name}"


@pytest.mark.parametrize("line", list(commands("python", "torchrun", "nox")))
def test_the_file_or_session_is_there(line: str) -> None:
    words = shlex.split(line.split(" [")[0])
    files = [word for word in words if re.match(r"(?:\.\./)*(?:tools|tests|packages|apps)/", word)]
    missing = [file for file in files if not (ROOT / file.replace("../", "")).exists() and "recorded" not in file]
    assert not missing, f"{line}: {missing}"

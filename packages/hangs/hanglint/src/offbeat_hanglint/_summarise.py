"""Summary of an installed library, computed from its sources: a file for `summaries`, in the form of `_libraries`.

The library is found, never imported. Its functions that reach a collective for certain, not through names alone and not
under a parameter's condition, are written down with the axes of their group, or where their caller gives it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Final

from offbeat_hanglint._axes import UNKNOWN, Axes, words
from offbeat_hanglint._config import ConfigError
from offbeat_hanglint._program.facts import FunctionFact
from offbeat_hanglint._program.program import Program
from offbeat_hanglint._program.reach import Reach, Reached
from offbeat_hanglint._reading.files import find_files
from offbeat_hanglint._reading.reading import Unreadable, read_facts

# Further down the way to a collective leads through conditions that a caller knows nothing of.
MAX_CALLS: Final = 3


@dataclass(frozen=True)
class Collective:
    """A function or method of a library in which every member of a group must take part.

    Attributes:
        name: without its module or class.
        places: modules that have it; for a method, words of its class.
        axes: which the group spans where none is given.
        group: position of the argument that names the group, -1 where there is none.
    """

    name: str
    places: tuple[str, ...]
    is_method: bool
    axes: Axes
    group: int


def summarise(name: str, cache_folder: Path | None = None, num_jobs: int = 1) -> str:
    """TOML for a library.

    Args:
        name: of an installed package, such as accelerate or megatron.core; or its folder.
        cache_folder: where facts of files are kept between runs; None keeps nothing.
        num_jobs: processes that read files at the same time.

    Raises:
        ConfigError: there is no such package, or it has no Python files.
    """
    folder, root = _find(name)
    files, _ = find_files([folder], root)
    facts = [each for each in read_facts(files, cache_folder, num_jobs) if not isinstance(each, Unreadable)]
    if not facts:
        raise ConfigError(f"--summarise-installed must name a package with Python files: {folder} has none")
    found = sorted(_collectives(Program(facts)), key=lambda each: (each.is_method, each.places, each.name))
    return "".join([f"# {name}: {len(found)} functions, computed by hanglint from its sources.\n", *map(_entry, found)])


def _find(name: str) -> tuple[Path, Path]:
    """Return a package's folder, and the folder that its modules' names begin in."""
    given = Path(name)
    if given.is_dir():
        return given.absolute(), given.absolute().parent
    first, *rest = name.split(".")
    spec = PathFinder.find_spec(first)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(place).joinpath(*rest)
        if folder.is_dir():
            return folder, Path(place).parent
    raise ConfigError(f"--summarise-installed must name a package installed beside hanglint, or its folder: got {name}")


def _collectives(program: Program) -> Iterator[Collective]:
    reach = Reach(program)
    also = _other_homes(program)
    for number, function in enumerate(program.functions):
        own = program.files[program.file_of[number]]
        is_method = bool(function.class_name)
        is_nested = function.parent != 0 and not is_method
        sure = [each for each in reach.of[number].values() if _is_certain(each)]
        if function.name.startswith("_") or is_nested or function.name == "<module>" or not sure:
            continue
        nearest = min(sure, key=lambda each: each.depth)
        axes, group = _axes(function, nearest)
        if axes is None:
            continue
        places = words(function.class_name) if is_method else (own.module, *also.get(number, ()))
        yield Collective(function.name, tuple(dict.fromkeys(places)), is_method, axes, group)


def _is_certain(entry: Reached) -> bool:
    return entry.is_sure and entry.is_explicit and not entry.gate and entry.depth <= MAX_CALLS


def _axes(function: FunctionFact, entry: Reached) -> tuple[Axes | None, int]:
    """Return the axes of the group and the position of the argument that names it.

    None where nothing is known of it.
    """
    if isinstance(entry.axes, str):
        if entry.axes not in function.parameters or function.class_name:
            return None, -1
        return frozenset(("world",)), function.parameters.index(entry.axes)
    return (None if entry.axes == UNKNOWN else entry.axes), -1


def _other_homes(program: Program) -> dict[int, list[str]]:
    """Modules of packages that have a function of another module under its own name."""
    homes: dict[int, list[str]] = {}
    for file in program.files:
        for name, full in file.imports.items() if file.path.endswith("__init__.py") else ():
            place = program.lookup(file, full)
            index = program.files[place[0]].functions[0].nested.get(place[1]) if place else None
            if place and index is not None and place[1] == name:
                homes.setdefault(program.first[place[0]] + index, []).append(file.module)
    return homes


def _entry(found: Collective) -> str:
    axes = json.dumps(sorted(found.axes))
    places = json.dumps(found.places)
    if found.is_method:
        return f"\n[[methods]]\nnames = [{json.dumps(found.name)}]\nreceivers = {places}\naxes = {axes}\n"
    group = f", group = {found.group}" if found.group >= 0 else ""
    how = f"[collectives.functions]\n{found.name} = {{ axes = {axes}{group} }}"
    return f"\n[[collectives]]\nmodules = {places}\n{how}\n"

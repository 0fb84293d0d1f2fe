"""Settings of a project, in `[tool.hanglint]` of pyproject.toml or in hanglint.toml, which counts alone where it is.

[tool.hanglint]
confidence = "medium"                  # the least that is said: high, medium, low
select = ["HL0"]                       # rules, or how their identifiers begin; all by default
ignore = ["HL051"]
exclude = ["third_party/*"]            # paths, relative to this file
summaries = ["ci/our_library.toml"]    # more of what libraries do
baseline = "hanglint-baseline.json"

[tool.hanglint.levels]
HL060 = "note"                         # error, warning, note (said, but the exit code stays 0), off
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, get_args

from offbeat_hanglint._rules.finding import Confidence
from offbeat_hanglint._rules.registry import RULES, Rule

Level = Literal["error", "warning", "note", "off"]
CONFIDENCES: Final[tuple[Confidence, ...]] = ("high", "medium", "low")
LEVELS: Final = get_args(Level)
# Said in place of a rule's own level: how sure it is.
LEVEL_OF_CONFIDENCE: Final[Mapping[Confidence, Level]] = {"high": "error", "medium": "warning", "low": "warning"}
UNEXPLAINED: Final = Rule(
    "HL000",
    "suppression-without-reason",
    "A comment that suppresses a finding gives no reason, or has another form.",
    "high",
)
EVERY_RULE: Final = (UNEXPLAINED, *RULES)
OWN_FILE: Final = "hanglint.toml"
_KEYS: Final = ("baseline", "confidence", "exclude", "ignore", "levels", "select", "summaries")


class ConfigError(Exception):
    """Something that the user can put right: an option, a settings file, a path. One line."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a run.

    Args:
        root: the project's folder; every path of a finding is relative to it.
        file: the settings file, if there is one.
        confidence: the least that is said.
        select: rules, or beginnings of their identifiers, that are said; empty means all.
        ignore: the same, for those that are not.
        exclude: glob patterns of paths, relative to the root, that are not read.
        summaries: files that say what libraries do, beside our own.
        baseline: findings that are known.
        levels: of rules whose level is not that of their confidence.
    """

    root: Path
    file: Path | None = None
    confidence: Confidence = "medium"
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    summaries: tuple[Path, ...] = ()
    baseline: Path | None = None
    levels: Mapping[str, Level] = field(default_factory=dict)

    @property
    def rules(self) -> frozenset[str]:
        """Identifiers of the rules that run."""
        selected = [rule.id for rule in EVERY_RULE if not self.select or rule.id.startswith(self.select)]
        return frozenset(
            rule
            for rule in selected
            if not (self.ignore and rule.startswith(self.ignore)) and self.levels.get(rule) != "off"
        )

    def with_options(self, **options: Any) -> "Config":
        """Return what the command line says instead; None leaves what there is."""
        given = {name: value for name, value in options.items() if value is not None}
        config = replace(self, **given)
        check_rules("--select", config.select)
        check_rules("--ignore", config.ignore)
        return config


def load_config(paths: Sequence[Path], file: Path | None = None) -> Config:
    """Return the settings for a run over these paths.

    Args:
        paths: files and folders that are read; each must exist.
        file: the settings file; by default the nearest one, from the paths' common folder upwards.

    Raises:
        ConfigError: a path or the file is not there, or the file holds what it may not.
    """
    for path in paths:
        if not (path.is_file() or path.is_dir()):
            raise ConfigError(f"PATH must be a file or folder that exists: got {path}")
    folder = Path(os.path.commonpath([each.absolute() if each.is_dir() else each.absolute().parent for each in paths]))
    if file is not None:
        return _read(file.absolute(), _parse(file))
    for above in (folder, *folder.parents):
        own = above / OWN_FILE
        if own.is_file():
            return _read(own, _parse(own))
        project = above / "pyproject.toml"
        if project.is_file() and (table := _table_of_project(project)) is not None:
            return _read(project, table)
    return Config(root=_root_without_file(folder))


def _root_without_file(folder: Path) -> Path:
    """Return the repository's folder; in none, the current one where that holds the paths, else theirs."""
    for above in (folder, *folder.parents):
        if (above / ".git").exists():
            return above
    here = Path.cwd()
    return here if folder.is_relative_to(here) else folder


def _parse(file: Path) -> dict[str, Any]:
    import tomllib

    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the settings file must be readable: got {file} ({error.strerror})") from error
    except ValueError as error:  # TOML's and Unicode's errors are ones
        raise ConfigError(f"the settings file must be TOML: {file}: {error}") from error
    if file.name == "pyproject.toml":
        return dict(_table(data, "tool", file).get("hanglint", {}))
    return data


def _table_of_project(file: Path) -> dict[str, Any] | None:
    """`[tool.hanglint]`, or None; a pyproject.toml that does not mention hanglint need not even be valid."""
    try:
        if b"hanglint" not in file.read_bytes():
            return None
    except OSError:
        return None
    return _parse(file) or None


def _table(data: Mapping[str, Any], key: str, file: Path) -> Mapping[str, Any]:
    value = data.get(key, {})
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: `{key}` must be a table: got {value!r}")
    return value


def _read(file: Path, data: Mapping[str, Any]) -> Config:
    for key in data:
        if key not in _KEYS:
            raise ConfigError(f"{file}: unknown key `{key}`{nearest(key, _KEYS)}")
    confidence = data.get("confidence", "medium")
    if confidence not in CONFIDENCES:
        raise ConfigError(f"{file}: `confidence` must be one of {', '.join(CONFIDENCES)}: got {confidence!r}")
    select, ignore = _strings(data, "select", file), _strings(data, "ignore", file)
    check_rules(f"{file}: `select`", select)
    check_rules(f"{file}: `ignore`", ignore)
    baseline = data.get("baseline")
    if baseline is not None and not isinstance(baseline, str):
        raise ConfigError(f"{file}: `baseline` must be a path: got {baseline!r}")
    return Config(
        root=file.parent,
        file=file,
        confidence=confidence,
        select=select,
        ignore=ignore,
        exclude=_strings(data, "exclude", file),
        summaries=tuple(file.parent / name for name in _strings(data, "summaries", file)),
        baseline=file.parent / baseline if baseline else None,
        levels=_levels(_table(data, "levels", file), file),
    )


def _strings(data: Mapping[str, Any], key: str, file: Path) -> tuple[str, ...]:
    value = data.get(key, [])
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ConfigError(f'{file}: `{key}` must be a list of strings, such as ["a", "b"]: got {value!r}')
    return tuple(value)


def _levels(table: Mapping[str, Any], file: Path) -> dict[str, Level]:
    known = [rule.id for rule in EVERY_RULE]
    for rule, level in table.items():
        if rule not in known:
            raise ConfigError(f"{file}: `levels` has the unknown rule `{rule}`{nearest(rule, known)}")
        if level not in LEVELS:
            raise ConfigError(f"{file}: the level of {rule} must be one of {', '.join(LEVELS)}: got {level!r}")
    return dict(table)


def check_rules(where: str, given: Iterable[str]) -> None:
    """Refuse what is neither a rule's identifier nor how one begins.

    Raises:
        ConfigError: with the nearest that there is.
    """
    known = [rule.id for rule in EVERY_RULE]
    for rule in given:
        if not rule.startswith("HL") or not any(each.startswith(rule) for each in known):
            raise ConfigError(f"{where} must name rules, such as HL012 or HL01: got `{rule}`{nearest(rule, known)}")


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean ...?`, or what there is."""
    import difflib

    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"; did you mean `{close[0]}`?" if close else f"; there are {', '.join(names)}"

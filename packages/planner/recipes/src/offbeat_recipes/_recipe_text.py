"""Settings written into a recipe's own text, where every other line stays as it is."""

import keyword
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

from offbeat_core import ConfigError, Setting, as_written, parse_config, replace_settings
from offbeat_placement import SettingValue

ConfigT = TypeVar("ConfigT")
_COMMENT_COLUMN: Final = 36


def with_settings(config: ConfigT, settings: Mapping[str, SettingValue]) -> ConfigT:
    """Return the configuration with settings changed.

    Args:
        config: a dataclass of sections.
        settings: by "section.key".
    """
    root: Any = config
    by_section: dict[str, dict[str, SettingValue]] = {}  # together: one setting may be allowed with another only
    for path, value in settings.items():
        section, key = _field(path)
        kept = isinstance(getattr(getattr(root, section), key), bool)
        by_section.setdefault(section, {})[key] = bool(value) if kept else value
    changed = {section: replace(getattr(root, section), **keys) for section, keys in by_section.items()}
    found: ConfigT = replace(root, **changed)
    return found


def _field(path: str) -> tuple[str, str]:
    """Names of the section's field and the key's, of "section.key"; `async` is a word of Python's."""
    section, _, key = path.partition(".")
    return section + "_" * keyword.iskeyword(section), key


def relative_keys(config: object) -> list[str]:
    """Return the keys of paths that the user wrote as relative ones: they lead elsewhere from a copy of the file.

    Args:
        config: as loaded.
    """
    found = []

    def look(key: str, _: Setting, value: Any) -> Any:
        texts = [value] if isinstance(value, str) else value if isinstance(value, list | dict) else ()
        if any(isinstance(text, str) and as_written(text) != text for text in texts):
            found.append(key)
        return value

    replace_settings(config, look)
    return found


def change_recipe(text: str, settings: Mapping[str, SettingValue], root_type: type) -> str:
    """Write settings into a recipe; the reason beside a setting that changes gives way to what it was.

    Args:
        text: of the recipe.
        settings: by "section.key".
        root_type: of the configuration.

    Raises:
        ConfigError: the recipe is written in a way that cannot be changed line by line.
    """
    lines = text.splitlines()
    for path, value in settings.items():
        section, _, key = path.partition(".")
        _set(lines, section, key, str(value).lower())
    changed = "\n".join(lines) + "\n"
    if not _holds(changed, settings, root_type):
        wanted = ", ".join(f"{path} = {str(value).lower()}" for path, value in settings.items())
        raise ConfigError(f"the recipe is written in a way that cannot be changed line by line: set by hand {wanted}")
    return changed


def _holds(text: str, settings: Mapping[str, SettingValue], root_type: type) -> bool:
    """Return whether the text says these settings."""
    try:
        found: Any = parse_config(text, root_type)
    except ConfigError:
        return False
    return all(getattr(getattr(found, _field(path)[0]), _field(path)[1]) == value for path, value in settings.items())


def _set(lines: list[str], section: str, key: str, value: str) -> None:
    """Change one line, or add one."""
    header = re.compile(rf"\s*\[\s*{re.escape(section)}\s*\]")
    start = next((number for number, line in enumerate(lines) if header.match(line)), None)
    if start is None:
        lines += ["", f"[{section}]", f"{key} = {value}"]
        return
    held = re.compile(rf"(\s*{re.escape(key)}\s*=\s*)([^#]*?)\s*(#.*)?$")
    for number in range(start + 1, len(lines)):
        if re.match(r"\s*\[", lines[number]):
            break
        if found := held.match(lines[number]):
            lines[number] = f"{found[1]}{value}".ljust(_COMMENT_COLUMN) + f"# was {found[2]}"
            return
    lines.insert(start + 1, f"{key} = {value}")

"""Engine options that vLLM has renamed, and what they are called now. Pure.

A configuration written for an older vLLM goes on working: the old name is taken, the new one set, and a notice says so.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from offbeat_types import ConfigError


@dataclass(frozen=True)
class Renaming:
    """What became of one old name.

    Args:
        new: the new name; empty when the option is gone because there is nothing left to choose.
        convert: old value -> new value; None for "leave it out".
        since: first release of vLLM without the old name.
    """

    new: str
    convert: Callable[[Any], Any]
    since: str


def _same(value: Any) -> Any:
    return value


def _nothing(_value: Any) -> None:
    return None


RENAMED: Final[Mapping[str, Renaming]] = {
    "disable_mm_preprocessor_cache": Renaming("mm_processor_cache_gb", lambda off: 0 if off else None, "0.13"),
}


def rename_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Replace old names by new ones.

    Returns:
        The options under their new names, and one notice for each that was renamed.

    Raises:
        ConfigError: the old and the new name are both given.
    """
    renamed, notices = {name: value for name, value in options.items() if name not in RENAMED}, list[str]()
    for old in [name for name in options if name in RENAMED]:
        change = RENAMED[old]
        if change.new in options:
            raise ConfigError(f"options {old} and {change.new} say the same; keep {change.new}")
        value = change.convert(options[old]) if change.new else None
        if value is not None:
            renamed[change.new] = value
        became = f"{change.new} = {value!r}" if value is not None else "nothing: that is how it is now"
        notices.append(f"vllm option {old} = {options[old]!r} is called {became} since vLLM {change.since}")
    return renamed, notices

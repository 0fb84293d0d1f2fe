"""The configuration of the command `train`: read, with all that is wrong besides it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from offbeat_core import load_config
from offbeat_run._command.command import CommandWords
from offbeat_run._config.problems import Problems
from offbeat_run._metrics.trackers import check_trackers
from offbeat_run._publish.push import check_destination

ConfigT = TypeVar("ConfigT")


def load_to_train(
    words: CommandWords,
    file: str,
    config_type: type[ConfigT],
    find_problems: Callable[[Mapping[str, Any], Collection[str]], Sequence[str]],
) -> tuple[ConfigT, Problems]:
    """Load a configuration; of a rehearsal, which needs no models or data, all problems are raised at once.

    Args:
        words: of the command line.
        file: TOML.
        config_type: root of the configuration, with a section `log`.
        find_problems: finds what else is wrong where a value does not fit, as `look` of `offbeat_core.load_config`.

    Returns:
        The configuration; and the problems of what is around the run, to be raised with those of its check.

    Raises:
        ConfigError: everything that is wrong with the file.
    """
    is_rehearsed, problems = "shrink" in words.switches, Problems()
    config = load_config(file, config_type, words.overrides, look=None if is_rehearsed else find_problems)
    with problems.collected():
        check_destination(words)
    with problems.collected():
        check_trackers(config.log)  # type: ignore[attr-defined]
    if is_rehearsed:
        problems.raise_all()
    return config, problems

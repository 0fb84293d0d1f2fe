"""`init`: the answers that a first configuration needs, from options or asked for, and the file that they make."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from offbeat_core import ConfigError, path_from, sections_of, write_new_file
from offbeat_run._command.command import CommandWords
from offbeat_run._console.printing import print_text


@dataclass(frozen=True, kw_only=True)
class Question:
    """One thing that a first configuration says.

    Args:
        option: that gives the answer, without dashes.
        key: that it is written to, such as "model.path".
        text: asked in a terminal.
        default: taken where nothing is typed; None: an answer is needed.
    """

    option: str
    key: str
    text: str
    default: str | None = None


MODEL_AND_DATA: Final = (
    Question(
        option="model",
        key="model.path",
        text="A name of the Hugging Face Hub, or a folder with a model",
        default="Qwen/Qwen3-0.6B",
    ),
    Question(
        option="data", key="data.path", text="A data set of the Hub, a .jsonl or .parquet file, or a folder of them"
    ),
)
"""Questions of every application."""


def ask(words: CommandWords, questions: Sequence[Question], root_type: type) -> dict[str, str]:
    """Return an answer to each question, by its option: from the command line, else asked for in a terminal.

    A path that is answered is relative to the working folder, and that of a file to the folder of `--out`.

    Args:
        words: of the command line.
        questions: to be answered.
        root_type: of the configuration that the answers are for.

    Raises:
        ConfigError: there is no terminal, and an option without a default is not given.
    """
    answers = {}
    for question in questions:
        given = words.options.get(question.option)
        if given is None and sys.stdin.isatty():
            shown = f" [{question.default}]" if question.default else ""
            given = _typed(f"{question.text}{shown}: ") or None
        given = question.default if given is None else given
        if given is None:
            raise ConfigError(f"init needs --{question.option}: {question.text[0].lower()}{question.text[1:]}")
        section, _, key = question.key.partition(".")
        declared = sections_of(root_type)[section].keys[key].setting
        answers[question.option] = path_from(given, declared, _target(words).absolute().parent)
    return answers


def _target(words: CommandWords) -> Path:
    return Path(words.options.get("out", "my.toml"))


def _typed(prompt: str) -> str:
    """Return the line that is typed; nothing where the terminal has ended."""
    try:
        return input(prompt).strip()
    except EOFError:
        return ""


def write_first_config(text: str, words: CommandWords, program: str) -> int:
    """Write the file of `--out`, my.toml by default, and print what to type next.

    Raises:
        RunFolderError: there is such a file, or it cannot be written.
    """
    path = _target(words)
    write_new_file(path, text, "--out")
    print_text(f"{path} is written. Next:")
    print_text(f"  {program} plan {path}     what the run needs, with one rendered prompt; starts nothing")
    print_text(f"  {program} train {path}")
    return 0

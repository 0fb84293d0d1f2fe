"""Section `agent`: a program that acts with the policy over OpenAI's interface, each sample an episode of it."""

import sys
from dataclasses import dataclass
from typing import Final, Literal

from offbeat_core import ConfigError, setting

PROMPT_FILE: Final = "{prompt_file}"
"""Placeholder in `agent.command` for the path of the file that holds the row."""

_PYTHONS: Final = ("python", "python3")

Answer = Literal["last_turn", "stdout"]


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Section `agent`: the program that acts with the policy. Without a command and `is_outside` there is none.

    The program finds the policy where OpenAI's clients look for it: OPENAI_BASE_URL and OPENAI_API_KEY, whose key is
    that of its own session. It ends well with exit code 0.
    """

    command: list[str] = setting(
        [],
        f"The program and its arguments, without a shell; {PROMPT_FILE} stands for a file with the row; the first word "
        "python stands for the Python that runs grpo-async-app. Empty: none.",
        is_text=True,
        path="command",
    )
    is_outside: bool = setting(
        False, "Agents run elsewhere on this machine and ask POST /v1/sessions at rollout.serve_port for what to do."
    )
    prompt_in: str = setting(
        "stdin", "Where the program finds the row of the data, as JSON.", choices=("stdin", "file")
    )
    shows_answer: bool = setting(
        False,
        "Leave the reference answer in the row: the answer_column of its source, and what reasoning-gym and verifiers "
        "judge by.",
    )
    answer: str = setting(
        "last_turn",
        "What the `reward` section scores where the agent posts no reward: what the model said last, or what the "
        "program printed.",
        choices=("last_turn", "stdout"),
    )
    preload: list[str] = setting(
        [],
        "Modules that are imported once and not by each process; then the command is python FILE or python -m MODULE, "
        "with its arguments. Each episode is a fork.",
        is_text=True,
    )
    preload_deadline_s: float = setting(300.0, "Longest import of them.", "s", gt=0)
    variables: dict[str, str] = setting({}, "Further environment variables of the program.")
    forward_env: list[str] = setting(
        [],
        "Environment variables of the run that the program gets too; besides these it gets PATH, HOME, the language "
        "and the like, and no key or token but that of its session.",
    )
    may_post_reward: bool | None = setting(
        None, "Agents may post the reward of their episode. Left out: only where section reward names none."
    )
    max_error_share: float = setting(
        0.5,
        "The run ends when more than this share of the last 200 episodes came to no end: their programs failed, were "
        "lost, ran out of time, or asked for nothing.",
        "share of 200 episodes",
        ge=0,
        le=1,
    )
    deadline_s: float = setting(300.0, "Longest episode; after it the program is killed.", "s", gt=0)
    max_running: int = setting(64, "Episodes at once at most.", "episodes", ge=1)
    max_calls: int = setting(64, "Samples that one episode may ask the policy for.", "samples", ge=1)

    @property
    def is_set(self) -> bool:
        return bool(self.command) or self.is_outside

    def check(self) -> None:
        """Find what is wrong with these settings alone.

        Raises:
            ConfigError: they contradict each other, or have no effect.
        """
        if not self.is_set:
            if self != AgentConfig():
                raise ConfigError("agent: its settings have no effect without agent.command or agent.is_outside")
            return
        if self.command and self.is_outside:
            raise ConfigError("agent.command starts programs and agent.is_outside = true waits for others: set one")
        if self.is_outside:
            given = [name for name in ("preload", "variables", "forward_env") if getattr(self, name)]
            given += ["answer"] if self.answer != "last_turn" else []
            if given:
                raise ConfigError(f"agent.{given[0]} has no effect with agent.is_outside = true, which starts nothing")
            return
        names_file = any(PROMPT_FILE in word for word in self.command)
        if names_file != (self.prompt_in == "file"):
            raise ConfigError(
                f"agent.prompt_in = {self.prompt_in!r}: {PROMPT_FILE} must stand in agent.command where it is "
                f'"file", and nowhere else; got {self.command}'
            )
        if self.preload and not is_python(self.command):
            raise ConfigError(
                f'agent.preload needs agent.command = ["python", FILE or -m MODULE, ...], got {self.command}'
            )


def is_python(command: list[str]) -> bool:
    """Return whether it runs a Python file or module, without options of the interpreter."""
    if not command[1:] or command[0] not in _PYTHONS:
        return False
    return len(command) > 2 if command[1] == "-m" else not command[1].startswith("-")


def program_words(command: list[str]) -> list[str]:
    """Return the words to start a program with: `python` is the run's own, whatever PATH would find."""
    return [sys.executable, *command[1:]] if command[0] in _PYTHONS else command

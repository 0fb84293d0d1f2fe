"""The reward `code`: a program out of a completion, run in a sandbox against the tests of its row."""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

from offbeat_core import BackendError, ConfigError, DataError, find_function, printable, read_options, setting
from offbeat_data._datasets.prompts import Prompt
from offbeat_data._scoring.code.assertions import Verdict, run_assertions
from offbeat_data._scoring.code.tests import CodeTests, read_tests
from offbeat_data._scoring.config import RewardConfig
from offbeat_data._scoring.functions import CompletionText, RewardValue
from offbeat_data._scoring.sandbox.sandbox import BubblewrapSandbox, ProcessSandbox, Sandbox
from offbeat_data._scoring.sandbox.watching import ProgramLimits
from offbeat_data._sources.rows import find_column

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CodeOptions:
    """The table `reward.code`."""

    tests_column: str = setting("tests", "Column with the tests, or a part of one, such as reward_model.ground_truth.")
    setup_column: str = setting("", "Column with code that runs before assertions, such as MBPP's test_setup_code.")
    entry_column: str = setting(
        "",
        "Column with the name of the function under test, such as HumanEval's entry_point: for tests that define check "
        "and do not call it, and for rows of arguments and results.",
    )
    score: str = setting(
        "all", "all: 1 when every test passes, else 0; share: the share that pass.", choices=("all", "share")
    )
    max_tests: int = setting(0, "Run so many tests at most, the first ones; 0: all.", "tests", ge=0)
    timeout_s: float = setting(4.0, "For one pair of input and output, or for all assertions together.", "s", gt=0)
    memory_bytes: int = setting(1 << 29, "Address space of each process.", "bytes", ge=1 << 26)
    disk_bytes: int = setting(1 << 26, "Of files in /tmp, which lies in memory.", "bytes", ge=0)
    output_bytes: int = setting(1 << 20, "That a program may print; more fails the test.", "bytes", ge=1)
    max_processes: int = setting(16, "Processes and threads of one program at once.", ge=1)
    packages: list[str] = setting([], "Folders to import from besides the standard library, such as a site-packages.")
    sandbox: str = setting("bubblewrap", "bubblewrap, or module:Class of your own with run(source, stdin).")
    unsafe_no_isolation: bool = setting(
        False, "Where bubblewrap does not work, run programs that can read and write whatever you can."
    )

    def limits(self) -> ProgramLimits:
        return ProgramLimits(
            timeout_s=self.timeout_s,
            memory_bytes=self.memory_bytes,
            disk_bytes=self.disk_bytes,
            output_bytes=self.output_bytes,
            processes=self.max_processes,
            packages=tuple(self.packages),
        )


class CodeScorer:
    """Scores completions by tests.

    Attributes:
        note: text on how programs are run.
    """

    def __init__(self, config: RewardConfig, options: CodeOptions, sandbox: Sandbox, note: str) -> None:
        self._config, self._options, self._sandbox, self.note = config, options, sandbox, note
        self._has_logged = False

    def score(self, prompt: Prompt, written: Sequence[CompletionText]) -> list[RewardValue]:
        """Return the share of tests that pass, or whether all do.

        Raises:
            DataError: the row has no tests, or some of no known form.
        """
        tests = self._tests(prompt)
        return [self._worth(program_of(each.text), prompt, tests) for each in written]

    def _worth(self, source: str | None, prompt: Prompt, tests: CodeTests) -> RewardValue:
        if source is None:
            return RewardValue(value=0.0, extras={"no_program": 1.0})
        needs_all = self._options.score == "all"
        extras, passed = {"no_program": 0.0}, list[bool]()
        if tests.assertions:
            before = find_column(prompt.fields, self._options.setup_column) or ""
            verdict = run_assertions(self._sandbox, source, before, tests.assertions)
            passed, extras["refused"] = list(verdict.held), verdict.refused / len(tests.assertions)
            self._notify(verdict)
        for given, wanted in tests.pairs:
            if needs_all and not all(passed):
                return RewardValue(value=0.0, extras=extras)
            run = self._sandbox.run(source, given)
            passed.append(run.ended == "exited" and run.code == 0 and prints_alike(run.stdout, wanted))
        share = sum(passed) / len(passed)
        return RewardValue(value=float(share == 1) if needs_all else share, extras=extras)

    def _notify(self, verdict: Verdict) -> None:
        """Log the first refusal: what is refused often is a data set that cannot be judged so."""
        if verdict.why and not self._has_logged:
            self._has_logged = True
            why = printable(verdict.why)  # names of the program are in it
            _log.warning("reward code: %s; it counts as not held (reward/code/refused; docs/rewards.md)", why)

    def _tests(self, prompt: Prompt) -> CodeTests:
        column = self._options.tests_column
        found = find_column(prompt.fields, column)
        if found is None:
            raise DataError(f"the reward code needs tests in column {column!r}, and prompt {prompt.index} has none")
        try:
            return read_tests(found, self._options.max_tests, self._entry(prompt))
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"the tests of prompt {prompt.index} (reward.code.tests_column = {column!r}) are of no known form: "
                "needed are pairs [{input, output}], {inputs: [...], outputs: [...]}, assertions as a list of texts, "
                f"or one text of Python; got {str(found)[:80]!r} ({error})"
            ) from error

    def _entry(self, prompt: Prompt) -> str:
        column = self._options.entry_column
        name = find_column(prompt.fields, column) if column else ""
        if column and not (isinstance(name, str) and name.isidentifier()):
            raise DataError(
                f"the reward code needs the name of a function in column {column!r} (reward.code.entry_column), and "
                f"prompt {prompt.index} has {name!r}"
            )
        return str(name or "")


def code_scorer(config: RewardConfig) -> CodeScorer:
    """Check the options and the sandbox.

    Raises:
        ConfigError: an option that cannot be; a sandbox of the user's own that is not there.
        BackendError: nothing isolates programs here, and that was not asked for.
    """
    options = read_options("reward.code", CodeOptions, config.code)
    if options.timeout_s >= config.timeout_s:
        raise ConfigError(
            f"reward.code.timeout_s = {options.timeout_s:g} must be less than reward.timeout_s = "
            f"{config.timeout_s:g}, in which all tests of a completion are run: raise the latter"
        )
    sandbox, note = _open_sandbox(options)
    return CodeScorer(config, options, sandbox, f"code: programs run {note}")


def _open_sandbox(options: CodeOptions) -> tuple[Sandbox, str]:
    if options.sandbox != "bubblewrap":
        return find_function("reward.code.sandbox", options.sandbox)(options.limits()), f"by {options.sandbox}"
    try:
        return BubblewrapSandbox(options.limits()), BubblewrapSandbox.note
    except BackendError as error:
        if not options.unsafe_no_isolation:
            raise BackendError(
                f"the reward code runs programs of the model, and nothing here keeps them apart: {error}. Mend that, "
                "name a sandbox of your own (reward.code.sandbox, docs/rewards.md), or take the risk: "
                "reward.code.unsafe_no_isolation = true"
            ) from error
        return ProcessSandbox(options.limits()), ProcessSandbox.note


# Blanks are matched in one place alone: two that could share them take time with the square of their number.
_FENCED: Final = re.compile(r"```[ \t]*(?:(?:python3?|py)[ \t]*)?\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL | re.IGNORECASE)


def program_of(completion: str) -> str | None:
    """Return the last fenced block of Python in a completion, all of it where no block is.

    None where there is nothing.
    """
    blocks = _FENCED.findall(completion)
    source = str(blocks[-1] if blocks else completion)
    return source if source.strip() and "\0" not in source else None


def prints_alike(printed: str, wanted: str) -> bool:
    """Return whether two outputs are the same, but for blanks at the ends of lines and empty lines at the end."""
    pairs = zip_longest(printed.rstrip().split("\n"), wanted.rstrip().split("\n"))
    return all(one is not None and other is not None and one.rstrip() == other.rstrip() for one, other in pairs)

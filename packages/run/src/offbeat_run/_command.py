"""The boundary of a command line: words in, an exit code out, one clear line for whatever went wrong."""

import contextlib
import difflib
import os
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from offbeat_run._lock import last_locked
from offbeat_run._secrets import hide_secrets
from offbeat_types import ConfigError, OffbeatError, UserError, defer_device_backends

INTERRUPTED = 130
CLOSED_PIPE = 141
TRACEBACK_VARIABLE = "OFFBEAT_TRACEBACK"
_COMPILER_CACHE = "TORCHINDUCTOR_CACHE_DIR"


@dataclass(frozen=True, kw_only=True)
class CommandWords:
    """The words of a command line, sorted.

    Args:
        positionals: words without dashes: the command, then its FILE or RUN.
        overrides: `--section.key value` pairs, for `load_config`.
        explain: the key after `--explain`, or None.
        options: values of the application's own options, by name without dashes.
        switches: the application's own switches that were given, and "help" for -h or --help.
    """

    positionals: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    explain: str | None = None
    options: dict[str, str] = field(default_factory=dict)
    switches: frozenset[str] = frozenset()


def split_arguments(
    words: Sequence[str], *, options: Collection[str] = (), switches: Collection[str] = ()
) -> CommandWords:
    """Sort the words of a command line, such as `train my.toml --checkpoint.every 5 --out runs/a`.

    Args:
        words: without the program's name.
        options: names that take a value, such as "out"; `--out X` and `--out=X`.
        switches: names that take none, such as "plan".

    Raises:
        ConfigError: an option that is not known, or one without its value.
    """
    positionals: list[str] = []
    overrides: list[str] = []
    held: dict[str, str] = {}
    given: set[str] = set()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if word in ("-h", "--help"):
            given.add("help")
        elif not word.startswith("--"):
            positionals.append(word)
        elif name in switches and not equals:
            given.add(name)
        elif "." in name or name in ("explain", *options):
            text = value if equals else _next_value(name, rest)
            if "." in name:
                overrides += [f"--{name}={text}"]
            else:
                held[name] = text
        else:
            raise ConfigError(_unknown_option(word, [*options, *switches, "explain", "help"]))
    return CommandWords(
        positionals=tuple(positionals),
        overrides=tuple(overrides),
        explain=held.pop("explain", None),
        options=held,
        switches=frozenset(given),
    )


def _next_value(name: str, rest: list[str]) -> str:
    if not rest or rest[0].startswith("--"):
        raise ConfigError(f"--{name}: needs a value: --{name} VALUE")
    return rest.pop(0)


def _unknown_option(word: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(word.lstrip("-").partition("=")[0], known, n=1)
    hint = f"did you mean --{near[0]}?" if near else "a setting is --section.key VALUE; --help lists the rest"
    return f"{word}: unknown option; {hint}"


def run_command(main: Callable[[], int | None], *, program: str | None = None) -> NoReturn:
    """Run a command and leave the process with its exit code.

    0 or what `main` returns; an `OffbeatError`'s own code (2, 3 or 4) after one message on stderr; 130 when
    interrupted; 1 with a traceback for anything else, which is our bug. A run that failed (3, 4) or was interrupted
    says how it is resumed.

    Args:
        main: the command.
        program: its name, for the line that resumes; taken from the command line when None.
    """
    defer_device_backends()  # main imports torch
    is_users_own = _COMPILER_CACHE in os.environ
    code = _exit_code(main, program or os.path.basename(sys.argv[0]))
    if not is_users_own:
        _remove_unused_cache()
    sys.exit(code)


def _remove_unused_cache() -> None:
    """Remove the folder of torch's compiler where nothing was compiled.

    Expected: it is made when something is compiled. Happens: importing torch._dynamo makes it in the temporary folder,
    and puts its name into the environment (torch 2.13, torch/_dynamo/package.py, CACHE_DIR).
    """
    with contextlib.suppress(KeyError, OSError):  # torch was not imported, or something is in it
        os.rmdir(os.environ[_COMPILER_CACHE])


def _exit_code(main: Callable[[], int | None], program: str) -> int:
    try:
        code = main() or 0
        sys.stdout.flush()
    except OffbeatError as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            traceback.print_exc()
        print(hide_secrets(f"error: {error}"), file=sys.stderr)
        if not isinstance(error, UserError) and (advice := _advice(program)):
            print(advice, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\n" + "; ".join(filter(None, ("interrupted", _advice(program)))), file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Who read our output has left, as in `plan my.toml | head`. Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except MemoryError as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            traceback.print_exc()
        text = f": {error}" if str(error) else ""
        print(f"error: no memory left{text}; {TRACEBACK_VARIABLE}=1 shows where it was asked for", file=sys.stderr)
        return UserError.exit_code
    except Exception:  # noqa: BLE001 - this is the boundary
        traceback.print_exc()
        print(f"error: unexpected, as above; this is a bug in {program} or in code it was given", file=sys.stderr)
        return 1
    return code


def _advice(program: str) -> str:
    """How to go on with the run folder this process wrote to, if it did."""
    folder = last_locked()
    return f"resume with: {program} resume {folder}" if folder else ""

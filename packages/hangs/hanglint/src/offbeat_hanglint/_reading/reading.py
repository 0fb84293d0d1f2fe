"""From files to facts: each file parsed once, in several processes where it pays, or taken from the cache."""

import ast
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from offbeat_hanglint._config import ConfigError
from offbeat_hanglint._program.facts import FileFact, extract
from offbeat_hanglint._reading.cache import FactCache
from offbeat_hanglint._reading.facts_data import from_data, to_data
from offbeat_hanglint._reading.files import SourceFile, read_source

# Below this many bytes a process takes longer to start than to read.
MIN_BYTES_PER_JOB: Final = 2_000_000
# What a process has begun it ends: after Ctrl-C the command waits for that. Killed while it writes, it would leave half
# a message, and the command would wait for the rest.
FILES_AT_A_TIME: Final = 4


@dataclass(frozen=True)
class Unreadable:
    """A file that could not be read, and why."""

    path: str
    why: str


def read_facts(
    files: Sequence[SourceFile], cache_folder: Path | None = None, num_jobs: int = 1
) -> Iterator[FileFact | Unreadable]:
    """The facts of each file, in the order of the files.

    Args:
        files: what to read.
        cache_folder: where facts are kept between runs; None keeps nothing.
        num_jobs: processes at most.

    Raises:
        ConfigError: one of the processes was killed.
    """
    read = partial(_read, FactCache(cache_folder, _version()))
    num_jobs = min(num_jobs, _num_bytes(files) // MIN_BYTES_PER_JOB)
    if num_jobs < 2:
        yield from map(read, files)
        return
    yield from _in_processes(read, files, num_jobs)


def _in_processes(
    read: Callable[[SourceFile], FileFact | Unreadable], files: Sequence[SourceFile], num_jobs: int
) -> Iterator[FileFact | Unreadable]:
    # Imported here: they take a third of the time that the command takes to start.
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    pool = ProcessPoolExecutor(num_jobs)
    try:
        with _interrupts_wait():  # an interrupt half-way through a start leaves a process running for ever
            found = pool.map(read, files, chunksize=FILES_AT_A_TIME)
        yield from found
    except BrokenProcessPool as error:
        raise ConfigError("a process that read files was killed, perhaps for its memory: try --jobs 1") from error
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Delay Ctrl-C until the end; processes that are started inside never receive it."""
    import signal

    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _num_bytes(files: Sequence[SourceFile]) -> int:
    total = 0
    for source in files:
        try:
            total += source.file.stat().st_size
        except OSError:  # said when it is read
            continue
    return total


def _version() -> str:
    """Return the version of the code that makes facts: its text."""
    folder = Path(__file__).parent
    code = [Path(__file__), folder / "facts_data.py", *sorted((folder.parent / "_program").glob("*.py"))]
    return "".join(path.read_text(encoding="utf-8") for path in code)


def _read(cache: FactCache, source: SourceFile) -> FileFact | Unreadable:
    try:
        content = read_source(source)
        kept = cache.read(content, source.path)
        if kept is not None:
            try:
                return from_data(FileFact, kept)
            except (TypeError, ValueError, KeyError, AttributeError):  # JSON, but not what we wrote
                pass
        fact = _parse(source.path, content)
    except OSError as error:
        return Unreadable(source.path, error.strerror or str(error))
    except SyntaxError as error:
        where = f"line {error.lineno}: " if error.lineno else ""
        return Unreadable(source.path, f"{where}{error.msg}")
    except (RecursionError, MemoryError):
        return Unreadable(source.path, "is nested too deeply for Python's own parser or for hanglint")
    except ValueError as error:
        return Unreadable(source.path, str(error))
    cache.write(content, source.path, to_data(fact))
    return fact


def _parse(path: str, content: bytes) -> FileFact:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as an invalid escape in what is read
        return extract(path, ast.parse(content), len(content.splitlines()))

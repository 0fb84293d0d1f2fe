"""Code that benchmarks share: a command line, environments of peers, turns, forked ranks, rows as JSON."""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from find_links import find_links

Row = Mapping[str, Any]


def parser_of(doc: str | None, **numbers: int) -> argparse.ArgumentParser:
    """Return a command line that shows the module's docstring, with --json and these numbers as options."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print figures as JSON instead of a table")
    for name, default in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    return parser


INSTALL_TIMEOUT_S: Final = 1800


def cache_folder() -> Path:
    """Return where benchmarks keep models and environments."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offbeat" / "bench"


def peer_python(name: str, *packages: str) -> str:
    """Return the Python of an environment with these packages and the torch that runs here.

    Made with uv once, and kept.
    """
    environment = cache_folder() / name
    wanted = ("torch==" + importlib.metadata.version("torch").partition("+")[0], *packages)
    python, complete = environment / "bin" / "python", environment / "complete"
    if not complete.exists() or complete.read_text() != "\n".join(wanted):
        links = [f"--find-links={link}" for link in find_links()]
        subprocess.run(["uv", "venv", "-q", "--clear", "--python", sys.executable, str(environment)], check=True)
        install = ["uv", "pip", "install", "-q", "--python", str(python), *links, *wanted]
        subprocess.run(install, check=True, timeout=INSTALL_TIMEOUT_S, cwd=Path(__file__).parents[2])
        complete.write_text("\n".join(wanted))  # last: an environment that was interrupted is made again
    return str(python)


def take_turns(sides: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Return what each side returned, round by round: so what else the machine does falls on all of them."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(repeats):
        for name in list(sides) if number % 2 == 0 else reversed(list(sides)):
            found[name].append(sides[name]())
    return found


def on_ranks(
    num_ranks: int,
    work: Callable[[int, Path], Any],
    *,
    device_of: Callable[[int], str] = lambda rank: "cpu",
    deadline_s: float = 120,
) -> list[Any]:
    """Do work on forked ranks of a world of their own; what each returned, by rank.

    Args:
        num_ranks: of the world.
        work: given its rank and a folder that all share for this call; returns plain data. What this process has
            imported and made is there.
        device_of: each rank's device.
        deadline_s: of what ranks wait for from each other.

    Raises:
        RuntimeError: a rank failed; its error is on standard error.
    """
    with tempfile.TemporaryDirectory() as folder:
        shared, children = Path(folder), []
        for rank in range(num_ranks):
            child = os.fork()
            if not child:
                _be_rank(rank, num_ranks, work, shared, device_of(rank), deadline_s)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}")
        return [json.loads((shared / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]


def _be_rank(
    rank: int, size: int, work: Callable[[int, Path], Any], shared: Path, device: str, deadline_s: float
) -> None:
    """Run a rank to its end."""
    code = 1
    try:
        from torch._C._distributed_c10d import FileStore

        from offbeat_mesh import join_world

        store = FileStore(str(shared / "store"), size)
        with join_world(rank=rank, size=size, store=store, device=device, deadline_s=deadline_s):
            (shared / f"rank{rank}.json").write_text(json.dumps(work(rank, shared)))
        code = 0
    except BaseException as error:  # noqa: BLE001  the boundary of the process
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stderr.flush()
        os._exit(code)


def show(rows: Sequence[Row], *, as_json: bool = False, title: str = "") -> None:
    """Print rows of the same keys as Markdown under a title with the machine's load, or as JSON."""
    if as_json:
        print(json.dumps(list(rows), indent=1))
        return
    print(f"{title}{'; ' if title else ''}{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}\n")
    print("\n".join(table(rows)))


def table(rows: Sequence[Row]) -> list[str]:
    """Return lines of Markdown from rows; a key that some rows lack leaves a cell empty."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [keys, ["---"] * len(keys), *([_cell(row.get(key, "")) for key in keys] for row in rows)]
    return [f"| {' | '.join(row)} |" for row in cells]


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)

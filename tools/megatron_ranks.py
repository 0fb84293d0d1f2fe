"""What the tools that measure offbeat-engine-megatron by layout share: forked ranks, and a table in a document."""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import FileStore

from offbeat_mesh import join_world


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
    """A rank's life."""
    code = 1
    try:
        store = FileStore(str(shared / "store"), size)
        with join_world(rank=rank, size=size, store=store, device=device, deadline_s=deadline_s):
            (shared / f"rank{rank}.json").write_text(json.dumps(work(rank, shared)))
        code = 0
    except BaseException as error:  # noqa: BLE001  the boundary of the process
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stderr.flush()
        os._exit(code)


def write_table(path: Path, name: str, text: str) -> None:
    """Put a table into a document, between the marks `<!-- NAME: … -->` and `<!-- end of NAME -->`.

    Args:
        path: of the document.
        name: of the table.
        text: what takes the place of the old one.
    """
    before, mark, rest = path.read_text().partition(f"<!-- {name}: ")
    first, _, old = rest.partition("\n")
    _, end, after = old.partition(f"<!-- end of {name} -->")
    assert mark, f"{path} has no table {name}"
    assert end, f"the table {name} of {path} has no end"
    path.write_text(f"{before}{mark}{first}\n{text}\n{end}{after}")

"""`python -m offbeat_actors.ray HOST:PORT DEADLINE_S NODE...`: wait until these nodes have joined a Ray cluster.

A NODE is the name that `ray start --node-name` gave, or an address; one number is how many nodes are awaited.
"""

import sys
import time
from typing import Any, Final

from offbeat_actors._spec import ClusterConfig
from offbeat_actors.ray._cluster import Connection
from offbeat_core import ConfigError, DeadlineError, OffbeatError

_LOOK_EVERY_S: Final = 1.0
_USAGE: Final = "python -m offbeat_actors.ray HOST:PORT DEADLINE_S NODE..."
_ADVICE: Final = "see the output of `ray start` there"


def wait_joined(address: str, names: list[str], deadline_s: float) -> None:
    """Wait until nodes have joined a Ray cluster, whose head may still be starting.

    Args:
        address: host:port of the head.
        names: of the nodes; one number awaits so many, of any name.
        deadline_s: for the head to answer and all nodes to join, seconds.

    Raises:
        BackendError: Ray is not installed.
        DeadlineError: the head did not answer, or these nodes did not join, by name.
    """
    end_s = time.monotonic() + deadline_s
    connection = _connect(address, end_s, deadline_s)
    try:
        while missing := _missing(connection.ray.nodes(), names):
            if time.monotonic() > end_s:
                raise DeadlineError("joining the Ray cluster", missing, deadline_s, _ADVICE)
            time.sleep(_LOOK_EVERY_S)
    finally:
        connection.close()


def _connect(address: str, end_s: float, deadline_s: float) -> Connection:
    while (left_s := end_s - time.monotonic()) > 0:
        try:
            return Connection(ClusterConfig(launcher="ray", address=address, connect_timeout_s=left_s))
        except ConfigError:  # nothing listens yet, or the node of this machine has not joined yet
            time.sleep(min(_LOOK_EVERY_S, left_s))
    raise DeadlineError("joining the Ray cluster", f"its head at {address}", deadline_s, _ADVICE)


def _missing(nodes: list[dict[str, Any]], names: list[str]) -> str:
    """Return the names of the nodes that have not joined; empty for none."""
    alive = [node for node in nodes if node["Alive"]]
    match names:
        case [number] if number.isdecimal():
            return f"{int(number) - len(alive)} of {number} nodes" if len(alive) < int(number) else ""
    joined = {node[key] for node in alive for key in ("NodeName", "NodeManagerAddress")}
    return ", ".join(name for name in names if name not in joined)


def main(words: list[str]) -> int:
    """Run the command; return its exit code."""
    try:
        match words:
            case [address, deadline_s, *names] if names and deadline_s.isdecimal():
                wait_joined(address, names, float(deadline_s))
                return 0
        raise ConfigError(f"takes an address, a whole number of seconds and nodes: {_USAGE}")
    except OffbeatError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

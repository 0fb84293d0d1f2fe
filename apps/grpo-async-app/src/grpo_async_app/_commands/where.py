"""The command `where`: which node holds which role of a run, from a file in its folder."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict

from grpo_async_app._run.places import RoleStatus, RunPlaces, read_places, state_of
from offbeat_core import ConfigError
from offbeat_run import CommandWords, RunFolder, Writer, duration_text, print_text, refuse_foreign_run, writer_of

_HEADS = ("node", "role", "pid", "devices", "state", "since", "restarts", "version")
_FORMATS = ("text", "json")


def where_command(words: CommandWords, folder: str) -> int:
    """`where RUN`: print one line for each role, by node; `--json` for programs."""
    style = words.options.get("format", "text")
    if style not in _FORMATS:
        raise ConfigError(f"--format takes {' or '.join(_FORMATS)}: got {style!r}")
    with RunFolder.open(folder, write=False) as run:
        refuse_foreign_run(run, "grpo-async-app")
        places, writer = read_places(run), writer_of(run.path)
    driver_lives = places.is_by(writer)
    next_driver = None if driver_lives else writer
    if style == "json":
        lives = {"driver_lives": driver_lives, "next_driver": next_driver and asdict(next_driver)}
        print(json.dumps({**places.to_json(), **lives}, indent=1))
        return 0
    print_text(_describe_driver(places, driver_lives, next_driver))
    print_text("\n".join(draw_places(places, driver_lives, time.time())))
    return 0


def _describe_driver(places: RunPlaces, driver_lives: bool, next_driver: Writer | None) -> str:
    state = "is running" if driver_lives else "has ended, and every role with it"
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(places.written_s))
    text = f"driver: process {places.driver} on {places.host} {state}; places last changed at {written}"
    return f"{text}\n{next_driver} has taken the run up and has placed no role yet" if next_driver else text


def draw_places(places: RunPlaces, driver_lives: bool, now_s: float) -> list[str]:
    """Draw the table: a line for each role and each node that it holds devices of, then how processes ended.

    Args:
        places: of a run.
        driver_lives: whether its driver does; roles end with it.
        now_s: Unix time.
    """
    rows = [line for role in places.roles for line in _rows(role, driver_lives, now_s)]
    rows.sort(key=lambda row: row[0])  # a stable sort: roles of a node stay in order
    ends = [f"{role.role} ended: {role.reason}" for role in places.roles if driver_lives and role.reason]
    return [*_align([_HEADS, *rows]), *ends]


def _rows(role: RoleStatus, driver_lives: bool, now_s: float) -> list[tuple[str, ...]]:
    state, since_s = state_of(role, driver_lives)
    since = ""
    if since_s:
        since = f"{time.strftime('%H:%M:%S', time.localtime(since_s))} ({duration_text(now_s - since_s)})"
    restarts, version = str(role.restarts or ""), "" if role.version is None else str(role.version)
    own = role.devices.get(role.node, ())
    name = str(role.role)
    first = (role.node, name, str(role.pid or ""), _devices(own) or "CPU", str(state), since, restarts, version)
    others = {node: devices for node, devices in role.devices.items() if node != role.node}
    return [first, *((node, name, "", _devices(devices), "", "", "", "") for node, devices in others.items())]


def _devices(names: Sequence[str]) -> str:
    """Write devices short: "GPU 0, GPU 1" is "GPU 0,1"."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kind, _, number = name.rpartition(" ")
        kinds.setdefault(kind, []).append(number)
    return "; ".join(f"{kind} {','.join(numbers)}".strip() for kind, numbers in kinds.items())


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return [line.rstrip() for line in lines]

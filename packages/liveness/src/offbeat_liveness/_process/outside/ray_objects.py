"""Waits for the results of Ray tasks and actors."""

import sys
from types import FrameType
from typing import Any, Final

from offbeat_liveness._process.head import OutsideWait
from offbeat_liveness._process.outside import peek
from offbeat_liveness._process.outside.rule import Look, Rule, seconds

MAX_IDS: Final = 3


def _get(frame: FrameType, look: Look) -> OutsideWait | None:
    references = _references(peek.local(frame, "object_refs") or peek.local(frame, "ray_waitables"))
    name = "ray.wait" if frame.f_code.co_name == "wait" else "ray.get"
    timeout = peek.local(frame, "timeout")
    if not references:
        return OutsideWait(kind="ray", text=f"{name}{seconds(timeout)}", timeout_s=peek.number(timeout))
    names = [f"{task} {identity}".strip() for task, identity in map(_told, references[:MAX_IDS])]
    more = f" and {len(references) - len(names)} more" if len(references) > len(names) else ""
    noun = "object" if len(references) == 1 else "objects"
    needed = peek.integer(peek.local(frame, "num_returns")) if name == "ray.wait" else None
    count = f"{needed} of {len(references)}" if needed is not None else str(len(references))
    return OutsideWait(
        kind="ray",
        text=f"{name} of {count} {noun}: {', '.join(names)}{more}{seconds(timeout)}",
        on=_told(references[0])[0] or names[0],
        timeout_s=peek.number(timeout),
    )


def _references(value: object) -> list[Any]:
    return peek.members(value) if type(value) in (list, tuple, set) else [] if value is None else [value]


def _told(reference: Any) -> tuple[str, str]:
    """What makes an object, as far as its reference tells ("Actor.method"), and its id.

    Both are C of Ray's own classes, read out of the object; neither asks a server.
    """
    kind = getattr(sys.modules.get("ray._raylet"), "ObjectRef", None)
    if kind is None or not issubclass(type(reference), kind):
        return "", "?"
    return "", peek.text(kind.hex(reference))


RULES: Final = (
    Rule(file="/ray/_private/worker.py", functions=("get", "wait", "Worker.get_objects"), read=_get, reach=6),
)

"""An exception in one line, and where it was raised."""

import re
import traceback
from typing import Final

from offbeat_liveness._process.outside import peek
from offbeat_liveness._process.snapshot import CallSite
from offbeat_liveness._process.stacks import readable

MAX_ERROR: Final = 400
GLOO_PLACE: Final = re.compile(r"\[/[^]]*gloo/[^]]*\] ")  # the line of gloo's own source
GLOO_ADVICE: Final = " This is typically caused by"
STATED: Final = ("code", "status", "reason", "msg")  # where errors keep their words that have no arguments
Description = tuple[str, tuple[CallSite, ...]]


def describe(error: BaseException) -> Description:
    """Describe an exception in one line, and where it was raised, innermost first; calls its `__str__`."""
    try:
        text = str(error)
    except Exception as other:  # noqa: BLE001 - of the program; traceback passes it over as well
        text = f"<its __str__ raised {peek.class_name(other)}>"
    return _in_one_line(error, text), _raised_at(error)


def read_exception(error: BaseException) -> Description:
    """Describe it as `describe` does, from stored data alone: nothing of the program is called."""
    values = peek.members(peek.attribute(error, "args")) or [peek.attribute(error, each) for each in STATED]
    texts = [str(each) if type(each) is int else peek.text(each, MAX_ERROR) for each in values]
    return _in_one_line(error, ", ".join(each for each in texts if each)), _raised_at(error)


def _in_one_line(error: BaseException, text: str) -> str:
    name = peek.class_name(error)
    notes = map(peek.text, peek.members(peek.attribute(error, "__notes__")))
    line = " ".join(" ".join([f"{name}: {text}" if text else name, *notes]).split())
    return GLOO_PLACE.sub("", line).partition(GLOO_ADVICE)[0][:MAX_ERROR]


def _raised_at(error: BaseException) -> tuple[CallSite, ...]:
    """No file is opened for this, as `traceback.extract_tb` does: that of a source may be on a disk that hangs."""
    sites = [
        CallSite(file=frame.f_code.co_filename, line=line or 0, function=frame.f_code.co_qualname)
        for frame, line in traceback.walk_tb(peek.attribute(error, "__traceback__"))
    ]
    return readable(sites[::-1])

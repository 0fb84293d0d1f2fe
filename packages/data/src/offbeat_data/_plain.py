"""Values as plain JSON data, so that prompts travel between processes and are read by people."""

import math
import operator
from typing import Any


def to_plain(value: Any) -> Any:
    """Lists, dicts with text keys, texts, numbers, booleans and None; anything else becomes its text.

    NaN and infinities, which JSON does not have, become None.
    What is plain already, as most rows are, is given back itself and not copied.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, dict):
        made = {str(key): to_plain(item) for key, item in value.items()}
        return value if all(made.get(key, made) is item for key, item in value.items()) else made
    if isinstance(value, list | tuple):
        items = [to_plain(item) for item in value]
        is_same = isinstance(value, list) and all(map(operator.is_, items, value))
        return value if is_same else items
    return f"<{len(value)} bytes>" if isinstance(value, bytes) else str(value)


def pack(value: Any) -> Any:
    """Rewrite tuples and dicts with keys other than text, which JSON would change without a word.

    reasoning-gym's arc_agi gives the right answer a score of 0.05 when its grids come back as lists.
    """
    if isinstance(value, tuple):
        return {"__tuple__": [pack(item) for item in value]}
    if isinstance(value, list):
        return [pack(item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: pack(item) for key, item in value.items()}
        return {"__items__": [[pack(key), pack(item)] for key, item in value.items()]}
    return value


def unpack(value: Any) -> Any:
    """What `pack` was given."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {"__tuple__"}:
            return tuple(unpack(item) for item in value["__tuple__"])
        if value.keys() == {"__items__"}:
            return {unpack(key): unpack(item) for key, item in value["__items__"]}
        return {key: unpack(item) for key, item in value.items()}
    return value

"""Facts as plain JSON data and back, following the types of their fields: a new field needs nothing here."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")


def to_data(value: Any) -> Any:
    """Lists for records, tuples and sets; records without the names of their fields."""
    if isinstance(value, str | int | float | None):
        return value
    if is_dataclass(value):
        return [to_data(getattr(value, field.name)) for field in fields(value)]
    if isinstance(value, dict):
        return {key: to_data(each) for key, each in value.items()}
    if isinstance(value, frozenset | set):
        return sorted(value)
    return [to_data(each) for each in value]


def from_data(kind: type[T], data: Any) -> T:
    """Return the value of a type that `to_data` made this of.

    Raises:
        TypeError, ValueError, AttributeError: it made it of no such value.
    """
    found: T = _reader(cast(Any, kind))(data)
    return found


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in (str, int, bool, float):
        return _exactly(kind)
    if origin is UnionType:
        return _exactly(*arguments)
    if origin is dict:
        of_value = _reader(arguments[1])
        return lambda data: {key: of_value(each) for key, each in data.items()}
    if origin is tuple and arguments[-1] is not ...:
        readers = [_reader(each) for each in arguments]
        return lambda data: tuple(read(each) for read, each in zip(readers, data, strict=True))
    if origin in (tuple, list, frozenset):
        of_item = _reader(arguments[0])
        return lambda data: origin([of_item(each) for each in _list(data)])
    hints = get_type_hints(kind)
    names = kind._fields if issubclass(kind, tuple) else [field.name for field in fields(kind)]
    readers = [_reader(hints[name]) for name in names]
    return lambda data: kind(*[read(each) for read, each in zip(readers, _list(data), strict=True)])


def _exactly(*kinds: type) -> Callable[[Any], Any]:
    def read(data: Any) -> Any:
        if type(data) not in kinds:
            raise TypeError(f"must be {kinds}: got {data!r}")
        return data

    return read


def _list(data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise TypeError(f"must be a list: got {data!r}")
    return data

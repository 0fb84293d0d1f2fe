"""Decodes the arguments of a call to the types its method declares."""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

import msgspec

from offbeat_actors._frames import Frame


def load_target(target: str) -> type[Any]:
    """Import "package.module:Class"."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def bind_arguments(
    function: Callable[..., Any], args: Sequence[msgspec.Raw], kwargs: Mapping[str, msgspec.Raw], frame: Frame
) -> inspect.BoundArguments:
    """Match packed arguments with the parameters of a method or class, and decode each.

    A parameter without annotation takes plain data and arrays as they come.

    Raises:
        TypeError: an argument is missing or unknown.
        msgspec.ValidationError: one is of another type than declared; the text names the parameter.
    """
    hints = get_type_hints(function.__init__ if isinstance(function, type) else function)  # type: ignore[misc]
    signature = inspect.signature(function)
    bound = signature.bind(*args, **kwargs)
    for name, value in bound.arguments.items():
        hint = hints.get(name, Any)
        kind = signature.parameters[name].kind
        try:
            if kind is inspect.Parameter.VAR_POSITIONAL:
                bound.arguments[name] = tuple(frame.unpack(raw, hint) for raw in value)
            elif kind is inspect.Parameter.VAR_KEYWORD:
                bound.arguments[name] = {key: frame.unpack(raw, hint) for key, raw in value.items()}
            else:
                bound.arguments[name] = frame.unpack(value, hint)
        except msgspec.ValidationError as error:
            raise msgspec.ValidationError(f"argument {name!r}: {error}") from None
    return bound

"""Plain data as bytes: MessagePack, with numpy arrays as one extension type. Never pickle.

Source: the MessagePack specification, https://github.com/msgpack/msgpack/blob/master/spec.md
"""

import re
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from offbeat_types import GroupError

Plain: TypeAlias = Any
"""None, bool, int of 64 bit, float, str, bytes, list, tuple, dict with str keys, numpy array or number; nested."""

LEAVES: Final = frozenset({type(None), bool, int, float, str, bytes})

ARRAY_EXTENSION: Final = 1
"""Our number for a numpy array: one byte n, n bytes of MessagePack [dtype, *shape], then the items in C order."""

ARRAY_DTYPE: Final = re.compile(r"[<>|=][biufcSU]\d+")
"""numpy's dtype texts that can travel: no objects, no records, no dates."""


def encode(value: Plain, *, what: str = "the value") -> bytes:
    """Turn plain data into bytes; a tuple arrives as a list, a numpy number as a Python one.

    Raises:
        GroupError: something in it cannot travel; the text says what and where it may be fixed.
    """
    try:
        _check(value, what)
        return msgspec.msgpack.encode(value, enc_hook=_encode_numpy)
    except (TypeError, OverflowError, RecursionError, UnicodeEncodeError) as error:
        raise GroupError(
            f"{what} cannot travel between ranks: {error}; send None, bool, int of at most 64 bit, float, str, bytes, "
            "list, dict with str keys, or a numpy array of numbers (tensors have calls of their own)"
        ) from error


def decode(data: bytes | bytearray | memoryview) -> Plain:
    """What `encode` was given.

    Raises:
        GroupError: the bytes are not of that form.
    """
    try:
        return msgspec.msgpack.decode(data, ext_hook=_decode_extension)
    except (msgspec.MsgspecError, ValueError, TypeError, IndexError) as error:
        raise GroupError(
            f"bytes from another rank are not plain data: {error}; do all ranks run one version?"
        ) from error


def _check(value: Plain, where: str) -> None:
    """Refuse what MessagePack could write but not give back as it was: other keys, sets, dates, classes."""
    if isinstance(value, dict):
        for key, item in value.items():
            if type(key) is not str:
                raise TypeError(f"{where} has the key {key!r}, a {type(key).__name__}")
            _check(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        if not set(map(type, value)) <= LEAVES:  # a long list of numbers is checked in one go
            for index, item in enumerate(value):
                _check(item, f"{where}[{index}]")
    elif type(value) not in LEAVES and not isinstance(value, np.ndarray | np.generic):
        raise TypeError(f"{where} is a {type(value).__name__}")


def _encode_numpy(value: object) -> object:
    if isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        return value.item()
    array = np.asarray(value)
    if not ARRAY_DTYPE.fullmatch(array.dtype.str):
        raise TypeError(f"it holds a numpy array of dtype {array.dtype}")
    head = msgspec.msgpack.encode([array.dtype.str, *array.shape])
    return msgspec.msgpack.Ext(ARRAY_EXTENSION, bytes([len(head)]) + head + array.tobytes())


def _decode_extension(code: int, data: memoryview) -> np.ndarray[Any, Any]:
    if code != ARRAY_EXTENSION:
        raise ValueError(f"unknown extension {code}")
    end = 1 + data[0]
    dtype, *shape = msgspec.msgpack.decode(data[1:end])
    if not ARRAY_DTYPE.fullmatch(dtype):
        raise ValueError(f"a numpy array of dtype {dtype}")
    array: np.ndarray[Any, Any] = np.frombuffer(data[end:], dtype=dtype).reshape(shape).copy()
    return array

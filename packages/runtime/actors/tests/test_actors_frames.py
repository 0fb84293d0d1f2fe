"""A frame carries plain data, dataclasses and arrays, unchanged and typed."""

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from offbeat_actors._wire import HEADER, Call, Frame, FrameWriter, Result

DTYPES = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(),
    hnp.floating_dtypes(endianness="?"),
    hnp.complex_number_dtypes(),
    hnp.unicode_string_dtypes(),
)
ARRAYS = DTYPES.flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_side=5)))


def carry(value: object, kind: Any) -> Any:
    writer = FrameWriter()
    frame = writer.finish(Result(1, writer.pack(value)))
    head = HEADER.size
    envelope_bytes, array_bytes = HEADER.unpack(frame[:head].tobytes())
    assert len(frame) == head + envelope_bytes + array_bytes
    received = Frame(frame[head : head + envelope_bytes].tobytes(), frame[head + envelope_bytes :].copy())
    assert isinstance(received.message, Result)
    return received.unpack(received.message.value, kind)


@given(st.lists(ARRAYS, max_size=4))
def test_arrays_keep_dtype_shape_and_values(arrays: list[npt.NDArray[Any]]) -> None:
    for kind in (Any, list[np.ndarray]):
        carried = carry(arrays, kind)
        assert [array.dtype for array in carried] == [array.dtype for array in arrays]
        assert [array.shape for array in carried] == [array.shape for array in arrays]
        for before, after in zip(arrays, carried, strict=True):
            np.testing.assert_array_equal(before, after)
            assert after.flags.writeable
            assert after.flags.aligned


def test_a_strided_array_arrives_packed() -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)[::2, ::-3]
    np.testing.assert_array_equal(carry(array, npt.NDArray[np.float32]), array)


def test_the_caller_may_change_an_array_after_it_was_packed_and_finished() -> None:
    array = np.zeros(3)
    writer = FrameWriter()
    frame = writer.finish(Call(1, "m", [writer.pack(array)], {}))
    before = frame.copy()
    array[:] = 7
    np.testing.assert_array_equal(frame, before)


def test_numpy_scalars_travel_as_numbers() -> None:
    assert carry({"loss": np.float32(0.5), "step": np.int64(3), "ok": np.bool_(True)}, Any) == {
        "loss": 0.5,
        "step": 3,
        "ok": True,
    }


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        (np.zeros(2), npt.NDArray[np.float32], "Expected an array of float32, got float64"),
        ([1, 2], npt.NDArray[np.float32], "Expected a numpy array, got `list`"),
        ("7", int, "Expected `int`, got `str`"),
        ({"a": 1}, object, "object"),
    ],
)
def test_another_type_than_declared_is_refused(value: object, kind: Any, words: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=words):
        carry(value, kind)


@pytest.mark.parametrize("value", [object(), np.array([object()]), np.zeros(2, dtype=[("a", "i4")]), lambda: 0, 1j])
def test_what_would_need_pickle_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="a call carries"):
        carry(value, Any)

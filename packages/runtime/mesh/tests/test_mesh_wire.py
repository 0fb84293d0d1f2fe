"""Plain data goes round, and nothing else sets out."""

import contextlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from offbeat_core import GroupError
from offbeat_mesh._plain_data import decode, encode

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary()
)
PLAIN = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner), max_leaves=20)


@given(PLAIN)
def test_plain_data_goes_round(value):
    assert decode(encode(value)) == value


@given(
    hnp.arrays(
        hnp.boolean_dtypes() | hnp.integer_dtypes() | hnp.floating_dtypes() | hnp.complex_number_dtypes(),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0),
    )
)
def test_arrays_go_round_with_dtype_and_shape(array):
    back = decode(encode({"array": array}))["array"]
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()
    assert back.flags.writeable


def test_tuples_arrive_as_lists_and_numpy_numbers_as_python_s():
    back = decode(encode((1, (2.5, "x"), np.float32(0.5), np.int64(7), np.bool_(True))))
    assert back == [1, [2.5, "x"], 0.5, 7, True]
    assert [type(each) for each in back[2:]] == [float, int, bool]
    assert math.isnan(decode(encode(math.nan)))


CYCLE: list = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2**64, "ints"),
        ({"a": [{1: 2}]}, r"plan\['a'\]\[0\] has the key 1, a int"),
        ([{3}], r"plan\[0\] is a set"),
        (object(), "plan is a object"),
        (np.array([None]), "dtype object"),
        (np.array(["2020-01-01"], dtype="datetime64[D]"), "dtype datetime64"),
        ("\ud800", "surrogates"),
        (CYCLE, "recursion"),
        (lambda: 1, "plan is a function"),
    ],
)
def test_what_cannot_travel_is_named(value, text):
    with pytest.raises(GroupError, match=f"plan cannot travel between ranks: .*{text}"):
        encode(value, what="plan")


@given(st.binary(max_size=60))
def test_other_bytes_are_refused_or_plain(data):
    with contextlib.suppress(GroupError):  # any other error would be ours
        decode(data)


@given(hnp.arrays(np.int32, (3,)), st.integers(0, 30), st.integers(0, 255))
def test_a_damaged_array_is_refused_or_still_an_array(array, position, byte):
    data = bytearray(encode(array))
    data[position % len(data)] = byte
    with contextlib.suppress(GroupError):
        decode(bytes(data))

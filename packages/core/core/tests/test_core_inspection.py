"""Fingerprints of tensors."""

import numpy as np
import pytest

from offbeat_core import fingerprint

MATRIX = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)


def test_a_tensor_has_one_fingerprint() -> None:
    assert np.array_equal(fingerprint(MATRIX), fingerprint(MATRIX.copy()))
    assert np.array_equal(fingerprint(np.zeros(3)), fingerprint(-np.zeros(3)))
    assert len(fingerprint(np.zeros(0))) == len(fingerprint(MATRIX)) == 67


@pytest.mark.parametrize("change", ["transposed", "rows swapped", "one element"])
def test_another_order_has_another_fingerprint(change: str) -> None:
    """A square of 64 has its diagonal at the even distances, and a sum does not see the order."""
    other = MATRIX.copy()
    if change == "transposed":
        other = other.T
    elif change == "rows swapped":
        other[[5, 9]] = other[[9, 5]]
    else:
        other[3, 40] = np.nextafter(other[3, 40], np.float32(9))
    assert not np.array_equal(fingerprint(other), fingerprint(MATRIX))


def test_a_large_tensor_is_summed_in_parts() -> None:
    large = np.zeros((1 << 20) + 5, np.float32)
    moved = large.copy()
    large[-1], moved[0] = 2.0, 2.0
    assert fingerprint(large)[2] != fingerprint(moved)[2]

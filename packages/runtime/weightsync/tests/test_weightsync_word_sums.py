"""The checksum for weights that stay on their device; its logic runs on the CPU's tensors."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from weightsync_peers import Weights, are_equal, in_thread, load, plan_of, receiving

from offbeat_core import WeightSyncError
from offbeat_weightsync import SharedMemorySender, WeightCopy, receive
from offbeat_weightsync._sums.words import WordSum

MASK = 2**64 - 1


def factor(place: int) -> int:
    """SplitMix64 of the place, made odd, in Python's integers."""
    z = (place + 1) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return (z ^ (z >> 31)) | 1


def reference(data: bytes) -> str:
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    return f"{sum(word * factor(place) for place, word in enumerate(words)) & MASK:016x}"


def sum_of(*parts: tuple[int, Tensor]) -> str:
    words = WordSum()
    for first, part in parts:
        words.add(first, part)
    return words.hexdigest()


def as_tensor(data: bytes) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


@given(st.binary(min_size=1, max_size=400))
def test_it_is_the_sum_that_it_says(data: bytes) -> None:
    assert sum_of((0, as_tensor(data))) == reference(data)


@given(st.binary(min_size=9, max_size=400), st.data())
def test_pieces_may_come_in_any_order_and_from_anywhere(data: bytes, draw: st.DataObject) -> None:
    cut = 8 * draw.draw(st.integers(1, (len(data) - 1) // 8))
    lies = torch.cat([torch.zeros(3, dtype=torch.uint8), as_tensor(data)])[3:]  # not at a multiple of 8
    assert sum_of((cut, lies[cut:]), (0, lies[:cut])) == reference(data)


def test_long_parts_are_taken_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    data = as_tensor(bytes(range(256)) * 4)
    whole = sum_of((64, data))
    monkeypatch.setattr("offbeat_weightsync._sums.words.CHUNK_WORDS", 5)
    assert sum_of((64, data)) == whole


@given(st.binary(min_size=1, max_size=200), st.data())
def test_every_changed_byte_shows(data: bytes, draw: st.DataObject) -> None:
    place, flip = draw.draw(st.integers(0, len(data) - 1)), draw.draw(st.integers(1, 255))
    other = bytearray(data)
    other[place] ^= flip
    assert sum_of((0, as_tensor(bytes(other)))) != reference(data)


@pytest.fixture
def sender(weights: Weights, address: str) -> Iterator[SharedMemorySender]:
    """Yield a sender that behaves as if its slots were on a device."""
    with SharedMemorySender(address, plan_of(weights, "bfloat16"), deadline_s=30) as sender:
        sender._checksum = "words"
        yield sender


def test_weights_are_proved_by_it(sender: SharedMemorySender, weights: Weights) -> None:
    expected = {spec.name: weights[spec.name].to(getattr(torch, spec.dtype)) for spec in sender.plan.specs}
    with receiving(sender.address) as held:
        (proof,) = sender.send(weights.items(), 1, 1)
    assert are_equal(held[0], expected)
    assert all(len(checksum) == 16 for checksum in proof.checksums)
    with receiving(sender.address, 2) as held:
        sender._checksum = "xxh3"
        (other,) = sender.send(weights.items(), 2, 1)
    assert other.checksums != proof.checksums


@pytest.mark.parametrize("name", ["wide", "norm", "strided", "flags", "head"])
def test_a_flipped_bit_is_found_by_it(sender: SharedMemorySender, weights: Weights, name: str) -> None:
    def take() -> None:
        with receive(sender.address, 1, 30) as stream:
            held = load(stream)
            held[name].view(torch.uint8).view(-1)[-1] ^= 1
            stream.confirm(stream.prove(held.__getitem__))

    with in_thread(take) as said, pytest.raises(WeightSyncError, match="holds other bytes than were sent"):
        sender.send(weights.items(), 1, 1)
    assert isinstance(said[0], WeightSyncError)


def test_copies_lie_in_main_memory_and_are_hashed_there(sender: SharedMemorySender, weights: Weights) -> None:
    ours, theirs = WeightCopy(9), WeightCopy()
    for version in (1, 2):

        def take(version: int = version) -> Weights:
            with receive(sender.address, version, 30, copy=theirs) as stream:
                held = load(stream)
                stream.confirm(stream.prove(held.__getitem__))
            return held

        with in_thread(take) as held:
            sender.send(weights.items(), version, 1, copy=ours)
        assert isinstance(held[0], dict)
        weights["wide"].add_(1)

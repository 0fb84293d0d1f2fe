"""Tensors come to the device one after the other, and their values stay what was made of them."""

import torch

from offbeat_device import StreamedMemory, open_device


def test_values_are_away_between_uses_and_two_names_are_here_at_a_time():
    stream, tensors = StreamedMemory(open_device("cpu")), {name: [torch.ones(4)] for name in "abc"}
    views = {name: held[0][1:3] for name, held in tensors.items()}

    def here():
        return sum(bool(held[0].untyped_storage().nbytes()) for held in tensors.values())

    for turn in range(3):
        for name in stream.through("abc", tensors.get):
            assert turn == 0 or here() == (1 if name == "c" else 2)
            tensors[name][0] += 1
        assert not here()
    for name in stream.through("cab", tensors.get):
        assert tensors[name][0].tolist() == [4.0] * 4
        assert views[name].tolist() == [4.0] * 2


def test_a_loop_that_ends_early_leaves_values_where_they_wait():
    stream, tensors = StreamedMemory(open_device("cpu")), {name: [torch.ones(4)] for name in "abc"}
    list(stream.through("abc", tensors.get))
    for name in stream.through("abc", tensors.get):
        tensors[name][0] += 1
        if name == "b":
            break
    for name, wanted in zip(stream.through("abc", tensors.get), (2.0, 2.0, 1.0), strict=True):
        assert tensors[name][0].tolist() == [wanted] * 4


def test_what_is_made_in_the_loop_is_taken_away_after_it():
    stream, made = StreamedMemory(open_device("cpu")), {}
    for name in stream.through("ab", lambda name: made.get(name, [])):
        if name == "a":
            made[name] = [torch.arange(3.0), torch.ones(2, dtype=torch.uint8)]
    assert not any(each.untyped_storage().nbytes() for each in made["a"])
    for _ in stream.through("a", made.get):
        assert [each.tolist() for each in made["a"]] == [[0, 1, 2], [1, 1]]
    made["a"] = [torch.ones(5)]
    for _ in range(2):
        for _ in stream.through("a", made.get):
            pass
    stream.forget()

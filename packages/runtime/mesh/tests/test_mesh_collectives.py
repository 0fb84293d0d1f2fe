"""Every collective on real ranks against a plain numpy reference."""

import numpy as np
import pytest
import torch

from offbeat_core import ConfigError, GroupError, MismatchError, PeerFailedError, ShapeError

REDUCIBLE = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
]
MOVABLE = [*REDUCIBLE, torch.bool, torch.int16, torch.uint16, torch.complex64, torch.float8_e4m3fn]
SHAPES = [(), (1,), (3, 2), (0, 4)]
REFERENCE = {
    "sum": lambda rows: rows.sum(0),
    "mean": lambda rows: rows.mean(0),
    "min": lambda rows: rows.min(0),
    "max": lambda rows: rows.max(0),
    "product": lambda rows: rows.prod(0),
}

pytestmark = pytest.mark.parametrize(
    "mesh",
    [pytest.param({"dp": 2}, id="2", marks=pytest.mark.nightly), pytest.param({"dp": 2, "tp": 2}, id="4")],
    indirect=True,
)


def of_member(index, shape, dtype=torch.float32):
    """What member `index` holds: small whole numbers, so that every dtype is exact."""
    count = int(np.prod(shape))
    return (torch.arange(count).reshape(shape) % 3 + index + 1).to(dtype)


def to_reduce(index, shape, dtype):
    """What member `index` holds: 1 to 3, so that a product of four fits into int8."""
    return ((torch.arange(int(np.prod(shape))).reshape(shape) + 2 * index) % 3 + 1).to(dtype)


def as_numpy(tensor):
    return tensor.to(torch.complex64 if tensor.is_complex() else torch.float64).numpy()


def same(tensor, expected):
    np.testing.assert_array_equal(as_numpy(tensor), np.asarray(expected))


def all_members(group, shape, dtype=torch.float32):
    return np.stack([as_numpy(of_member(index, shape, dtype)) for index in range(group.size)])


def everyone(mesh):
    return mesh.group("dp", "tp")


def test_movers_match_numpy_for_every_dtype_and_shape(mesh):
    group = everyone(mesh)
    last = group.size - 1
    for dtype in MOVABLE:
        for shape in SHAPES if dtype in (torch.float32, torch.int16) else [(3, 2)]:
            rows = all_members(group, shape, dtype)
            own = of_member(group.rank, shape, dtype)
            same(group.all_gather(own), rows)
            gathered = group.gather(own, destination=last)
            assert (gathered is None) == (group.rank != last)
            if gathered is not None:
                assert gathered.dtype == dtype
                same(gathered, rows)
            same(group.broadcast(own.clone(), source=last), rows[last])
            sent = torch.stack([of_member(10 + index, shape, dtype) for index in range(group.size)])
            received = group.scatter(torch.empty(shape).to(dtype), sent if group.rank == 1 else None, source=1)
            same(received, as_numpy(sent)[group.rank])
            same(own, rows[group.rank])


def test_reductions_match_numpy_for_every_dtype_and_operation(mesh):
    group = everyone(mesh)
    for dtype in REDUCIBLE:
        for op, reference in REFERENCE.items():
            if op != "sum" and dtype not in (torch.float32, torch.int32):
                continue
            if op == "mean" and not dtype.is_floating_point:
                continue
            for shape in SHAPES if dtype == torch.float32 and op == "sum" else [(3, 2)]:
                expected = reference(np.stack([as_numpy(to_reduce(i, shape, dtype)) for i in range(group.size)]))
                own = to_reduce(group.rank, shape, dtype)
                reduced = group.reduce(own, destination=1, op=op)
                assert (reduced is None) == (group.rank != 1)
                if reduced is not None:
                    assert reduced.dtype == dtype
                    same(reduced, expected)
                same(own, as_numpy(to_reduce(group.rank, shape, dtype)))
                assert group.all_reduce(own, op) is own
                same(own, expected)
                rows = torch.stack([to_reduce(group.rank + index, shape, dtype) for index in range(group.size)])
                mine = np.stack([as_numpy(to_reduce(other + group.rank, shape, dtype)) for other in range(group.size)])
                same(group.reduce_scatter(rows, op), reference(mine))


def test_strided_tensors_are_read_and_written_in_place(mesh):
    group = everyone(mesh)
    base = torch.zeros(4, 6)
    window = base[1:3, ::2].t()
    window.copy_(of_member(group.rank, (3, 2)))
    group.all_reduce(window)
    same(base[1:3, ::2].t(), all_members(group, (3, 2)).sum(0))
    assert base[0].sum() == base[3].sum() == base[:, 1::2].sum() == 0
    group.broadcast(window.copy_(of_member(group.rank, (3, 2))), source=1)
    same(base[1:3, ::2].t(), all_members(group, (3, 2))[1])
    same(group.all_gather(of_member(group.rank, (2, 3)).t()), all_members(group, (2, 3)).transpose(0, 2, 1))
    same(group.reduce_scatter(torch.ones(3, group.size).t()), np.full(3, group.size))
    parameter = torch.nn.Parameter(torch.ones(2))
    group.all_reduce(parameter)
    same(parameter.detach(), [group.size] * 2)


def test_all_to_all_is_uneven_if_its_parts_are(mesh):
    group = everyone(mesh)
    for dtype in (torch.float32, torch.int16, torch.bool):
        for trailing in ((), (2,), (2, 0)):
            # member i sends i·j mod 3 rows to member j, some of them none
            count = {(i, j): (i * j + i) % 3 for i in range(group.size) for j in range(group.size)}
            parts = [of_member(group.rank, (count[group.rank, j], *trailing), dtype) for j in range(group.size)]
            received = group.all_to_all(parts)
            for source, part in enumerate(received):
                assert part.shape == (count[source, group.rank], *trailing)
                assert part.dtype == dtype
                same(part, as_numpy(of_member(source, part.shape, dtype)))
            sent, coming = ([count[pair] for pair in pairs] for pairs in pairs_of(group))
            same(group.all_to_all_runs(torch.cat(parts), sent, coming), as_numpy(torch.cat(received)))


def pairs_of(group):
    """Pairs of a giver and a taker: with this member as the giver, and as the taker."""
    own, members = group.rank, range(group.size)
    return [(own, other) for other in members], [(other, own) for other in members]


def test_all_to_all_rows_are_those_of_one_size(mesh):
    group = everyone(mesh)
    for dtype in (torch.float32, torch.bfloat16, torch.int16):
        for shape in ((), (2,), (3, 2), (2, 0)):
            rows = torch.stack(
                [of_member(group.rank * group.size + other, shape, dtype) for other in range(group.size)]
            )
            received = group.all_to_all_rows(rows.transpose(0, -1).contiguous().transpose(0, -1))
            assert received.dtype == dtype
            for source, row in enumerate(received):
                same(row, as_numpy(of_member(source * group.size + group.rank, shape, dtype)))


def test_send_and_recv_go_round_the_ring(mesh):
    group = everyone(mesh)
    following, previous = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for dtype in (torch.float32, torch.int16):
        into = torch.empty(3, 2).to(dtype).t()
        if group.rank % 2:
            group.recv(into, previous)
            group.send(of_member(group.rank, (2, 3), dtype), following)
        else:
            group.send(of_member(group.rank, (2, 3), dtype), following)
            group.recv(into, previous)
        same(into, as_numpy(of_member(previous, (2, 3), dtype)))
    for size in (0, 10, 255, 256, 257, 100_000):
        if group.rank == 0:
            group.send_data({"x": b"a" * size}, 1)
        elif group.rank == 1:
            assert group.recv_data(0) == {"x": b"a" * size}


def test_plain_data_arrives_short_or_long(mesh):
    for size in (1, 200, 256, 300, 5000):
        check_plain_data(everyone(mesh), size)


def check_plain_data(group, size):
    own = {"rank": group.rank, "text": "ä" * (size + group.rank), "array": np.arange(group.rank + 1)}
    for received in (group.all_gather_data(own), group.gather_data(own, destination=1)):
        if received is not None:
            assert [each["rank"] for each in received] == list(range(group.size))
            assert [len(each["text"]) - size for each in received] == list(range(group.size))
            assert [len(each["array"]) for each in received] == list(range(1, group.size + 1))
    assert (group.gather_data(size, destination=1) is None) == (group.rank != 1)
    assert group.broadcast_data(own if group.rank == 1 else None, source=1)["rank"] == 1
    values = [{"to": index, "text": "x" * size * index} for index in range(group.size)]
    received = group.scatter_data(values if group.rank == 1 else None, source=1)
    assert received == values[group.rank]


def test_groups_of_one_axis_and_of_none(mesh):
    for axis in ("dp", "tp"):
        group = mesh.group(axis)
        assert group.ranks == mesh.layout.members([axis], mesh.rank)
        assert group.rank == mesh.coordinates[axis]
        same(group.all_reduce(torch.ones(1) * mesh.rank), [sum(group.ranks)])
    alone = mesh.group()
    assert (alone.size, alone.rank, alone.ranks) == (1, 0, (mesh.rank,))
    everything_alone(alone)


def everything_alone(group):
    """Check that in a group of one every call gives back what it was given."""
    own = torch.arange(6.0).reshape(2, 3)
    same(group.all_reduce(own.clone(), "mean"), own)
    same(group.broadcast(own.clone()), own)
    same(group.reduce(own), own)
    same(group.all_gather(own), own[None])
    same(group.gather(own), own[None])
    same(group.scatter(torch.empty(2, 3), own[None]), own)
    same(group.reduce_scatter(own[None]), own)
    same(group.all_to_all([own])[0], own)
    same(group.all_to_all_rows(own[None]), own[None])
    same(group.all_to_all_runs(own, [2], [2]), own)
    group.barrier()
    for big in (3, "x" * 1000):
        assert group.broadcast_data(big) == big
        assert group.all_gather_data(big) == [big]
        assert group.gather_data(big) == [big]
        assert group.scatter_data([big]) == big
        assert group.decide(lambda value=big: value) == big
        assert group.check_equal(big, what="it") == big
    with group.together("work"):
        pass
    with pytest.raises(GroupError, match="must be another member"):
        group.send(own, 0)


def test_decide_asks_the_first_member_alone(mesh):
    group = everyone(mesh)
    asked = []
    answer = group.decide(lambda: asked.append(group.rank) or {"parts": [1, 2], "rank": group.rank})
    assert answer == {"parts": [1, 2], "rank": 0}
    assert asked == ([0] if group.rank == 0 else [])


def test_a_decision_that_fails_fails_on_all_and_the_group_goes_on(mesh):
    group = everyone(mesh)

    def ask():
        raise ValueError("no such model")

    with pytest.raises(PeerFailedError, match=r"rank 0 \(.*\) failed: ValueError: no such model") as caught:
        group.decide(ask)
    assert isinstance(caught.value.__cause__, ValueError) == (group.rank == 0)
    with pytest.raises(PeerFailedError, match="the decision cannot travel"):
        group.decide(lambda: object())
    assert group.all_gather_data(group.rank) == list(range(group.size))


def test_equal_values_pass_and_others_are_shown_to_all(mesh):
    group = everyone(mesh)
    assert group.check_equal([1, "a", {"b": 2.5}], what="the plan") == [1, "a", {"b": 2.5}]
    with pytest.raises(MismatchError) as caught:
        group.check_equal(7 if group.rank == 1 else 8, what="number of micro-batches")
    others = tuple(rank for rank in group.ranks if rank != 1)
    assert caught.value.values == {"8": others, "7": (1,)}
    assert "number of micro-batches must be the same on all members of dp×tp of ranks 0, 1" in str(caught.value)
    with pytest.raises(MismatchError) as caught:
        group.check_equal(["same"] * 300 + [group.rank], what="names")
    assert len(caught.value.values) == group.size
    with pytest.raises(MismatchError) as caught:
        group.check_equal([0] * 100 + [group.rank] + [0] * 100, what="計画" * 100)
    assert len(caught.value.values) == group.size
    group.barrier()


def test_members_in_different_calls_of_plain_data_all_say_so(mesh):
    group = everyone(mesh)
    with pytest.raises(MismatchError, match=r"rank 0: broadcast_data.*rank 1.*: gather_data") as caught:
        group.broadcast_data(1) if group.rank == 0 else group.gather_data(1)
    assert sorted(rank for ranks in caught.value.values.values() for rank in ranks) == list(range(group.size))
    with pytest.raises(PeerFailedError, match="MismatchError"):
        group.barrier()


def test_tensors_that_differ_are_refused_on_all_members_when_checked(mesh):
    from offbeat_mesh import Mesh

    def checked():
        return Mesh(**{axis: mesh.axes[axis] for axis in ("dp", "tp")}, check=True).group("dp", "tp")

    group = checked()
    same(group.all_reduce(torch.ones(2)), [group.size] * 2)
    with pytest.raises(
        MismatchError, match=r"rank 0: all_reduce sum of float32\[2\].*rank 1.*: all_reduce sum of float32\[3\]"
    ):
        group.all_reduce(torch.ones(2 if group.rank == 0 else 3))
    with pytest.raises(MismatchError, match=r"rank 0: all_gather of int64\[2\].*: all_gather of int32\[2\]"):
        checked().all_gather(torch.ones(2, dtype=torch.int64 if group.rank == 0 else torch.int32))
    with pytest.raises(MismatchError, match=r"with root 0.*with root 1"):
        checked().broadcast(torch.ones(2), source=0 if group.rank == 0 else 1)
    with pytest.raises(MismatchError, match=r"all_reduce max.*all_reduce sum"):
        checked().all_reduce(torch.ones(2), "max" if group.rank == 0 else "sum")
    part = torch.ones(2, 3 if group.rank == 0 else 4)
    with pytest.raises(
        MismatchError, match=r"rank 0: all_to_all of float32\[\*, 3\].*: all_to_all of float32\[\*, 4\]"
    ):
        checked().all_to_all([part] * group.size)
    ones = [1] * group.size
    with pytest.raises(ShapeError, match=r"members give \[\[1, 1.* and wait for \[\[2, 1"):
        checked().all_to_all_runs(torch.ones(group.size), ones, [2, *ones[1:]] if group.rank == 0 else ones)


def test_arguments_are_checked_before_anything_is_sent(mesh):
    from offbeat_mesh import Mesh

    def fresh():
        return Mesh(**{axis: mesh.axes[axis] for axis in ("dp", "tp")}).group("dp", "tp")

    size = mesh.size
    wrong = [
        (
            lambda g: g.broadcast(torch.ones(1), source=size),
            GroupError,
            rf"group-relative, 0 to {size - 1}: got {size}",
        ),
        (lambda g: g.reduce(torch.ones(1), destination=-1), GroupError, "got -1"),
        (
            lambda g: g.all_reduce(torch.ones(1), "average"),
            ConfigError,
            "one of sum, mean, min, max, product: got 'average'",
        ),
        (
            lambda g: g.all_reduce(torch.ones(1, dtype=torch.int32), "mean"),
            ShapeError,
            r"floating-point dtype: got int32\[1\]",
        ),
        (lambda g: g.all_reduce(torch.ones(1, dtype=torch.bool)), ShapeError, "convert it before"),
        (lambda g: g.reduce_scatter(torch.ones(size + 1)), ShapeError, rf"\[{size}, ...\]: got float32\[{size + 1}\]"),
        (lambda g: g.scatter(torch.ones(1), torch.ones(size, 2), source=g.rank), ShapeError, "must be like the output"),
        (lambda g: g.scatter(torch.ones(1), source=g.rank), ShapeError, "needs rows on the source"),
        (lambda g: g.all_to_all([torch.ones(1)] * (size + 1)), ShapeError, f"needs {size} parts"),
        (lambda g: g.all_to_all_runs(torch.ones(3), [1] * size, [1] * size), ShapeError, f"{size} runs of 3 rows"),
        (lambda g: g.all_to_all_rows(torch.ones(size + 1)), ShapeError, rf"\[{size}, ...\]: got float32\[{size + 1}\]"),
        (
            lambda g: g.scatter_data([1] * (size + 1), source=g.rank),
            GroupError,
            f"one value for each of {size}: got {size + 1}",
        ),
        (lambda g: g.send(torch.ones(1), g.rank), GroupError, "must be another member"),
        (lambda g: g.all_gather_data({1: 2}), GroupError, "the value to gather cannot travel"),
    ]
    for call, kind, text in wrong:
        group = fresh()
        with pytest.raises((kind, PeerFailedError), match=text):
            call(group)
        with pytest.raises(PeerFailedError, match=text):
            group.barrier()

"""The hang surface: whatever the engine does, all members of every group issue the same collectives."""

import json
from dataclasses import replace

import pytest
from megatron_collectives import LAYOUTS, PHASES, Seen, judge, notify, prove, walk
from megatron_layouts import params_of

IN_CI = [LAYOUTS[4], LAYOUTS[5]]


@pytest.mark.parametrize("layout", params_of(LAYOUTS, IN_CI))
def test_no_rank_can_wait_for_one_that_does_not_come(create, shared, mesh, layout):
    """A training step, a validation, an export and a checkpoint, as torch's recorder has seen them on each rank."""
    place = shared / layout.slug
    report = notify(walk(create(layout, mesh), place))
    (shared / f"{place.name}-rank{mesh.rank}.json").write_text(json.dumps(report))
    mesh.group(*(axis for axis in layout.axes if axis != "ep")).barrier()
    of_all_ranks = [json.loads((shared / f"{place.name}-rank{rank}.json").read_text()) for rank in range(mesh.size)]
    counts = judge(of_all_ranks)
    assert all(calls > 0 for calls, _ in counts.values())
    piped = layout.axes.get("pp", 1) > 1
    assert [bool(messages) for _, messages in counts.values()] == [piped, piped, False, False]


MEMBERS = {rank: {"all": [0, 1], f"own{rank}": [rank]} for rank in range(2)}
A, B = ("all", 1, "allreduce", "Float[4]"), ("all", 2, "broadcast", "Float[4]")
NOTHING = Seen(calls=[], sent=[], received=[])


def refused(one, other, members=MEMBERS):
    with pytest.raises(AssertionError) as error:
        prove("a phase", {0: one, 1: other}, members)
    return str(error.value)


def test_the_proof_finds_what_hangs():
    """It is not blind: each kind of disagreement is refused, and agreement is not."""
    both = replace(NOTHING, calls=[A, B])
    prove("a phase", {0: both, 1: both}, MEMBERS)
    assert "was used by [0] alone" in refused(both, NOTHING)
    assert "broadcast" in refused(both, replace(NOTHING, calls=[A]))
    assert "Float[8]" in refused(both, replace(NOTHING, calls=[A, (*B[:3], "Float[8]")]))
    message = (0, 1, "[4]")
    assert "sent" in refused(replace(NOTHING, sent=[message]), NOTHING)
    assert "sent" in refused(replace(NOTHING, sent=[message]), replace(NOTHING, received=[(0, 1, "[5]")]))
    assert "sent" in refused(NOTHING, replace(NOTHING, received=[message]))
    two = {rank: {"x": [0, 1], "y": [0, 1]} for rank in range(2)}
    x, y = ("x", 1, "allreduce", ""), ("y", 1, "allreduce", "")
    assert "opposite orders" in refused(replace(NOTHING, calls=[x, y]), replace(NOTHING, calls=[y, x]), two)


def test_the_phases_are_those_of_a_run():
    assert PHASES == ("training step", "validation", "weight export", "checkpoint")
    assert len({str(each) for each in LAYOUTS}) == 8
    assert IN_CI[0].options["overlap_p2p"]
    assert IN_CI[1].options["mtp_layers"]

"""Incident A through offbeat's mesh: a replica never waits for a leader that is not in it, or that has failed.

The weights of a replica go to its engine in buckets; each flush gathers handles at the replica's leader and ends in a
barrier. Whether the engine can load part of a model is known to the leader only. The faulty forms in plain torch are
`incident_a_flushes` and `incident_a_source` of the fault catalogue.
"""

import pytest

from offbeat_core import MismatchError, OffbeatError, PeerFailedError

BUCKET_BYTES = 64
# The third tensor is larger than a bucket.
TENSOR_BYTES = (16, 40, 200, 24)


def buckets(tensor_bytes=TENSOR_BYTES):
    """Return the bytes of each flush: tensors in order, split where they do not fit."""
    total = sum(tensor_bytes)
    return [min(BUCKET_BYTES, total - start) for start in range(0, total, BUCKET_BYTES)]


class RefusalError(RuntimeError):
    """An error of the engine."""


class Engine:
    """Stand-in for the inference engine: it answers the leader of its replica only."""

    def __init__(self, *, loads_parts=True, refuses_bucket=None):
        self.loads_parts, self.refuses_bucket = loads_parts, refuses_bucket
        self.num_questions, self.loaded = 0, []

    def can_load_parts(self):
        self.num_questions += 1
        if self.loads_parts is None:
            raise RefusalError("the engine does not answer")
        return self.loads_parts

    def load(self, bucket, handles):
        if bucket == self.refuses_bucket:
            raise RefusalError(f"bucket {bucket} does not fit")
        self.loaded.append((bucket, handles))


def update_weights(mesh, engine, *, has_vision):
    """Send all buckets to the engine of this replica; the right form."""
    replica = mesh.group_except("dp")
    in_parts = replica.decide(engine.can_load_parts) if has_vision else True
    flushes = [[bucket] for bucket in range(len(buckets()))] if in_parts else [list(range(len(buckets())))]
    for number, flush in enumerate(flushes):
        handles = replica.gather_data(f"handles of {replica.rank}", destination=0)
        with replica.together(f"flush {number}"):
            if replica.rank == 0:
                for bucket in flush:
                    engine.load(bucket, handles)
        replica.barrier()
    return len(flushes)


every_replica = pytest.mark.parametrize(
    "mesh",
    [{"dp": dp, "tp": tp} for dp in (1, 2, 4) for tp in (1, 2, 4)],
    ids=lambda axes: f"dp{axes['dp']}-tp{axes['tp']}",
    indirect=True,
)


@every_replica
def test_every_replica_takes_every_bucket_once(mesh):
    replica = mesh.group_except("dp")
    for loads_parts, has_vision in [(True, True), (False, True), (True, False)]:
        engine = Engine(loads_parts=loads_parts)
        num_flushes = update_weights(mesh, engine, has_vision=has_vision)
        assert num_flushes == (len(buckets()) if loads_parts else 1)
        if replica.rank == 0:
            assert [bucket for bucket, _ in engine.loaded] == list(range(len(buckets())))
            assert all(len(handles) == replica.size for _, handles in engine.loaded)
        # A language model is never asked about, and of a vision model only the leader's engine is.
        assert engine.num_questions == (has_vision and replica.rank == 0)


@pytest.mark.mesh(dp=2, tp=2)
@pytest.mark.mesh(dp=3, tp=2)
def test_source_0_is_the_leader_of_each_replica(mesh):
    replica = mesh.group_except("dp")
    answer = replica.broadcast_data(f"of rank {mesh.rank}" if replica.rank == 0 else None, source=0)
    assert answer == f"of rank {replica.ranks[0]}"


@pytest.mark.mesh(dp=2, tp=2)
@pytest.mark.mesh(dp=1, tp=4)
def test_a_leader_whose_question_fails_takes_its_whole_replica_along(mesh):
    replica = mesh.group_except("dp")
    fails = replica.ranks[0] == 0
    engine = Engine(loads_parts=None if fails else True)
    if not fails:
        assert update_weights(mesh, engine, has_vision=True) == len(buckets())
        return
    with pytest.raises(PeerFailedError, match="does not answer"):
        update_weights(mesh, engine, has_vision=True)


@pytest.mark.mesh(dp=2, tp=2, compare=False)
def test_a_refused_bucket_is_an_error_on_every_rank_of_the_replica(mesh):
    engine = Engine(refuses_bucket=2)
    expected = RefusalError if mesh.group_except("dp").rank == 0 else PeerFailedError
    with pytest.raises(expected, match="bucket 2 does not fit"):
        update_weights(mesh, engine, has_vision=True)


@pytest.mark.mesh(dp=2, tp=2)
def test_unequal_plans_are_refused_before_anybody_waits(mesh):
    replica = mesh.group_except("dp")
    num_flushes = len(buckets()) if replica.rank == 0 else 1
    with pytest.raises(MismatchError, match="number of flushes"):
        replica.check_equal(num_flushes, what="number of flushes")


@pytest.mark.mesh(dp=1, tp=2, compare=False)
def test_the_faulty_form_is_an_error_at_once(mesh):
    replica = mesh.group_except("dp")
    with pytest.raises(OffbeatError) as raised:  # noqa: PT012 - which call meets which is the fault itself
        for _ in range(len(buckets()) if replica.rank == 0 else 1):
            replica.gather_data("handles", destination=0)
        replica.barrier()
    assert isinstance(raised.value, MismatchError | PeerFailedError), raised.value

"""Incident A on real processes and a real HTTP server: a replica never waits for a leader that is not in it.

Ranks over gloo; one engine process for each replica, which refuses, delays or dies on demand.
"""

import pytest
import torch
from trtllm_peers import HostHandles, record_of, set_faults

from offbeat_core import DeadlineError, MismatchError, PeerFailedError, WeightSyncError
from offbeat_rollout_trtllm import EngineControl, ReplicaWeights
from offbeat_rollout_trtllm._weights import plan_flushes
from offbeat_weightsync import BucketPlan, describe_tensors

BUCKET_BYTES = 64
# The third tensor is larger than a bucket.
SIZES = {"embed.weight": 4, "layers.0.weight": 10, "layers.1.weight": 50, "norm.weight": 6}


def weights(version=1):
    return [(name, torch.full((size,), float(version + index))) for index, (name, size) in enumerate(SIZES.items())]


PLAN = BucketPlan.build(describe_tensors(weights()), BUCKET_BYTES)
FLUSHES = [sorted(PLAN.specs[index].name for index in flush) for flush in plan_flushes(PLAN, in_parts=True)]


def replica_of(mesh):
    """Index of this rank's replica."""
    return mesh.coordinates["dp"]


def build(mesh, address, folder, *, has_vision=True, plan=PLAN, call_s=10.0, deadline_s=20.0):
    control = EngineControl(address, deadline_s=call_s)
    handles = HostHandles(folder, mesh.group_except("dp").rank)
    return ReplicaWeights(mesh, plan, control, handles, has_vision=has_vision, deadline_s=deadline_s)


def set_own_faults(mesh, address, **faults):
    """Set the faults of this rank's replica, before any rank continues."""
    if mesh.group_except("dp").rank == 0:
        set_faults(address, **faults)
    mesh.group_except("dp").barrier()


def send(sync, words=""):
    """Send a version, which fails with these words if any."""
    if not words:
        assert sync.send(weights(), version=1).version == 1
        return None
    with pytest.raises(PeerFailedError, match=words) as raised:
        sync.send(weights(), version=1)
    return raised.value


every_replica = pytest.mark.parametrize(
    "mesh",
    [
        pytest.param({"dp": dp, "tp": tp}, marks=[pytest.mark.nightly] * (4 in (dp, tp)))
        for dp in (1, 2, 4)
        for tp in (1, 2, 4)
    ],
    ids=lambda axes: f"dp{axes['dp']}-tp{axes['tp']}",
    indirect=True,
)


@every_replica
def test_every_replica_takes_every_tensor_once(mesh, replicas, tmp_path):
    address = replicas[replica_of(mesh)]
    leader = mesh.group_except("dp").rank == 0
    for version, (partial, has_vision) in enumerate([(True, True), (False, True), (True, False)], start=1):
        set_own_faults(mesh, address, partial=partial)
        sync = build(mesh, address, tmp_path, has_vision=has_vision)
        for repeat in range(2):
            proof = sync.send(weights(version + repeat), version=10 * version + repeat)
            assert (proof.version, proof.num_tensors) == (10 * version + repeat, len(SIZES))
            assert len(proof.checksums) == (len(FLUSHES) if partial or not has_vision else 1)
        if leader:
            record = record_of(address)
            expected = FLUSHES if partial or not has_vision else [sorted(SIZES)]
            num_workers = mesh.group_except("dp").size
            assert record["flushes"] == [flush for flush in expected for _ in range(num_workers)] * 2
            assert record["weights"]["norm.weight"][0] == version + 1 + list(SIZES).index("norm.weight")
            # A language model is never asked about; of a vision model the leader asks once.
            assert record["num_questions"] == (1 if has_vision else 0)


@pytest.mark.mesh(dp=3, tp=2)
@pytest.mark.mesh(dp=1, cp=2, tp=2)
@pytest.mark.mesh(dp=2, pp=2)
def test_replicas_along_other_axes_and_in_other_numbers(mesh, replicas, tmp_path):
    sync = build(mesh, replicas[replica_of(mesh)], tmp_path)
    assert len(sync.send(weights(), version=1).checksums) == len(FLUSHES)
    assert sync.is_leader == (mesh.group_except("dp").rank == 0)


@pytest.mark.mesh(dp=2, tp=2, compare=False)
@pytest.mark.mesh(dp=4, tp=2, compare=False)
def test_a_question_that_fails_takes_the_whole_replica_along_and_no_other(mesh, replicas, tmp_path):
    address, fails = replicas[replica_of(mesh)], replica_of(mesh) == 1
    set_own_faults(mesh, address, partial=None if fails else True)
    send(build(mesh, address, tmp_path), "does not answer" if fails else "")


@pytest.mark.mesh(dp=2, tp=2, compare=False)
@pytest.mark.mesh(dp=1, tp=4, compare=False)
def test_a_refused_flush_is_an_error_on_every_rank_and_a_whole_update_heals_it(mesh, replicas, tmp_path):
    address = replicas[replica_of(mesh)]
    fails = replica_of(mesh) == 0
    set_own_faults(mesh, address, refuse_flush=1 if fails else None)
    sync = build(mesh, address, tmp_path)
    if not fails:
        send(sync)
        return
    taken = []
    with pytest.raises(PeerFailedError, match="flush 1 does not fit"):
        sync.send((taken.append(name) or (name, tensor) for name, tensor in weights()), version=1)
    # Whoever gathers the trainer's tensors with these ranks is not left alone.
    assert taken == list(SIZES)
    set_own_faults(mesh, address)
    assert sync.send(weights(), version=2).version == 2


@pytest.mark.mesh(dp=2, tp=2, compare=False)
def test_an_engine_that_dies_is_named_on_every_rank_of_its_replica(mesh, replicas, tmp_path):
    address, fails = replicas[replica_of(mesh)], replica_of(mesh) == 1
    set_own_faults(mesh, address, die_at_flush=1 if fails else None)
    send(build(mesh, address, tmp_path), address if fails else "")


@pytest.mark.mesh(dp=2, tp=2, compare=False)
def test_an_engine_that_does_not_answer_ends_at_the_deadline(mesh, replicas, tmp_path):
    address, fails = replicas[replica_of(mesh)], replica_of(mesh) == 0
    set_own_faults(mesh, address, delay_s=30.0 if fails else 0.2)
    words = "waited 1 s for the TensorRT-LLM server" if fails else ""
    error = send(build(mesh, address, tmp_path, call_s=1.0 if fails else 10.0), words)
    if fails and mesh.group_except("dp").rank == 0:
        assert isinstance(error.__cause__, DeadlineError)


@pytest.mark.mesh(dp=1, tp=2, compare=False)
def test_a_rank_with_other_tensors_is_named_on_all(mesh, replicas, tmp_path):
    sync = build(mesh, replicas[0], tmp_path)
    mine = weights()
    if mesh.rank == 1:
        mine[2] = (mine[2][0], mine[2][1][:-1])
    expected, text = (WeightSyncError, "planned as") if mesh.rank == 1 else (PeerFailedError, "rank 1: layers.1.weight")
    with pytest.raises(expected, match=text):
        sync.send(mine, version=1)


@pytest.mark.mesh(dp=1, tp=2, compare=False)
def test_bytes_that_changed_on_their_way_are_an_error_and_are_not_served(mesh, replicas, tmp_path):
    set_own_faults(mesh, replicas[0], spoil_flush=1)
    with pytest.raises(WeightSyncError, match=r"rank 1: .* wrong: \[1\]"):
        build(mesh, replicas[0], tmp_path).send(weights(), version=1)


@pytest.mark.mesh(dp=1, tp=2, compare=False)
def test_two_ranks_on_one_device_are_refused(mesh, replicas, tmp_path):
    control = EngineControl(replicas[0], deadline_s=10)
    sync = ReplicaWeights(mesh, PLAN, control, HostHandles(tmp_path, 0), has_vision=False, deadline_s=20)
    with pytest.raises(PeerFailedError, match="shares the device"):
        sync.send(weights(), version=1)


@pytest.mark.mesh(dp=1, tp=2, compare=False)
def test_ranks_with_different_plans_or_versions_are_told_apart_before_any_rank_waits(mesh, replicas, tmp_path):
    other = BucketPlan.build(describe_tensors(weights()), 128 if mesh.rank else BUCKET_BYTES)
    with pytest.raises(MismatchError, match="policy version and plan"):
        build(mesh, replicas[0], tmp_path, plan=other).send(weights(), version=1)


@pytest.mark.parametrize("bucket_bytes", [64, 128, 256, 1 << 20])
def test_flushes_hold_every_tensor_whole_and_once(bucket_bytes):
    plan = BucketPlan.build(describe_tensors(weights()), bucket_bytes)
    flushes = plan_flushes(plan, in_parts=True)
    assert [index for flush in flushes for index in flush] == list(range(len(SIZES)))
    assert all(flushes)
    assert plan_flushes(plan, in_parts=False) == (tuple(range(len(SIZES))),)

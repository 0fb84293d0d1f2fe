"""Incident A with a vision-language model, end to end: real ranks, an engine process for each replica, and images."""

import asyncio

import pytest
import torch
from trtllm_peers import HostHandles, record_of, set_faults
from trtllm_sight import Sight

from offbeat_core import ModelFolder, RolloutEngineConfig
from offbeat_rollout_trtllm import EngineControl, ReplicaWeights, TrtllmRolloutEngine
from offbeat_rollout_trtllm._weights import plan_flushes
from offbeat_testing import changed_weights
from offbeat_weightsync import BucketPlan, describe_tensors

BUCKET_BYTES = 1 << 14


@pytest.fixture
def seeing_replicas(request, start_engine, seeing):
    """Address of each replica's engine, which serves the vision-language model."""
    axes = request.node.get_closest_marker("mesh").kwargs
    return [start_engine(seeing, axes["tp"]).address for _ in range(axes["dp"])]


async def sampled(address, folder, request):
    config = RolloutEngineConfig(model_path=str(folder), max_model_len=256, options={"server": address})
    engine = await TrtllmRolloutEngine.create(config)
    try:
        (completion,) = await engine.generate(request)
    finally:
        await engine.close()
    return completion


@pytest.mark.timeout(170)
@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.mesh(dp=2, tp=2, deadline_s=150, compare=False)
def test_every_replica_sees_with_the_weights_that_its_own_ranks_send(mesh, seeing_replicas, seeing, tmp_path, partial):
    """The leader alone asks whether the engine loads in parts; all ranks of its replica flush as it was answered."""
    address, group = seeing_replicas[mesh.coordinates["dp"]], mesh.group_except("dp")
    leader = group.rank == 0
    sight = Sight(seeing)
    if leader:
        before = asyncio.run(sampled(address, seeing, sight.request(1)))
        assert sight.error(sight.request(1), before) < 1e-4
        set_faults(address, partial=partial)
    group.barrier()
    weights = [(name, tensor.contiguous()) for name, tensor in changed_weights(sight.model)]  # in place
    plan = BucketPlan.build(describe_tensors(weights), BUCKET_BYTES)
    sync = ReplicaWeights(
        *(mesh, plan, EngineControl(address, deadline_s=30), HostHandles(tmp_path, group.rank)),
        has_vision=ModelFolder(seeing).has_vision,
        deadline_s=60,
    )
    proof = sync.send(weights, version=1)
    num_flushes = len(plan_flushes(plan, in_parts=partial))
    assert len(proof.checksums) == num_flushes
    assert (num_flushes > 2) == partial
    if leader:
        record = record_of(address)
        assert record["num_questions"] == 1, "the leader asks once, and no other rank"
        assert len(record["flushes"]) == num_flushes * group.size
        assert any("visual" in name for flush in record["flushes"] for name in flush)
        request = sight.request(3, request_id="after")
        after = asyncio.run(sampled(address, seeing, request))
        assert after.oldest_version == 1
        assert sight.error(request, after) < 1e-4, "it does not see with what was sent"
        with torch.no_grad():
            sight.model.model.visual.patch_embed.proj.weight.mul_(-1)
        assert sight.error(request, after) > 1e-3, "the tower makes no difference"
    group.barrier()

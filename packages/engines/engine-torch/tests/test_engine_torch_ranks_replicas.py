"""Replicas of a model that is cut within each (HSDP) train as one process does."""

import re

import pytest
import torch
from test_engine_torch_ranks import assert_same, config, three_steps, weighted

from offbeat_core import ConfigError
from offbeat_engine_torch import TorchTrainEngine
from offbeat_placement import read_shape, train_memory
from offbeat_testing import tiny_model

REPLICAS = {"data_parallel_replicate_degree": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("replicas") / "qwen3", "qwen3", hidden_size=32)


@pytest.mark.parametrize(
    "mesh",
    [{"dp": 4}, {"dp": 2, "cp": 2}, pytest.param({"dp": 4, "tp": 2}, marks=pytest.mark.nightly)],
    ids=str,
    indirect=True,
)
@pytest.mark.mesh(deadline_s=100)
def test_replicas_train_as_one_process_and_stay_alike(mesh, folder, tmp_path, make_groups):
    """Loss, norm of gradients, weights, log-probabilities; moments of replicas bit for bit; a checkpoint of one."""
    settings = config(folder, options=REPLICAS)
    many, one = TorchTrainEngine.create(settings, mesh), TorchTrainEngine.create(config(folder))
    wanted = three_steps(one, make_groups, weighted)
    assert_same(three_steps(many, make_groups, weighted), wanted)
    parts = many._ranks.replicas.group("dp", "cp").size
    assert parts == mesh.size // mesh.axes["tp"] // 2
    sizes = {name: tuple(each.shape) for name, each in many._optimizer.parameters.items()}
    assert sizes["model.embed_tokens.weight"][0] == -(-320 // parts // mesh.axes["tp"])
    others = many._ranks.replicas.group("pp")
    for name in many._optimizer.parameters:
        for moment in many._optimizer.state_of(name).values():
            first, second = others.all_gather(moment.contiguous())
            assert torch.equal(first, second), name
    shared = tmp_path.parent / "saved-by-replicas"
    many.save(shared)
    whole = TorchTrainEngine.create(config(folder), mesh)  # one model over all ranks
    resumed = TorchTrainEngine.create(settings, mesh)
    for engine in (whole, resumed, one):
        engine.load(shared)
    after = [three_steps(engine, make_groups, weighted) for engine in (one, whole, resumed, many)]
    for found in after[1:]:
        assert_same(found, after[0])
    assert after[2][0] == after[3][0], "resumed on the same layout bit for bit"


@pytest.mark.mesh(dp=4)
@pytest.mark.parametrize(
    "options",
    [
        {"reduce_once": "on"},
        {"optimizer": "muon"},
        {"moments_dtype": "int8", "offload_optimizer": True},
    ],
    ids=str,
)
def test_replicas_work_with_other_options(options, mesh, folder, make_groups):
    """As one model over all ranks does."""
    cut, replicated = (
        three_steps(TorchTrainEngine.create(config(folder, options=options | more), mesh), make_groups, weighted)
        for more in ({}, REPLICAS)
    )
    assert_same(replicated, cut, 1e-4 if "muon" in str(options) else 1e-5)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11 turns bytes to bfloat16: see check_nf4_over_ranks")
@pytest.mark.mesh(dp=4)
def test_gradients_are_added_up_in_bfloat16_over_replicas_too(mesh, folder, make_groups):
    options = {"reduce_dtype": "bfloat16", "lora_base_dtype": "nf4"}
    settings = config(folder, dtype="bfloat16", lora_rank=4, options=options | REPLICAS)
    found = three_steps(TorchTrainEngine.create(settings, mesh), make_groups, weighted)
    cut = config(folder, dtype="bfloat16", lora_rank=4, options=options)
    assert_same(found, three_steps(TorchTrainEngine.create(cut, mesh), make_groups, weighted), 2e-2)


@pytest.mark.parametrize(("degree", "num_ranks"), [(2, 3), (4, 4), (2, 2)])
def test_replicas_that_ranks_do_not_make_up_are_refused(degree, num_ranks, folder):
    options = {"data_parallel_replicate_degree": degree}
    with pytest.raises(ConfigError, match=re.escape(f"replicate_degree = {degree} must divide")):
        TorchTrainEngine.plan(config(folder, options=options), num_ranks)


def test_the_plan_counts_the_part_of_a_replica(folder):
    shape = read_shape(str(folder))
    parts = {
        (degree, num_ranks): train_memory(
            settings := config(folder, options={"data_parallel_replicate_degree": degree}),
            TorchTrainEngine.plan(settings, num_ranks),
            shape,
            on_cpu=True,
        )
        .estimate(shape)
        .parts
        for degree, num_ranks in ((1, 4), (2, 8), (1, 8))
    }
    assert parts[2, 8] == parts[1, 4] != parts[1, 8]

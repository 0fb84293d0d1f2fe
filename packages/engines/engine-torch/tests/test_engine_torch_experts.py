"""Ranks that hold the experts between them train as one process does."""

import pytest
from expert_models import MODELS, write_experts
from test_engine_torch_ranks import assert_same, config, name_run, three_steps, weighted

from offbeat_engine_torch import TorchTrainEngine


@pytest.fixture(scope="module")
def model(request, tmp_path_factory):
    return write_experts(tmp_path_factory.mktemp("experts") / request.param, request.param)


@pytest.fixture(scope="module")
def of_one_process(model, make_groups):
    return three_steps(TorchTrainEngine.create(config(model)), make_groups, weighted)


EP_2, EP_4, EP_2_EDP_2 = {"dp": 2, "ep": 2}, {"dp": 4, "ep": 4}, {"dp": 4, "ep": 2}
OFTEN = ["qwen3_moe", "qwen3_5_moe_text", "minimax_m2", "gpt_oss"]
RUNS = [
    *(pytest.param(family, EP_2, marks=[] if family in OFTEN else pytest.mark.nightly) for family in MODELS),
    ("qwen3_moe", EP_4),
    ("deepseek_v3", EP_2_EDP_2),
    pytest.param("gpt_oss", EP_2_EDP_2, marks=pytest.mark.nightly),
    ("qwen3_moe", {"dp": 2, "cp": 2, "ep": 2}),
    pytest.param("qwen3_moe", {"cp": 2, "ep": 2}, marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("model", "mesh"), RUNS, ids=name_run, indirect=True)
def test_ranks_that_share_experts_train_as_one_process(model, of_one_process, mesh, make_groups):
    engine = TorchTrainEngine.create(config(model), mesh)
    assert_same(three_steps(engine, make_groups, weighted), of_one_process)

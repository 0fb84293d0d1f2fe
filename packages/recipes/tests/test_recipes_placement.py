"""What a run wants meets the nodes that words name."""

from offbeat_placement import (
    ClusterView,
    MemoryEstimate,
    RankGroup,
    ResourceRequest,
    read_shape,
    train_memory,
)
from offbeat_recipes import RunMemory, layout_elsewhere
from offbeat_testing import large_model_configs
from offbeat_types import TrainEngineConfig, TrainEngineSettings, TrainLayout


def test_memory_is_told_with_what_the_device_has(tmp_path):
    nodes = tmp_path / "nodes.toml"
    nodes.write_text('[[nodes]]\nname = "small"\naccelerators = 8\naccelerator_memory_gib = 16\n')
    request = ResourceRequest(groups=(RankGroup(role="trainer", num_replicas=8),))
    placement = request.place(ClusterView.named(str(nodes), ["cuda"]))
    shape = read_shape(str(large_model_configs(tmp_path) / "Qwen3-8B"))
    memory = train_memory(TrainEngineSettings(), TrainLayout(dp=8, zero_stage=3), shape, on_cpu=False)
    found = RunMemory(shape, {"trainer": memory.estimate(shape)}, {"trainer": "take more ranks"})
    assert found.rows(placement)[1][1].endswith("(of 16 GiB, 787%)")
    [notice] = found.notices(placement)
    assert notice.startswith("a trainer rank needs about 126 GiB and its device has 16 GiB: take more ranks")


def test_roles_that_take_turns_are_not_added_up_and_a_teacher_is(tmp_path):
    shape = read_shape(str(large_model_configs(tmp_path) / "Qwen3-8B"))
    nodes = tmp_path / "nodes.toml"
    nodes.write_text('[[nodes]]\nname = "n"\naccelerators = 8\naccelerator_memory_gib = 80\n')
    groups = (
        RankGroup(role="trainer", num_replicas=8),
        RankGroup(role="rollout", num_replicas=8, shares_devices_with="trainer"),
        RankGroup(role="teacher", num_replicas=8, shares_devices_with="rollout"),
    )
    gib = 2**30
    roles = {"trainer": MemoryEstimate({"weights": 60 * gib}), "rollout": MemoryEstimate({"weights": 48 * gib})}
    advice = dict.fromkeys(("trainer", "rollout", "teacher"), "less")
    placement = ResourceRequest(groups=groups[:2]).place(ClusterView.named(str(nodes), ["cuda"]))
    assert RunMemory(shape, roles, advice).notices(placement) == []
    placement = ResourceRequest(groups=groups).place(ClusterView.named(str(nodes), ["cuda"]))
    taught = {**roles, "teacher": MemoryEstimate({"weights": 40 * gib})}
    [notice] = RunMemory(shape, taught, advice).notices(placement)
    assert notice == "a rollout rank needs about 88 GiB and its device has 80 GiB: less"


def test_a_layout_needs_no_weights(tmp_path):
    whole = large_model_configs(tmp_path) / "Qwen3-8B"
    (whole / "model.safetensors").unlink()
    found = layout_elsewhere(TrainEngineConfig(model_path=str(whole)), "torch", 8)
    assert found is not None
    assert found.dp == 8


def test_a_backend_that_is_not_here_is_not_asked():
    config = TrainEngineConfig(model_path="nowhere")
    assert layout_elsewhere(config, "no-such-engine", 8) is None
    assert layout_elsewhere(config, "torch", 8) is None, "nor one whose model is not here"

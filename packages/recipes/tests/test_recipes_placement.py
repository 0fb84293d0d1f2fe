"""What a run wants meets the nodes that words name."""

from pathlib import Path

import pytest

from offbeat_placement import MemoryEstimate, RankGroup
from offbeat_recipes import RunMemory, Site, Wanted, fit_settings, layout_elsewhere, read_shape, train_memory
from offbeat_testing import large_model_configs
from offbeat_types import PlacementError, TrainEngineConfig, TrainEngineSettings, TrainLayout


@pytest.mark.parametrize(("device", "kind"), [("cuda", "GPU"), ("xpu:3", "XPU"), ("auto", "GPU"), ("cpu", "GPU")])
def test_the_recipe_tells_the_kind_of_accelerator_where_nobody_says_it(device: str, kind: str) -> None:
    site = Site.named("2x4", [device])
    assert [dict(node.free) for node in site.nodes] == [{kind: (0, 1, 2, 3)}] * 2
    assert site.kind(device) == ("" if device == "cpu" else kind)


def test_nothing_is_given_out_where_nothing_is_reserved() -> None:
    assert Site(nodes=Site.named("1x8", []).nodes, reserves=False).kind("cuda") == ""


def test_memory_is_told_with_what_the_device_has(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes.toml"
    nodes.write_text('[[nodes]]\nname = "small"\naccelerators = 8\naccelerator_memory_gib = 16\n')
    placement = Wanted(groups=(RankGroup(role="trainer", num_replicas=8),)).place(Site.named(str(nodes), ["cuda"]))
    shape = read_shape(str(large_model_configs(tmp_path) / "Qwen3-8B"))
    memory = train_memory(TrainEngineSettings(), TrainLayout(dp=8, zero_stage=3), shape)
    found = RunMemory(shape, {"trainer": memory.estimate(shape)}, {"trainer": "take more ranks"})
    assert found.rows(placement)[1][1].endswith("(of 16 GiB, 780%)")
    [notice] = found.notices(placement)
    assert notice.startswith("a trainer rank needs about 125 GiB and its device has 16 GiB: take more ranks")


def test_roles_that_take_turns_are_not_added_up_and_a_teacher_is(tmp_path: Path) -> None:
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
    placement = Wanted(groups=groups[:2]).place(Site.named(str(nodes), ["cuda"]))
    assert RunMemory(shape, roles, advice).notices(placement) == []
    placement = Wanted(groups=groups).place(Site.named(str(nodes), ["cuda"]))
    taught = {**roles, "teacher": MemoryEstimate({"weights": 40 * gib})}
    [notice] = RunMemory(shape, taught, advice).notices(placement)
    assert notice == "a rollout rank needs about 88 GiB and its device has 80 GiB: less"


def test_a_layout_needs_no_weights(tmp_path: Path) -> None:
    whole = large_model_configs(tmp_path) / "Qwen3-8B"
    (whole / "model.safetensors").unlink()
    found = layout_elsewhere(TrainEngineConfig(model_path=str(whole)), "torch", 8)
    assert found is not None
    assert found.dp == 8


def test_a_backend_that_is_not_here_is_not_asked() -> None:
    config = TrainEngineConfig(model_path="nowhere")
    assert layout_elsewhere(config, "no-such-engine", 8) is None
    assert layout_elsewhere(config, "torch", 8) is None, "nor one whose model is not here"


def test_what_no_setting_can_change_is_refused_with_the_reason() -> None:
    group = RankGroup(role="trainer", tensor_parallel=8, width_multiple=8, keys={"tensor_parallel": "engine.num_ranks"})
    with pytest.raises(PlacementError, match="8 GPU on one node"):
        fit_settings(TrainLayout(), Site.named("4x4", ["cuda"]), lambda _: Wanted(groups=(group,)))

"""What a run wants meets the nodes that words name."""

from dataclasses import replace

from offbeat_core import TrainEngineConfig, TrainEngineSettings, TrainLayout
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


def test_memory_is_told_with_what_the_device_has(tmp_path):
    nodes = tmp_path / "nodes.toml"
    nodes.write_text('[[nodes]]\nname = "small"\naccelerators = 8\naccelerator_memory_gib = 16\n')
    request = ResourceRequest(groups=(RankGroup(role="trainer", num_replicas=8),))
    placement = request.place(ClusterView.named(str(nodes), ["cuda"]))
    shape = read_shape(str(large_model_configs(tmp_path) / "Qwen3-8B"))
    memory = train_memory(TrainEngineSettings(), TrainLayout(dp=8, zero_stage=3), shape, on_cpu=False)
    found = RunMemory(shape, {"trainer": memory.estimate(shape)}, {"trainer": "take more ranks"})
    assert found.rows(placement)[1][1].endswith("(of 16 GiB, 880%)")
    [notice] = found.notices(placement)
    assert notice.startswith("a trainer rank needs about 141 GiB and its device has 16 GiB: take more ranks")


def test_main_memory_is_told_of_each_node_on_which_something_waits(tmp_path):
    """Three ranks on one node and one on the other, where an engine computes on processors too."""
    nodes = tmp_path / "nodes.toml"
    nodes.write_text(
        '[[nodes]]\nname = "a"\naccelerators = 3\nmemory_gib = 100\n[[nodes]]\nname = "b"\naccelerators = 1\n'
    )
    groups = (RankGroup(role="trainer", num_replicas=4), RankGroup(role="rollout", accelerator=""))
    placement = ResourceRequest(groups=groups).place(ClusterView.named(str(nodes), ["cuda"]))
    assert {rank.node for rank in placement.plan.ranks if rank.role == "rollout"} == {"a"}
    shape = read_shape(str(large_model_configs(tmp_path) / "Qwen3-8B"))

    def memory(**main_gib):
        main = {name.replace("_", " "): size * 2**30 for name, size in main_gib.items()}
        trainer, rollout = MemoryEstimate({"weights": 2**30}, main), MemoryEstimate({"weights": 7 * 2**30})
        advice = dict.fromkeys(("trainer", "rollout"), "")
        return RunMemory(shape, {"trainer": trainer, "rollout": rollout}, advice)

    fits = memory(optimizer=30, inputs_of_layers=1)
    assert fits.rows(placement)[1][1].endswith("; in main memory optimizer 30 GiB + inputs of layers 1 GiB")
    rows = [text for what, text in fits.rows(placement) if what == "main memory"]
    assert rows == ["a: 100 GiB (of 100 GiB, 100%)", "b: 31 GiB"]
    assert fits.notices(placement) == []
    assert memory(parked=32).notices(placement) == [
        "a: 103 GiB of main memory needed and 100 GiB free: cluster.colocate = false, or fewer ranks on a node"
    ]
    [notice] = memory(optimizer=30, inputs_of_layers=2).notices(placement)
    changed = "engine.options.offload_optimizer = false, or engine.options.offload_activations = false, or fewer ranks"
    assert changed in notice
    assert all(what != "main memory" for what, _ in memory().rows(placement)), "no rank offloads, so none is counted"
    assert memory().notices(placement) == []


def test_roles_that_take_turns_are_not_added_up_and_a_teacher_is_added_to_each(tmp_path):
    shape = read_shape(str(large_model_configs(tmp_path) / "Qwen3-8B"))
    nodes = tmp_path / "nodes.toml"
    nodes.write_text('[[nodes]]\nname = "n"\naccelerators = 8\naccelerator_memory_gib = 80\n')
    keys = {"shares_devices_with": "teacher.colocate"}
    groups = (
        RankGroup(role="trainer", num_replicas=8),
        RankGroup(role="rollout", num_replicas=4, shares_devices_with="trainer"),
        RankGroup(role="teacher", num_replicas=8, shares_devices_with="rollout", keys=keys),
    )

    def notices(*groups, **gib):
        memory = RunMemory(shape, {role: MemoryEstimate({"weights": of * 2**30}) for role, of in gib.items()}, advice)
        return memory.notices(ResourceRequest(groups=groups).place(ClusterView.named(str(nodes), ["cuda"])))

    advice = {role: f"less of the {role}" for role in ("trainer", "rollout", "teacher")}
    assert notices(*groups[:2], trainer=60, rollout=48) == []
    assert notices(*groups, trainer=40, rollout=48, teacher=20) == []
    text = "a {0} rank needs about {1} GiB with the teacher rank beside it and its device has 80 GiB: less of the {0}"
    # Half of the teachers are where the trainer is and no engine.
    assert notices(*groups, trainer=60, rollout=20, teacher=30) == [
        text.format("trainer", 90) + ", or teacher.colocate = false"
    ]
    assert notices(*groups, trainer=20, rollout=60, teacher=40) == [
        text.format("rollout", 100) + ", or teacher.colocate = false"
    ]
    # And half of the engines have none beside them.
    few = (groups[0], replace(groups[1], num_replicas=8), replace(groups[2], num_replicas=4))
    assert notices(*few, trainer=20, rollout=60, teacher=40) == [
        text.format("rollout", 100) + ", or teacher.colocate = false"
    ]
    [alone] = notices(*groups, trainer=90, rollout=20, teacher=30)
    assert alone == "a trainer rank needs about 90 GiB and its device has 80 GiB: less of the trainer"


def test_a_role_that_takes_a_share_of_its_device_is_held_to_it(tmp_path):
    nodes = tmp_path / "nodes.toml"
    nodes.write_text('[[nodes]]\nname = "n"\naccelerators = 8\naccelerator_memory_gib = 80\n')
    request = ResourceRequest(groups=(RankGroup(role="rollout", num_replicas=8),))
    placement = request.place(ClusterView.named(str(nodes), ["cuda"]))
    shape = read_shape(str(large_model_configs(tmp_path) / "Qwen3-8B"))

    def notices(limit_gib):
        roles, advice = {"rollout": MemoryEstimate({"weights": 50 * 2**30})}, {"rollout": "a larger share"}
        return RunMemory(shape, roles, advice, {"rollout": limit_gib * 2**30}).notices(placement)

    assert notices(50) == notices(0) == [], "0: all of it"
    assert notices(40) == [
        "a rollout rank needs about 50 GiB and may take 40 GiB of the 80 GiB of its device: a larger share"
    ]


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

"""Safetensors by boxes."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from offbeat_core import ModelError, TensorSpec, describe_damage, sync_path
from offbeat_device import open_device
from offbeat_testing import DiskRecord
from offbeat_training import (
    MOMENTS,
    CutTensor,
    FileWriter,
    TensorFolder,
    TrainerState,
    describe_part,
    find_damage,
    num_elements,
    overlap,
    plan_files,
    random_state,
    slices,
    spec_of,
    whole_box,
    write_files,
    write_model_index,
    write_state,
)


@settings(max_examples=60)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12), ranks=st.integers(1, 4), limit=st.integers(1, 40))
def test_planned_files_hold_every_tensor_once_in_the_order_of_the_stream(sizes, ranks, limit):
    units = [[TensorSpec(str(number), "float32", (size,))] for number, size in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offbeat_training._tensor_files.MAX_FILE_BYTES", 4 * limit)
        files = plan_files("model", units, ranks)
    assert [spec.name for file in files for spec in file.specs] == [str(number) for number in range(len(sizes))]
    assert all(file.specs for file in files)
    written = Counter(dict.fromkeys(range(ranks), 0))
    written.update(file.writer for file in files)
    assert set(written) == set(range(ranks))
    assert max(written.values()) - min(written.values()) <= 1, "all ranks write"


def test_what_ranks_have_written_in_parts_is_read_by_other_boxes(tmp_path):
    """Moments cut by rows, read by columns; a parameter that never had a gradient has none."""
    values = {name: torch.randn(4, 6) for name in MOMENTS}
    boxes = [((0, 3), (0, 6)), ((3, 4), (0, 6))]
    device = open_device("cpu")
    (tmp_path / "trainer").mkdir()
    for number, box in enumerate(boxes):
        held = {f"{name}.a": each[slices(box)].contiguous() for name, each in values.items()}
        save_file(held | random_state(device), tmp_path / "trainer" / f"optimizer-{number}.safetensors")
    parts = {f"optimizer-{number}.safetensors": {"a": describe_part(7.0, box)} for number, box in enumerate(boxes)}
    write_state(tmp_path, 7, 1, parts)
    with TrainerState(tmp_path) as state:
        state.check({"a": (4, 6), "b": (2,)})
        assert (state.steps_taken, state.steps_refused, state.step("a"), state.step("b")) == (7, 1, 7.0, None)
        for name, each in values.items():
            assert torch.equal(state.moments.read(f"{name}.a", ((0, 4), (2, 5))), each[:, 2:5])
            assert state.moments.read(f"{name}.a", ((4, 4), (0, 6))).shape == (0, 6)
        for shapes, message in (({"b": (2,)}, "knows a"), ({"a": (4, 5)}, "must have shape"), ({"a": (5, 6)}, "cover")):
            with pytest.raises(ModelError, match=message):
                state.check(shapes)
    (tmp_path / "trainer" / "optimizer-1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"optimizer-1\.safetensors is missing"), TrainerState(tmp_path):
        pass


def test_each_rank_goes_on_with_its_own_random_state_and_other_numbers_of_ranks_with_the_firsts(tmp_path):
    device, drawn = open_device("cpu"), []
    (tmp_path / "trainer").mkdir()
    for number in range(2):
        torch.manual_seed(number)
        save_file(random_state(device), tmp_path / "trainer" / f"optimizer-{number}.safetensors")
        drawn.append(torch.rand(3))
    write_state(tmp_path, 7, 1, {f"optimizer-{number}.safetensors": {} for number in range(2)})
    with TrainerState(tmp_path) as state:
        for rank, num_ranks, wanted in ((0, 2, 0), (1, 2, 1), (0, 1, 0), (3, 4, 0)):
            state.restore_random_state(device, rank, num_ranks)
            assert torch.equal(torch.rand(3), drawn[wanted]), (rank, num_ranks)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 3}, "formats 1 to 2 are read, got 3"),
        ({"format": None}, "formats 1 to 2 are read, got None"),
        ({"steps_refused": ...}, "is not what `save` writes"),
        ({"parts": ...}, "is not what `save` writes"),
    ],
)
def test_a_state_that_was_not_written_so_is_refused(tmp_path, change, words):
    (tmp_path / "trainer").mkdir()
    write_state(tmp_path, 7, 1, {})
    file = tmp_path / "trainer" / "engine.json"
    state = {**json.loads(file.read_text()), **change}
    file.write_text(json.dumps({name: value for name, value in state.items() if value is not ...}))
    with pytest.raises(ModelError, match=words):
        TrainerState(tmp_path)
    file.write_text('{"format": 2, "steps')
    with pytest.raises(ModelError, match="is not a checkpoint that `save` finished"):
        TrainerState(tmp_path)


def test_a_file_takes_the_tensors_that_were_planned_in_their_order(tmp_path):
    tensors = {"a": torch.zeros(2), "b": torch.ones(3)}
    files = plan_files("model", [[TensorSpec(name, "float32", tuple(each.shape)) for name, each in tensors.items()]], 1)
    for wrong in ({"b": tensors["b"], "a": tensors["a"]}, {"a": torch.zeros(3), "b": tensors["b"]}):
        with pytest.raises(AssertionError):
            write_files(tmp_path, files, wrong.items())


def test_files_are_what_transformers_calls_a_model_in_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr("offbeat_training._tensor_files.MAX_FILE_BYTES", 64)
    tensors = {str(number): torch.full((3, 4), float(number)) for number in range(3)}
    files = plan_files("model", [[TensorSpec(name, "float32", (3, 4))] for name in tensors], 1)
    write_files(tmp_path, files, tensors.items())
    write_model_index(tmp_path, files)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert index == {spec.name: file.name for file in files for spec in file.specs}
    assert len(files) > 1
    with TensorFolder(tmp_path) as found:
        assert all(torch.equal(found.read(name, ()), tensor) for name, tensor in tensors.items())


def test_of_two_models_in_a_folder_the_index_decides(tmp_path):
    for number in (1, 2, 4):
        save_file({"a": torch.full((2,), float(number))}, tmp_path / f"model-00001-of-{number:05}.safetensors")
    with pytest.raises(ModelError, match=r"holds a twice, in model-00001-of-00001.* and in .*two models"):
        TensorFolder(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    with TensorFolder(tmp_path) as found:
        assert found.read("a", ()).tolist() == [2.0, 2.0]
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00003.safetensors"}}))
    with pytest.raises(ModelError, match=r"model-00001-of-00003\.safetensors is missing"):
        TensorFolder(tmp_path)
    index.write_text("{}")
    with pytest.raises(ModelError, match="names no files in weight_map"):
        TensorFolder(tmp_path)


def test_the_bytes_of_a_file_are_on_the_disk_when_its_rank_has_written_it(tmp_path):
    """Another rank gives it its name, perhaps on another machine, which forces none of them onto the disk."""
    tensors = {str(number): torch.full((3, 4), float(number)) for number in range(3)}
    files = plan_files("model", [[TensorSpec(name, "float32", (3, 4))] for name in tensors], 1)
    with DiskRecord(tmp_path) as disk:
        write_files(tmp_path, files, tensors.items())
        sync_path(tmp_path)
        assert disk.unsynced() == []


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    dp=st.integers(1, 5),
    tp=st.sampled_from([(1, None), (2, None), (2, 0), (2, 1)]),
)
def test_boxes_of_all_places_cover_a_tensor_once(shape, dp, tp):
    tp_size, tp_dim = tp
    if tp_dim is not None:
        tp_dim = min(tp_dim, len(shape) - 1)
        shape[tp_dim] *= tp_size
    seen = np.zeros(shape, int)
    places = [(i, j) for i in range(dp) for j in range(tp_size if tp_dim is not None else 1)]
    tensor = CutTensor(name="", shape=tuple(shape), tp_dim=tp_dim)
    boxes = [tensor.box_at(dp=(i, dp), tp=(j, tp_size)) for i, j in places]
    for box in boxes:
        seen[slices(box)] += 1
    assert np.all(seen == 1)
    assert sum(num_elements(overlap(boxes[0], box)) for box in boxes[1:]) == 0


def test_ranks_compare_each_file_of_a_checkpoint_once_with_what_was_written(tmp_path, monkeypatch):
    tensors = {f"layer.{number}": torch.full((4,), float(number)) for number in range(3)}
    (tmp_path / "trainer").mkdir()
    for name, tensor in tensors.items():
        for folder in (tmp_path, tmp_path / "trainer"):
            with FileWriter(folder / f"{name}.safetensors", [spec_of(name, tensor)]) as writer:
                writer.add(name, tensor)
    write_state(tmp_path, 1, 0, {})
    compared = []

    def compare(path, written):
        compared.append(str(path.relative_to(tmp_path)))
        return describe_damage(path, written)

    monkeypatch.setattr("offbeat_training._trainer_state.describe_damage", compare)
    assert [find_damage(tmp_path, rank, 3) for rank in range(3)] == ["", "", ""]
    names = [f"layer.{number}.safetensors" for number in range(3)]
    assert sorted(compared) == sorted([*names, *(f"trainer/{name}" for name in names), "trainer/engine.json"])
    weights = tmp_path / "layer.1.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    [damage] = filter(None, (find_damage(tmp_path, rank, 3) for rank in range(3)))
    assert damage.startswith(f"{tmp_path} is damaged: layer.1.safetensors has the digest ")


def test_weights_of_single_experts_are_read_as_rows_of_their_stacks(tmp_path):
    gate, up, down = (torch.randn(4, *shape) for shape in ((3, 5), (3, 5), (5, 3)))
    layer, names = "model.layers.0.mlp.experts", {"gate_proj": gate, "up_proj": up, "down_proj": down}
    single = {f"{layer}.{i}.{name}.weight": stack[i].clone() for name, stack in names.items() for i in range(4)}
    save_file(single, tmp_path / "model.safetensors")
    stacks = {f"{layer}.gate_up_proj": torch.cat([gate, up], 1), f"{layer}.down_proj": down}
    with TensorFolder(tmp_path) as found:
        assert found.names == set(single)
        found.stack_experts()
        assert found.names == {*single, *stacks}
        for name, stack in stacks.items():
            assert found.shape(name) == tuple(stack.shape)
            for box in (((0, 4), *whole_box(stack.shape[1:])), ((1, 3), (2, 5), (1, 3)), ((2, 2), (0, 3), (0, 3))):
                assert torch.equal(found.read(name, box), stack[slices(box)])
    del single[f"{layer}.2.up_proj.weight"]
    save_file(single, tmp_path / "model.safetensors")
    with TensorFolder(tmp_path) as found:
        found.stack_experts()
        assert found.names == {*single, f"{layer}.down_proj"}, "one expert lacks a part of a stack"


def test_transformers_stacks_experts_as_they_are_read():
    from transformers.conversion_mapping import _build_checkpoint_conversion_mapping

    halves, steps = ["*.gate_proj.weight", "*.up_proj.weight"], [("MergeModulelist", 0), ("Concatenate", 1)]
    found = [
        [(type(step).__name__, step.dim) for step in each.operations]
        for conversions in _build_checkpoint_conversion_mapping().values()
        for each in conversions
        if [source.rpartition("experts.")[2] for source in each.source_patterns] == halves
        if [target.rpartition(".")[2] for target in each.target_patterns] == ["gate_up_proj"]
    ]
    assert len(found) > 2
    assert found == [steps] * len(found)

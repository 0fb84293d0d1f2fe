"""Files of a model folder: any reader of safetensors reads them, and no tensor is taken from the wrong one."""

import json
from pathlib import Path

import numpy as np
import pytest

from offbeat_types import MODEL_FILE, MODEL_INDEX_FILE, ModelError, drop_model_files, find_tensors, tensor_file_header

ONE, OTHER = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def write_index(folder: Path, **files: str) -> None:
    (folder / MODEL_INDEX_FILE).write_text(json.dumps({"weight_map": files}))


def test_a_header_says_where_each_tensor_lies() -> None:
    header = tensor_file_header([("a", "float32", (2, 3)), ("b", "bfloat16", (5,)), ("c", "uint8", (0,))])
    assert len(header) % 64 == 0
    assert int.from_bytes(header[:8], "little") == len(header) - 8
    told = json.loads(header[8:])
    assert told.pop("__metadata__") == {"format": "pt"}
    assert told == {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [5], "data_offsets": [24, 34]},
        "c": {"dtype": "U8", "shape": [0], "data_offsets": [34, 34]},
    }


def test_the_library_reads_what_begins_so(tmp_path: Path) -> None:
    numpy_of = pytest.importorskip("safetensors.numpy")
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    (tmp_path / MODEL_FILE).write_bytes(tensor_file_header([("a", "float32", (2, 3))]) + values.tobytes())
    assert np.array_equal(numpy_of.load_file(tmp_path / MODEL_FILE)["a"], values)


def test_the_index_decides_and_is_not_asked_beside_the_single_file(tmp_path: Path) -> None:
    assert find_tensors(tmp_path, {ONE: ["a"], OTHER: ["b"]}) == {"a": ONE, "b": OTHER}
    with pytest.raises(ModelError, match=f"holds a twice, in {ONE} and in {OTHER}"):
        find_tensors(tmp_path, {ONE: ["a"], OTHER: ["a"]})
    write_index(tmp_path, a=OTHER)
    assert find_tensors(tmp_path, {ONE: ["a"], OTHER: ["a", "b"]}) == {"a": OTHER, "b": OTHER}
    assert find_tensors(tmp_path, {MODEL_FILE: ["a"]}) == {"a": MODEL_FILE}
    with pytest.raises(ModelError, match=f"is not whole: {OTHER} is missing"):
        find_tensors(tmp_path, {ONE: ["a"]})
    (tmp_path / MODEL_INDEX_FILE).write_text("[")
    with pytest.raises(ModelError, match="cannot be read"):
        find_tensors(tmp_path, {ONE: ["a"]})


def test_weights_are_dropped_under_all_their_names_and_nothing_else(tmp_path: Path) -> None:
    for name in (MODEL_FILE, ONE, MODEL_INDEX_FILE, "mtp.safetensors", "config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("")
    drop_model_files(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_model.safetensors", "config.json"]

"""Files of a model folder: any reader of safetensors reads them, and no tensor is taken from the wrong one."""

import json
import os

import numpy as np
import pytest

from offbeat_core import (
    MODEL_FILE,
    MODEL_INDEX_FILE,
    ModelError,
    TensorSpec,
    copy_tokenizer,
    drop_model_files,
    find_tensors,
    list_model_files,
    read_eos_ids,
    read_model_json,
    read_tensor_shapes,
    sync_path,
    sync_tree,
    tensor_file_header,
    tensor_file_index,
)
from offbeat_testing import DiskRecord

ONE, OTHER = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def write_index(folder, **files):
    (folder / MODEL_INDEX_FILE).write_text(json.dumps({"weight_map": files}))


def test_a_header_says_where_each_tensor_lies():
    header = tensor_file_header(
        [TensorSpec("a", "float32", (2, 3)), TensorSpec("b", "bfloat16", (5,)), TensorSpec("c", "uint8", (0,))]
    )
    assert len(header) % 64 == 0
    assert int.from_bytes(header[:8], "little") == len(header) - 8
    found = json.loads(header[8:])
    assert found.pop("__metadata__") == {"format": "pt"}
    assert found == {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [5], "data_offsets": [24, 34]},
        "c": {"dtype": "U8", "shape": [0], "data_offsets": [34, 34]},
    }


def test_an_index_says_which_file_holds_what_and_how_much_there_is():
    index = tensor_file_index({ONE: [TensorSpec("a", "float32", (2,))], OTHER: [TensorSpec("b", "bfloat16", (5,))]})
    assert json.loads(index) == {"metadata": {"total_size": 18}, "weight_map": {"a": ONE, "b": OTHER}}


def test_the_library_reads_what_begins_so(tmp_path):
    numpy_of = pytest.importorskip("safetensors.numpy")
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    (tmp_path / MODEL_FILE).write_bytes(tensor_file_header([TensorSpec("a", "float32", (2, 3))]) + values.tobytes())
    assert np.array_equal(numpy_of.load_file(tmp_path / MODEL_FILE)["a"], values)


def test_the_index_decides_and_is_not_asked_beside_the_single_file(tmp_path):
    assert find_tensors(tmp_path, {ONE: ["a"], OTHER: ["b"]}) == {"a": ONE, "b": OTHER}
    with pytest.raises(ModelError, match=f"holds a twice, in {ONE} and in {OTHER}"):
        find_tensors(tmp_path, {ONE: ["a"], OTHER: ["a"]})
    write_index(tmp_path, a=OTHER)
    assert find_tensors(tmp_path, {ONE: ["a"], OTHER: ["a", "b"]}) == {"a": OTHER, "b": OTHER}
    assert find_tensors(tmp_path, {MODEL_FILE: ["a"]}) == {"a": MODEL_FILE}
    with pytest.raises(ModelError, match=f"is not whole: {OTHER} is missing"):
        find_tensors(tmp_path, {ONE: ["a"]})
    (tmp_path / MODEL_INDEX_FILE).write_text("[")
    with pytest.raises(ModelError, match="is not valid JSON"):
        find_tensors(tmp_path, {ONE: ["a"]})


def test_weights_are_dropped_under_all_their_names_and_nothing_else(tmp_path):
    for name in (MODEL_FILE, ONE, MODEL_INDEX_FILE, "mtp.safetensors", "config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("")
    drop_model_files(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_model.safetensors", "config.json"]


def test_a_tokenizer_is_copied_with_all_it_needs_and_nothing_else(tmp_path):
    source, folder = tmp_path / "source", tmp_path / "folder"
    source.mkdir()
    folder.mkdir()
    wanted = {"chat_template.jinja", "merges.txt", "preprocessor_config.json", "tokenizer.json", "vocab.json"}
    for name in {*wanted, "config.json", MODEL_FILE}:
        (source / name).write_text(name)
    copy_tokenizer(source, folder)
    assert {path.name: path.read_text() for path in folder.iterdir()} == {name: name for name in wanted}


def test_shapes_are_those_of_the_header_of_a_whole_file(tmp_path):
    path = tmp_path / MODEL_FILE
    whole = tensor_file_header([TensorSpec("a", "float32", (2, 3)), TensorSpec("b", "uint8", ())]) + bytes(25)
    path.write_bytes(whole)
    assert read_tensor_shapes(path) == {"a": (2, 3), "b": ()}
    for damaged in (whole[:-1], whole + b" ", whole[:40], b"", b"\xff" * 64, (2).to_bytes(8, "little") + b"[]"):
        path.write_bytes(damaged)
        with pytest.raises(ModelError, match=r"model\.safetensors is not a whole safetensors file"):
            read_tensor_shapes(path)
    path.unlink()
    with pytest.raises(ModelError, match="No such file"):
        read_tensor_shapes(path)


def test_the_files_of_a_model_are_those_of_its_index(tmp_path):
    with pytest.raises(ModelError, match=f"lacks {MODEL_FILE}"):
        list_model_files(tmp_path)
    write_index(tmp_path, a=OTHER, b=ONE, c=ONE)
    (tmp_path / ONE).write_text("")
    with pytest.raises(ModelError, match=f"lacks {OTHER}"):
        list_model_files(tmp_path)
    (tmp_path / OTHER).write_text("")
    assert list_model_files(tmp_path) == [tmp_path / ONE, tmp_path / OTHER]
    (tmp_path / MODEL_FILE).write_text("")
    assert list_model_files(tmp_path) == [tmp_path / MODEL_FILE]


def test_the_end_of_a_sequence_is_what_the_first_file_says(tmp_path):
    config, generation = tmp_path / "config.json", tmp_path / "generation_config.json"
    with pytest.raises(ModelError, match=r"needs config\.json"):
        read_eos_ids(tmp_path)
    config.write_text("{}")
    assert read_eos_ids(tmp_path) == frozenset()
    config.write_text('{"text_config": {"eos_token_id": 3}}')
    assert read_eos_ids(tmp_path) == {3}
    config.write_text('{"eos_token_id": 2, "text_config": {"eos_token_id": 3}}')
    assert read_eos_ids(tmp_path) == {2}
    generation.write_text('{"eos_token_id": [0, 1]}')
    assert read_eos_ids(tmp_path) == {0, 1}


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pointer_of_git_lfs_is_named(tmp_path, name):
    path = tmp_path / name
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4000000000\n")
    with pytest.raises(ModelError, match=r"is a pointer of git-lfs and not the file itself: .* `git lfs pull`"):
        read_model_json(path) if name.endswith("json") else read_tensor_shapes(path)


def test_json_that_would_never_end_is_named(tmp_path):
    path = tmp_path / "config.json"
    os.mkfifo(path)
    with pytest.raises(ModelError, match=r"a model folder needs config.json: cannot read .* \(it is a pipe\)"):
        read_model_json(path)
    path.unlink()
    with path.open("wb") as file:
        file.truncate(100_000_001)
    with pytest.raises(ModelError, match="it has more than 100000000 bytes"):
        read_model_json(path)


@pytest.mark.parametrize(("text", "words"), [("[1]", "must hold a JSON object, got list"), ("{", "is not valid JSON")])
def test_settings_that_are_none_are_named(tmp_path, text, words):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=words):
        read_model_json(tmp_path / "config.json")


def test_a_folder_that_is_synced_outlasts_a_power_failure_with_everything_in_it(tmp_path):
    with DiskRecord(tmp_path) as disk:
        for path in ("whole/a", "whole/deep/b", "other/c", "d"):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(path)
        sync_tree(tmp_path / "whole")
        assert disk.unsynced() == ["d", "other", "other/c", "whole"], "the folder's own name is its parent's"
        sync_path(tmp_path)
        sync_path(tmp_path / "d")
    assert disk.unsynced() == ["other/c"]


@pytest.mark.parametrize(
    "header",
    [
        pytest.param(b"[" * 100_000, id="nested without end"),
        pytest.param(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1e999]}}', id="no number"),
        pytest.param(b'{"a": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 4]}}', id="no shape"),
        pytest.param(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 9223372036854775808]}}', id="2^63"),
        pytest.param(b'{"a": 3}', id="no entry"),
    ],
)
def test_a_header_that_lies_is_no_traceback(tmp_path, header):
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match="is not a whole safetensors file"):
        read_tensor_shapes(path)

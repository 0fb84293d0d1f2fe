"""Real files of every form, and one clear error for each that is broken."""

import bz2
import gzip
import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offbeat_core import ConfigError, DataError
from offbeat_data import DataConfig, build_character_tokenizer, check_data_paths, load_prompts

ROWS = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(10, 40)]


@pytest.fixture
def load(tmp_path):
    tokenizer = build_character_tokenizer(tmp_path / "tokenizer")
    return lambda path, **settings: load_prompts(DataConfig(path=str(path), **settings), tokenizer)


def _write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _answers(prompts):
    return [prompt.answer for prompt in prompts.train]


EXPECTED = [row["answer"] for row in ROWS]


def test_a_file_of_either_form_is_read(load, tmp_path):
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps(row) + "\n" for row in ROWS))  # with blank lines between
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "d.parquet", row_group_size=5)
    for path in (tmp_path / "d.jsonl", tmp_path / "d.parquet"):
        assert _answers(load(path)) == EXPECTED
        assert _answers(load(path, num_items=14)) == EXPECTED[:14]


@pytest.mark.parametrize("name", ["{}.jsonl", "part-{}.parquet", "part-0000{}-of-00002.parquet"])
def test_a_folder_of_files_is_read(name, load, tmp_path):
    folder = tmp_path / "parts"
    folder.mkdir()
    for number, part in enumerate((ROWS[:12], ROWS[12:])):
        path = folder / name.format(number)
        pq.write_table(pa.Table.from_pylist(part), path) if "parquet" in name else _write(path, part)
    assert _answers(load(folder)) == EXPECTED
    assert _answers(load(folder, num_items=13)) == EXPECTED[:13]


def test_folders_of_the_library_datasets_are_read_without_it(load, tmp_path):
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(str(tmp_path / "one"), num_shards=3)
    assert _answers(load(tmp_path / "one")) == EXPECTED
    assert _answers(load(tmp_path / "one", num_items=11)) == EXPECTED[:11]
    whole.select(range(29, -1, -1)).save_to_disk(str(tmp_path / "reversed"))
    assert _answers(load(tmp_path / "reversed")) == EXPECTED[::-1]
    splits = {"train": whole.select(range(20)), "test": whole.select(range(20, 30))}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "both"))
    both = load(tmp_path / "both", eval_split="test")
    assert _answers(both) == EXPECTED[:20]
    assert [prompt.answer for prompt in both.eval] == EXPECTED[20:]
    with pytest.raises(DataError, match=r"no split 'dev'.*one of train, test"):
        load(tmp_path / "both", split="dev")


def test_the_held_out_items_depend_on_their_seed_alone(load, tmp_path):
    path = _write(tmp_path / "d.jsonl", ROWS)

    def held(**settings):
        prompts = load(path, eval_size=6, **settings)
        chosen = [prompt.text for prompt in prompts.eval]
        assert sorted(chosen + [prompt.text for prompt in prompts.train]) == sorted(row["prompt"] for row in ROWS)
        return chosen

    assert len(held()) == 6
    assert held() == held(shuffle=False)
    assert held() != held(seed=1)
    with pytest.raises(DataError, match=r"eval_size = 30 leaves nothing to train on: .* has 30 rows"):
        load(path, eval_size=30)


def test_a_path_of_its_own_holds_the_held_out_items(load, tmp_path):
    for name, part in (("train", ROWS[:20]), ("test", ROWS[20:])):
        _write(tmp_path / f"{name}.jsonl", part)
    prompts = load(tmp_path / "train.jsonl", eval_path=str(tmp_path / "test.jsonl"), eval_size=4)
    assert _answers(prompts) == EXPECTED[:20]
    assert [prompt.answer for prompt in prompts.eval] == EXPECTED[20:24]
    with pytest.raises(ConfigError, match=r"eval_path names the training data"):
        load(tmp_path / "train.jsonl", eval_path=str(tmp_path / "train.jsonl"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "1"}\n{"prompt": \n', r"d.jsonl, line 2: not valid JSON"),
        ('{"prompt": "1"}\n\n[1, 2]\n', r"d.jsonl, line 3: each line needs one JSON object, got the list \[1, 2\]"),
        ("[1, 2]\n", r"d.jsonl, line 1: each line needs one JSON object, got the list"),
        ("null\n", r"d.jsonl, line 1: each line needs one JSON object, got null"),
        ("", r"d.jsonl is empty"),
        ("\n \n", r"d.jsonl is empty"),
        ('[{"prompt": "1"}]', r"d.jsonl is one JSON array.*jq -c '.\[\]' d.jsonl > rows.jsonl"),
        ('[\n {"prompt": "1"}\n]', r"d.jsonl is one JSON array"),
        ('{\n "prompt": "1"\n}\n', r"d.jsonl has objects over several lines.*jq -c \. d.jsonl"),
        ('{"prompt": "1"}\n'.encode("utf-16"), r"d.jsonl is UTF-16, not UTF-8 text.*iconv -f utf-16"),
        ('{"prompt": "1"}\n'.encode("utf-16-le"), r"d.jsonl is UTF-16, not UTF-8 text.*iconv -f utf-16"),
        (gzip.compress(b'{"prompt": "1"}\n'), r"d.jsonl is compressed; unpack it with gunzip"),
        (bz2.compress(b'{"prompt": "1"}\n'), r"d.jsonl is compressed; unpack it with bunzip2"),
        (b"PAR1\x15\x04", r"d.jsonl is Parquet: give it the ending .parquet"),
        (b'{"prompt": "caf\xe9"}\n', r"d.jsonl, line 1: not UTF-8 text \(byte 16 of the line is 0xe9\).*iconv"),
    ],
)
def test_broken_jsonl_is_named_with_its_line(content, message, load, tmp_path):
    (tmp_path / "d.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        load(tmp_path / "d.jsonl")


def test_a_pipe_is_refused_before_it_is_waited_for(tmp_path):
    pipe = tmp_path / "rows.jsonl"
    os.mkfifo(pipe)
    with pytest.raises(DataError, match=r"rows.jsonl must be a file or a folder, and is a pipe or a device: give "):
        check_data_paths(DataConfig(path=str(pipe)))


@pytest.mark.parametrize("key", ["path", "eval_path"])
def test_paths_are_looked_for_without_a_tokenizer(key, tmp_path):
    (tmp_path / "d.jsonl").write_text("{}")
    good = {"path": str(tmp_path / "d.jsonl"), "eval_path": ""}
    check_data_paths(DataConfig(**good))
    with pytest.raises(DataError, match=r"nowhere.jsonl does not exist"):
        check_data_paths(DataConfig(**{**good, key: str(tmp_path / "nowhere.jsonl")}))
    for scheme in ("arithmetic:2", "products:2", "reasoning-gym:chain_sum", "verifiers:x", "openenv:http://x"):
        check_data_paths(DataConfig(path=scheme))


def test_a_missing_path_and_an_unknown_form_say_what_is_accepted(load, tmp_path):
    with pytest.raises(DataError, match=r"nowhere.jsonl does not exist: give a .jsonl or .parquet"):
        load(tmp_path / "nowhere.jsonl")
    (tmp_path / "d.csv").write_text("prompt,answer\n")
    with pytest.raises(DataError, match=r"d.csv has an unknown form; convert it: python -c"):
        load(tmp_path / "d.csv")
    (tmp_path / "d.txt").write_text("what is 1 and 1?\n")
    with pytest.raises(DataError, match=r"d.txt has an unknown form: give a .jsonl or .parquet"):
        load(tmp_path / "d.txt")
    (tmp_path / "d.jsonl.gz").write_bytes(b"")
    with pytest.raises(DataError, match=r"d.jsonl.gz is compressed; unpack it with gunzip"):
        load(tmp_path / "d.jsonl.gz")
    (tmp_path / "bare").mkdir()
    with pytest.raises(DataError, match=r"bare is an empty folder: give a .jsonl"):
        load(tmp_path / "bare")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "readme.txt").write_text("x")
    with pytest.raises(DataError, match=r"holds no data set but readme.txt"):
        load(tmp_path / "folder")
    with pytest.raises(ConfigError, match=r"data.path is empty"):
        load("")


@pytest.mark.parametrize(("name", "text"), [("d.csv", "prompt,answer\none,2\n"), ("d.tsv", "prompt\tanswer\none\t2\n")])
def test_the_line_that_converts_a_table_does(name, text, load, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError) as refused:
        load(tmp_path / name)
    program = str(refused.value).partition('python -c "')[2].rstrip('"')
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    assert _answers(load(tmp_path / "d.parquet")) == ["2"]


def test_corrupt_columnar_files_are_named(load, tmp_path):
    (tmp_path / "d.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(DataError, match=r"d.parquet cannot be read as Parquet"):
        load(tmp_path / "d.parquet")
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "one"))
    arrow = next((tmp_path / "one").glob("*.arrow"))
    arrow.write_bytes(b"\xff\xff\xff\xff\x10\x00\x00\x00 not arrow at all, not at all")
    with pytest.raises(DataError, match=r"cannot be read as an Arrow stream"):
        load(tmp_path / "one")
    arrow.unlink()
    with pytest.raises(DataError, match=r"cannot be read as an Arrow stream"):
        load(tmp_path / "one")


@pytest.mark.parametrize("form", ["{}.jsonl", "{}-0000{}-of-00002.parquet"])
def test_a_folder_whose_files_are_named_after_splits_is_read_one_split_at_a_time(form, load, tmp_path):
    folder = tmp_path / "hub"
    folder.mkdir()
    for split, part in (("train", ROWS[:18]), ("test", ROWS[18:])):
        for number, rows in enumerate((part[:7], part[7:]) if "of" in form else (part,)):
            path = folder / form.format(split, number)
            pq.write_table(pa.Table.from_pylist(rows), path) if "of" in form else _write(path, rows)
    assert _answers(load(folder)) == EXPECTED[:18]
    assert _answers(load(folder, split="test")) == EXPECTED[18:]
    both = load(folder, eval_split="test", eval_size=5)
    assert _answers(both) == EXPECTED[:18]
    assert [prompt.answer for prompt in both.eval] == EXPECTED[18:23]
    with pytest.raises(DataError, match=r"hub has no split 'dev': .*one of test, train"):
        load(folder, split="dev")
    with pytest.raises(DataError, match=r"hub has no split 'dev': .*one of test, train"):
        load(folder, eval_split="dev")


def test_splits_of_a_name_of_their_own_are_not_mixed(load, tmp_path):
    folder = tmp_path / "hub"
    folder.mkdir()
    for split, part in (("train_sft", ROWS[:18]), ("test_sft", ROWS[18:])):
        pq.write_table(pa.Table.from_pylist(part), folder / f"{split}-00000-of-00001.parquet")
    with pytest.raises(DataError, match=r"no split 'train': .*one of test_sft, train_sft"):
        load(folder)
    assert _answers(load(folder, split="train_sft", eval_split="test_sft")) == EXPECTED[:18]
    held_out = _write(tmp_path / "held_out.jsonl", ROWS[18:])  # has no splits, whatever that of the training data is
    assert len(load(folder, split="train_sft", eval_path=str(held_out)).eval) == 12


@pytest.mark.parametrize("settings", [{"eval_split": "test"}, {"split": "nonsense"}])
@pytest.mark.parametrize("kind", ["file", "folder", "saved", "arithmetic:2", "reasoning-gym:chain_sum"])
def test_a_split_of_what_has_none_is_refused(kind, settings, load, tmp_path):
    path = kind
    if kind == "file":
        path = str(_write(tmp_path / "d.jsonl", ROWS))
    elif kind == "folder":
        (tmp_path / "parts").mkdir()
        path = str(_write(tmp_path / "parts" / "0.jsonl", ROWS).parent)
    elif kind == "saved":
        pytest.importorskip("datasets").Dataset.from_list(ROWS).save_to_disk(path := str(tmp_path / "one"))
    with pytest.raises(ConfigError, match=r"has no splits.*data.eval_size"):
        load(path, eval_size=5, num_items=10, **settings)


def test_held_out_prompts_that_come_twice_are_not_trained_on(load, tmp_path):
    prompts = load(_write(tmp_path / "d.jsonl", ROWS * 2), eval_size=10)
    held_out = {prompt.text for prompt in prompts.eval}
    assert len(prompts.eval) == 10
    assert not held_out & {prompt.text for prompt in prompts.train}
    counts = prompts.train_counts
    assert counts.held_out == 2 * len(held_out) - 10 > 0
    assert (counts.read, counts.kept) == (50, 50 - counts.held_out)


def test_held_out_prompts_of_another_file_are_not_trained_on(load, tmp_path):
    train, test = _write(tmp_path / "train.jsonl", ROWS[:20]), _write(tmp_path / "test.jsonl", ROWS[17:])
    prompts = load(train, eval_path=str(test))
    assert _answers(prompts) == EXPECTED[:17]
    assert (prompts.train_counts.held_out, len(prompts.eval)) == (3, 13)
    with pytest.raises(DataError, match=r"test.jsonl: every row is held out as well"):
        load(test, eval_path=str(_write(tmp_path / "all.jsonl", ROWS)))


@pytest.mark.parametrize(
    "line", [rb'{"prompt": "1\ud83d", "answer": "2"}', b'{"prompt": "1", "answer": "\xed\xa0\xbd"}']
)
def test_half_a_character_is_named_with_its_line(line, load, tmp_path):
    (tmp_path / "d.jsonl").write_bytes(b'{"prompt": "1", "answer": "2"}\n' + line + b"\n")
    with pytest.raises(DataError, match=r"d.jsonl, line 2: .*surrogate"):
        load(tmp_path / "d.jsonl")


@pytest.mark.parametrize("depth", [400, 100_000])
def test_a_line_nested_too_deeply_is_named(depth, load, tmp_path):
    nested = "[" * depth + "]" * depth
    (tmp_path / "d.jsonl").write_text('\n{"prompt": "1", "answer": "2", "tree": ' + nested + "}\n")
    with pytest.raises(DataError, match=r"d.jsonl, line 2: .*nested"):
        load(tmp_path / "d.jsonl")


def test_what_the_system_refuses_to_read_is_named(load, tmp_path):
    (tmp_path / "parts" / "0.jsonl").mkdir(parents=True)
    with pytest.raises(DataError, match=r"parts cannot be read: .*Is a directory.*0.jsonl"):
        load(tmp_path / "parts")


def test_a_column_that_is_no_text_is_named(load, tmp_path):
    column = pa.array([b"\xff\xfe"]).view(pa.string())
    pq.write_table(pa.table({"prompt": column, "answer": column}), tmp_path / "d.parquet")
    with pytest.raises(DataError, match=r"d.parquet cannot be read as Parquet"):
        load(tmp_path / "d.parquet")

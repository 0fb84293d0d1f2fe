"""Data sets of the Hub: which files hold a split, by a README or by names, fetched from a Hub on loopback."""

import json
from dataclasses import replace

import pytest

from offbeat_core import DataError, HubName, find_hub_name, pin_hub_name
from offbeat_data import DataConfig, RewardConfig, fill_known_data, fill_known_reward
from offbeat_data._sources.known_sets import _known
from offbeat_data._sources.sources import read_sources
from offbeat_testing import HubServer

pytest.importorskip("huggingface_hub")
DECLARED = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path:
    - main/exam*.jsonl
- config_name: socratic
  data_files: socratic/**.jsonl
---
"""


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with HubServer() as server:
        server.use_in_this_process(monkeypatch, tmp_path / "cache")
        yield server


def serve(hub, tmp_path, files, readme="", **settings):
    folder = tmp_path / "served"
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        rows = [{"prompt": f"{name} {number}", "answer": "1"} for number in range(3)]
        (folder / name).write_text("\n".join(map(json.dumps, rows)))
    if readme:
        (folder / "README.md").write_text(readme)
    return hub.add("openai/sums", folder, "dataset", **settings)


def prompts(**settings):
    rows = read_sources(DataConfig(**settings), lambda row: row["prompt"])
    return [row["prompt"] for row in rows.train], [row["prompt"] for row in rows.held_out]


def fetched(hub):
    return sorted({line.partition("/resolve/")[2][41:] for line in hub.requests if line.startswith("GET /datasets")})


FILES = ("main/train-0.jsonl", "main/train-1.jsonl", "main/exam.jsonl", "socratic/a.jsonl", "socratic/deep/b.jsonl")


def test_a_readme_says_which_files_hold_a_split_and_these_alone_are_fetched(hub, tmp_path):
    serve(hub, tmp_path, FILES, DECLARED)
    train, held_out = prompts(path="openai/sums:main", eval_split="test", eval_path="openai/sums:main")
    assert train == [f"main/train-{file}.jsonl {number}" for file in range(2) for number in range(3)]
    assert held_out == [f"main/exam.jsonl {number}" for number in range(3)]
    assert fetched(hub) == ["main/exam.jsonl", "main/train-0.jsonl", "main/train-1.jsonl"]
    assert prompts(path="openai/sums:main/test", num_items=2)[0] == ["main/exam.jsonl 0", "main/exam.jsonl 1"]
    assert len(prompts(path="hub:openai/sums:socratic")[0]) == 6


def test_of_a_data_set_that_is_too_large_the_first_rows_are_fetched_file_by_file(hub, tmp_path):
    names = [f"train-{number}.jsonl" for number in range(4)]
    serve(hub, tmp_path, names)
    size = (tmp_path / "served" / names[0]).stat().st_size / 2**30
    with pytest.raises(DataError, match=r"GiB of split 'train' are to be fetched, .* by data.num_items, or raise"):
        prompts(path="openai/sums", max_fetch_gib=3.5 * size)
    assert not fetched(hub)
    rows, _ = prompts(path="openai/sums", max_fetch_gib=3.5 * size, num_items=6)
    assert rows == [f"{name} {number}" for name in names[:2] for number in range(3)]
    assert fetched(hub) == names[:2], "the last row of a file is enough to know"
    with pytest.raises(DataError, match=r"at most .* lower data.num_items"):
        prompts(path="openai/sums", max_fetch_gib=1.5 * size, num_items=6)


@pytest.mark.parametrize(
    ("files", "path", "split", "read"),
    [
        (("train.jsonl", "test.jsonl"), "openai/sums", "train", ["train.jsonl"]),
        (("train.jsonl", "test.jsonl"), "openai/sums/", None, None),
        (("data/train-00000-of-00001.jsonl", "data/dev.jsonl"), "openai/sums", "validation", ["data/dev.jsonl"]),
        (
            ("easy/train/a.jsonl", "easy/test/a.jsonl", "hard/a.jsonl"),
            "openai/sums:easy",
            "test",
            ["easy/test/a.jsonl"],
        ),
        (("rows.jsonl", "more.jsonl"), "openai/sums", "train", ["more.jsonl", "rows.jsonl"]),
    ],
)
def test_without_settings_files_are_told_by_folder_and_name(files, path, split, read, hub, tmp_path):
    serve(hub, tmp_path, files)
    if read is None:  # a path that ends in a slash is a folder's
        with pytest.raises(DataError, match="does not exist"):
            prompts(path=path)
        return
    assert prompts(path=path, split=split)[0] == [f"{name} {number}" for name in read for number in range(3)]
    assert fetched(hub) == read


def test_what_the_hub_has_converted_is_read_where_the_own_files_are_of_another_form(hub, tmp_path):
    served = serve(hub, tmp_path, ["train.csv"])
    (tmp_path / "converted" / "default" / "train").mkdir(parents=True)
    (tmp_path / "converted" / "default" / "train" / "0000.jsonl").write_text('{"prompt": "a", "answer": "1"}')
    with pytest.raises(DataError, match=r"no file of .parquet, .* and the Hub has no conversion of it"):
        prompts(path="openai/sums")
    served.branches["refs/convert/parquet"] = tmp_path / "converted"
    assert prompts(path="openai/sums")[0] == ["a"]
    pinned = str(pin_hub_name(HubName(repository="openai/sums"), "dataset"))
    (tmp_path / "newer" / "default" / "train").mkdir(parents=True)
    (tmp_path / "newer" / "default" / "train" / "0000.jsonl").write_text('{"prompt": "b", "answer": "1"}')
    served.branches |= {"refs/convert/parquet": tmp_path / "newer", "before": tmp_path / "converted"}
    assert prompts(path="openai/sums")[0] == ["b"]
    assert prompts(path=pinned)[0] == ["a"], "a resume reads the conversion that the run began with"
    with pytest.raises(DataError, match="leave its revision out to take the Hub's own conversion"):
        prompts(path=f"openai/sums@{served.commit}")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("openai/sums", "has several configs: write openai/sums:CONFIG with one of main, socratic"),
        ("openai/sums:none", "has no config 'none': write openai/sums:CONFIG with one of main, socratic"),
        ("openai/sums:main/dev", r"has no split 'dev': set data\.split .* to one of train, test"),
        ("openai/none", "there is no such data set on the Hub, and no such path here"),
    ],
)
def test_a_name_that_leads_nowhere_says_what_there_is(path, words, hub, tmp_path):
    serve(hub, tmp_path, FILES, DECLARED)
    with pytest.raises(DataError, match=words):
        prompts(path=path)
    assert not fetched(hub)


def test_a_known_set_fills_what_is_left_at_its_default():
    data, choices = fill_known_data(DataConfig(path="openai/gsm8k@main", answer_column="solution"))
    assert (data.path, data.prompt_column, data.answer_column) == ("hub:openai/gsm8k:main@main", "question", "solution")
    assert choices[0] == "data.prompt_column = 'question' (as openai/gsm8k has it)"
    reward, more = fill_known_reward(RewardConfig(), data)
    assert (reward.name, reward.reference_pattern) == ("math_verify", "#### (.*)")
    assert len(more) == 3
    assert fill_known_data(data) == (data, ())
    assert fill_known_data(DataConfig(path="openai/gsm8k:socratic"))[0].path == "openai/gsm8k:socratic"
    for path in ("my/rows", "rows.jsonl", "arithmetic:2"):
        assert fill_known_data(DataConfig(path=path)) == (DataConfig(path=path), ())
        assert fill_known_reward(RewardConfig(), DataConfig(path=path)) == (RewardConfig(), ())


def test_every_known_set_has_settings_that_the_sections_take():
    for name, known in _known().items():
        assert find_hub_name(name, "dataset").repository == name
        assert not set(known) - {"config", "data", "reward"}
        replace(DataConfig(path=name), **known.get("data", {}))
        if "reward" in known:
            replace(RewardConfig(), **known["reward"])

"""Geometry3K as it lies on the Hub, and as verl prepares it: both are read unchanged.

Source: hiyouga/geometry3k, README.md (features, splits, data/train-*); volcengine/verl, data_preprocess/geo3k.py.
"""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from offbeat_core import DataError
from offbeat_data import (
    ConversationConfig,
    DataConfig,
    RewardConfig,
    build_reward,
    load_conversations,
    load_prompts,
    load_tokenizer,
)

CARD = """---
dataset_info:
  features:
  - name: images
    sequence: image
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*
---
This dataset was converted from InterGPS.
"""
NUM_ROWS = {"train": 6, "validation": 3, "test": 4}
TEXT = {"dtype": "string", "_type": "Value"}
FEATURES = {
    "images": {"feature": {"_type": "Image"}, "_type": "Sequence"},
    "problem": TEXT,
    "answer": TEXT,
    "id": {"dtype": "int64", "_type": "Value"},
    "choices": {"feature": TEXT, "_type": "Sequence"},
    "ground_truth": TEXT,
}
"""As datasets writes them into the schema. Source: huggingface/datasets, features.py, Features.arrow_schema."""
SCHEMA = pa.schema(
    [
        ("images", pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))),
        ("problem", pa.string()),
        ("answer", pa.string()),
        ("id", pa.int64()),
        ("choices", pa.list_(pa.string())),
        ("ground_truth", pa.string()),
    ],
    metadata={"huggingface": json.dumps({"info": {"features": FEATURES}})},
)


def figure(seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (24, 32, 3), np.uint8)
    Image.fromarray(pixels).save(buffer := io.BytesIO(), format="PNG")
    return buffer.getvalue()


def row(split, number):
    path = "img_diagram.png" if number % 2 else None  # the name that an image had before its bytes were taken in
    return {
        "images": [{"bytes": figure(1000 * len(split) + number), "path": path}],
        "problem": f"<image>Find $x$, {split} {number}.",
        "answer": rf"{number + 2} \sqrt {{ 221 }}",
        "id": number,
        "choices": ["1", "2", "3", "4"],
        "ground_truth": "B",
    }


@pytest.fixture
def hub(tmp_path):
    """What `hf download hiyouga/geometry3k --repo-type dataset --local-dir geometry3k` leaves."""
    folder = tmp_path / "geometry3k"
    (folder / "data").mkdir(parents=True)
    (folder / ".cache" / "huggingface").mkdir(parents=True)
    (folder / ".gitattributes").write_text("*.parquet filter=lfs\n")
    (folder / "README.md").write_text(CARD)
    for split, count in NUM_ROWS.items():
        table = pa.Table.from_pylist([row(split, number) for number in range(count)], schema=SCHEMA)
        pq.write_table(table, folder / "data" / f"{split}-00000-of-00001.parquet")
    return folder


@pytest.fixture
def load(vision_folder):
    tokenizer = load_tokenizer(vision_folder)
    return lambda path, **settings: load_prompts(DataConfig(path=str(path), **settings), tokenizer)


def ids(prompts):
    """Split and number of each."""
    found = [prompt.text.partition("$x$, ")[2].partition(".")[0].split() for prompt in prompts]
    return [(split, int(number)) for split, number in found]


def test_the_folder_that_the_hub_gives_is_read_as_it_is(load, hub):
    prompts = load(hub, prompt_column="problem", eval_split="test")
    assert ids(prompts.train) == [("train", number) for number in range(6)]
    assert ids(prompts.eval) == [("test", number) for number in range(4)]
    for prompt, number in zip(prompts.train, range(6), strict=True):
        wanted = row("train", number)
        pixels = np.asarray(Image.open(io.BytesIO(wanted["images"][0]["bytes"])))
        np.testing.assert_array_equal(prompt.images[0], pixels)
        assert prompt.answer == wanted["answer"]
    first, reward = prompts.train[0], build_reward(RewardConfig(name="math_verify"))
    assert [reward.score(first, text).value for text in (r"\boxed{2\sqrt{221}}", r"\boxed{3}")] == [1.0, 0.0]


def test_splits_of_the_hub_are_named_as_its_files(load, hub):
    whole = load(hub, prompt_column="problem", split="validation", eval_path=str(hub / "data"), eval_split="test")
    assert (ids(whole.train)[0], len(whole.train), len(whole.eval)) == (("validation", 0), 3, 4)
    assert len(load(hub, prompt_column="problem", num_items=2).train) == 2
    with pytest.raises(DataError, match=r"geometry3k has no split 'dev': .* one of test, train, validation"):
        load(hub, prompt_column="problem", eval_split="dev")


def test_files_of_the_folder_itself_come_before_those_in_data(load, hub):
    (hub / "train.jsonl").write_text('{"prompt": "Mine.", "answer": "1"}\n')
    assert "Mine." in load(hub).train[0].text


def test_an_empty_folder_of_data_is_named_with_what_is_beside_it(load, hub):
    for path in (hub / "data").iterdir():
        path.unlink()
    with pytest.raises(DataError, match=r"geometry3k holds no data set but .*README\.md, data"):
        load(hub)


@pytest.fixture
def prepared(tmp_path):
    """What verl's examples/data_preprocess/geo3k.py writes: train.parquet and test.parquet."""
    for split, count in NUM_ROWS.items():
        rows = [row(split, number) for number in range(count)]
        made = [
            {
                "data_source": "hiyouga/geometry3k",
                "prompt": [
                    {"role": "user", "content": f"{each['problem']} The final answer MUST BE put in \\boxed{{}}."}
                ],
                "images": each["images"],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": each["answer"]},
                "extra_info": {"split": split, "index": each["id"], "answer": each["answer"]},
            }
            for each in rows
        ]
        pq.write_table(pa.Table.from_pylist(made), tmp_path / f"{split}.parquet")
    return tmp_path


def test_what_verl_prepared_is_read_as_it_is(load, prepared):
    files = {"eval_path": str(prepared / "test.parquet"), "answer_column": "reward_model.ground_truth"}
    prompts = load(prepared / "train.parquet", **files)
    assert ids(prompts.train) == [("train", number) for number in range(6)]
    assert [prompt.answer for prompt in prompts.eval] == [row("test", number)["answer"] for number in range(4)]
    assert all(prompt.images[0].shape == (24, 32, 3) for prompt in prompts.train)
    assert "user\n<|vision_start|><|image_pad|><|vision_end|>Find $x$, train 0." in prompts.train[0].text


def test_what_verl_prepared_is_learned_from_as_well(vision_folder, prepared):
    config = ConversationConfig(path=str(prepared / "train.parquet"), completion_column="reward_model.ground_truth")
    tokenizer = load_tokenizer(vision_folder)
    found = load_conversations(config, tokenizer).train
    learned = [tokenizer.decode(each.ids[each.loss_mask], skip_special_tokens=False) for each in found]
    assert learned == [row("train", number)["answer"] + "<|im_end|>" for number in range(6)]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("answer", r"no column 'answer', it has .*reward_model\.ground_truth.*perhaps extra_info\.answer"),
        ("reward_model.truth", r"no column 'reward_model\.truth'.*perhaps reward_model\.ground_truth"),
        ("ability.name", r"no column 'ability\.name'"),
    ],
)
def test_a_part_that_is_not_there_is_named_with_those_that_are(column, message, load, prepared):
    with pytest.raises(DataError, match=message):
        load(prepared / "train.parquet", answer_column=column)


def test_a_part_that_is_null_is_named(load, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "reward_model": {"ground_truth": null}}\n')
    with pytest.raises(DataError, match=r"column 'reward_model\.ground_truth' \(data\.answer_column\) is null"):
        load(tmp_path / "rows.jsonl", answer_column="reward_model.ground_truth")


def test_a_column_with_a_dot_in_its_name_comes_first(load, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "a.b": "whole", "a": {"b": "part"}}\n')
    assert load(tmp_path / "rows.jsonl", answer_column="a.b").train[0].answer == "whole"

"""Conversations with images: two ranks learn from them, with the loss that transformers finds."""

import io
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from draw_geometry import main as draw_geometry
from PIL import Image
from transformers import AutoConfig

from offbeat_core import TrainEngineConfig, parse_config
from offbeat_data import ConversationConfig, load_conversations, load_tokenizer
from offbeat_engine_torch import TorchTrainEngine
from offbeat_run import RunFolder, read_metrics
from offbeat_testing import CommandLine, tiny_vision_model
from sft_app._config import SftConfig
from sft_app._examples import load_examples


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in the layout of geo3k."""
    folder = tmp_path_factory.mktemp("figures")
    draw_geometry([str(folder), "--train", "16", "--test", "4", "--size-px", "64", "--kinds", "squares_area"])
    return folder


@pytest.fixture
def config(figures: Path, tmp_path: Path) -> Path:
    path = tmp_path / "images.toml"
    path.write_text(f"""
[model]
path = "{tiny_vision_model(tmp_path / "model", spread=0.02)}"
[data]
path = "{figures}"
eval_path = "{figures}"
eval_split = "test"
prompt_column = "problem"
completion_column = "answer"
max_sequence_tokens = 256
epochs = 3
[engine]
device = "cpu"
num_ranks = 2
learning_rate = 1e-3
batch_size = 8
max_tokens_per_microbatch = 512
[eval]
every_updates = 6
""")
    return path


def transformers_loss(folder: Path, figures: Path) -> float:
    """Mean loss of the held-out answers by plain transformers, which prepares the images itself."""
    from transformers import AutoImageProcessor, AutoModelForImageTextToText

    model, processor = AutoModelForImageTextToText.from_pretrained(folder), AutoImageProcessor.from_pretrained(folder)
    rows = pq.read_table(figures / "test.parquet").to_pylist()
    config = ConversationConfig(path=str(figures / "test.parquet"), prompt_column="problem", completion_column="answer")
    total, count = 0.0, 0
    for row, sequence in zip(rows, load_conversations(config, load_tokenizer(folder)).train, strict=True):
        made = processor(images=[Image.open(io.BytesIO(row["images"][0]["bytes"])).convert("RGB")], return_tensors="pt")
        ids = torch.from_numpy(sequence.ids.astype("int64"))[None]
        labels = torch.where(torch.from_numpy(sequence.loss_mask)[None], ids, -100)
        kinds = (ids == model.config.image_token_id).int()
        with torch.no_grad():
            loss = model(input_ids=ids, labels=labels, mm_token_type_ids=kinds, **made).loss
        total, count = total + float(loss) * int(sequence.loss_mask.sum()), count + int(sequence.loss_mask.sum())
    return total / count


def test_orpo_raises_the_likelihood_of_words_and_not_of_places_for_images(tmp_path: Path) -> None:
    """A trainer takes a placeholder in the loss for a sampled token, and refuses the image that stands nowhere then."""
    model = tiny_vision_model(tmp_path / "model")
    asked = [{"type": "image"}, {"type": "text", "text": "What?"}]
    row = {"prompt": [{"role": "user", "content": asked}], "chosen": "Red.", "rejected": "Blue.", "images": ["a.png"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    text = f'[model]\npath = "{model}"\n[data]\npath = "{tmp_path / "rows.jsonl"}"\n[preference]\nloss = "orpo"\n'
    [example] = load_examples(parse_config(text, SftConfig), load_tokenizer(model)).train
    chosen, rejected = example.sequences
    ids = AutoConfig.from_pretrained(model).image_token_id
    assert (chosen.loss_mask == (chosen.ids != ids))[1:-1].all()
    assert rejected.loss_mask.sum() < chosen.loss_mask.sum()
    engine = TorchTrainEngine.create(TrainEngineConfig(model_path=str(model), device="cpu"))
    assert len(engine.logprobs(example.sequences)) == 2


@pytest.mark.nightly
def test_ranks_learn_from_images_with_the_loss_of_transformers(
    command: CommandLine, config: Path, figures: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ended = command("train", config, "--out", run)
    assert ended.code == 0, ended.err
    held_out = {
        line.step: line.values["eval/loss"]
        for line in read_metrics(run / "metrics.jsonl")
        if "eval/loss" in line.values
    }
    assert held_out[6] < held_out[0] - 0.2
    checkpoint = RunFolder.open(run, write=False).checkpoints.latest()
    assert checkpoint is not None
    assert transformers_loss(checkpoint.path, figures) == pytest.approx(held_out[6], abs=2e-4)

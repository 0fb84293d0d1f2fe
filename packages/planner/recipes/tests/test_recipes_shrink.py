"""A rehearsal: the trainer made small, and data drawn on the spot, whose answers are what they are said to be."""

import json
from dataclasses import dataclass

import pytest

from offbeat_core import TrainEngineSettings
from offbeat_recipes import (
    NUM_DRAWN,
    draw_chats,
    draw_figures,
    draw_pairs,
    draw_ratings,
    draw_sums,
    shrink_engine,
    takes_experts,
    takes_images,
)
from offbeat_recipes._tiny_model import SQUARE_PX


@dataclass(frozen=True, kw_only=True)
class Engine(TrainEngineSettings):
    """Section `engine`."""

    backend: str = "megatron"
    num_ranks: int = 64
    max_updates: int = 1000


def shrunk(num_ranks=2, taken="megatron", **settings):
    return shrink_engine(Engine(**settings), wanted="megatron", taken=taken, num_ranks=num_ranks, num_updates=3)


@pytest.mark.parametrize(
    ("num_ranks", "options", "expected"),
    [
        (2, {"tensor_parallel": 8, "pipeline_parallel": 4}, {"tensor_parallel": 2, "pipeline_parallel": 1}),
        (2, {"pipeline_parallel": 4, "context_parallel": 2}, {"pipeline_parallel": 2, "context_parallel": 1}),
        (
            4,
            {"tensor_parallel": 2, "pipeline_parallel": 4, "context_parallel": 2},
            {"tensor_parallel": 2, "pipeline_parallel": 2, "context_parallel": 1},
        ),
        (2, {"expert_parallel": 8}, {"expert_parallel": 2}),
        (2, {"expert_parallel": 8, "pipeline_parallel": 2}, {"expert_parallel": 1, "pipeline_parallel": 2}),
        (2, {"virtual_pipeline": 4, "mtp_layers": 2}, {"virtual_pipeline": 1, "mtp_layers": 1}),
        (2, {"moe_aux_loss_coeff": 0.1}, {"moe_aux_loss_coeff": 0.1}),
    ],
)
def test_ranks_share_the_model_along_as_many_axes_as_there_are_ranks_for(num_ranks, options, expected):
    assert shrunk(num_ranks, options=options).options == expected


def test_another_backend_in_its_place_gets_the_options_that_every_backend_has():
    options = {"tensor_parallel": 2, "pipeline_parallel": 2, "sequence_parallel": True}
    assert shrunk(taken="torch", options=options).options == {"tensor_parallel": 2}
    assert shrunk(options=options).options == {**options, "pipeline_parallel": 1}


def test_a_trainer_is_small_and_stays_as_small_as_it_was():
    large = shrunk(device="cuda", warmup_steps=100, max_tokens_per_microbatch=8192, lora_rank=64, learning_rate=3e-5)
    assert (large.backend, large.device, large.num_ranks, large.max_updates) == ("megatron", "cpu", 2, 3)
    assert (large.warmup_steps, large.max_tokens_per_microbatch, large.lora_rank) == (1, 64, 4)
    assert large.learning_rate == 3e-5
    assert shrunk(max_tokens_per_microbatch=0).max_tokens_per_microbatch == 64, "which is left to memory"
    tiny = shrunk(max_tokens_per_microbatch=16)
    assert (tiny.warmup_steps, tiny.max_tokens_per_microbatch, tiny.lora_rank) == (0, 16, 0)


@pytest.mark.parametrize(
    ("backend", "tensor_parallel", "lora_rank", "images", "experts"),
    [
        ("torch", 1, 8, True, True),
        ("torch", 2, 0, False, False),
        ("megatron", 2, 0, True, True),
        ("megatron", 1, 8, False, True),
    ],
)
def test_what_a_trainer_can_be_rehearsed_with(backend, tensor_parallel, lora_rank, images, experts):
    engine = Engine(options={"tensor_parallel": tensor_parallel}, lora_rank=lora_rank)
    assert (takes_images(engine, backend), takes_experts(engine, backend)) == (images, experts)


def total(question):
    first, plus, second = question.removesuffix("=").partition("+")
    assert plus
    return str(int(first) + int(second))


@pytest.fixture
def drawn(tmp_path):
    """Rows that a function draws, which are the same with the same seed, and others with another."""

    def rows(draw, **columns):
        path = tmp_path / "data" / "rows.jsonl"
        texts = []
        for seed in (3, 3, 4):
            draw(path, **columns, seed=seed)
            texts.append(path.read_text())
        assert texts[0] == texts[1] != texts[2]
        found = [json.loads(line) for line in texts[2].splitlines()]
        assert len(found) == NUM_DRAWN
        return found

    return rows


def test_drawn_sums_are_right(drawn):
    for row in drawn(draw_sums, prompt_column="q", answer_column="a"):
        assert row == {"q": row["q"], "a": total(row["q"])}


def test_drawn_conversations_have_two_turns_and_right_answers(drawn):
    for row in drawn(draw_chats, messages_column="m"):
        assert [each["role"] for each in row["m"]] == ["user", "assistant"] * 2
        for question, answer in zip(row["m"][::2], row["m"][1::2], strict=True):
            assert answer["content"] == total(question["content"])


def test_a_drawn_pair_has_the_right_answer_and_a_wrong_one_as_long(drawn):
    for row in drawn(draw_pairs, prompt_column="q", chosen_column="yes", rejected_column="no"):
        assert row["yes"] == total(row["q"])
        assert row["no"] != row["yes"]
        assert len(row["no"]) == len(row["yes"]) == 2


def test_a_drawn_rating_says_whether_the_answer_is_right(drawn):
    rows = drawn(draw_ratings, prompt_column="q", completion_column="a", label_column="good")
    assert all(row["good"] == (row["a"] == total(row["q"])) for row in rows)
    assert {row["good"] for row in rows} == {True, False}


def test_a_drawn_figure_has_the_area_that_is_asked_for(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="the extra images is not installed")
    path = tmp_path / "rows.jsonl"
    draw_figures(path, prompt_column="q", answer_column="a", seed=3)
    for row in map(json.loads, path.read_text().splitlines()[:64]):
        [name] = row["images"]
        with image.open(tmp_path / name) as figure:
            num_black = figure.convert("L").histogram()[0]
        assert int(row["a"]) * SQUARE_PX * SQUARE_PX // 2 == num_black
        assert row["q"].count("<image>") == 1

"""Readings of one layer, against attention that is written out in float64."""

import asyncio
from typing import Any

import numpy as np
import pytest

from grpo_async_app._diagnosis.evidence import point_errors
from grpo_async_app._diagnosis.readings import LayerValues, best_reading, factor, with_output

NUM_TOKENS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 40, 4, 2, 16
RNG = np.random.default_rng(5)


def drawn(width: int) -> Any:
    return RNG.standard_normal((NUM_TOKENS, width)).astype(np.float32)


INPUTS = {
    "query": drawn(NUM_HEADS * HEAD_DIM),
    "key": drawn(NUM_KV_HEADS * HEAD_DIM),
    "value projection": drawn(NUM_KV_HEADS * HEAD_DIM),
}


def attended(
    *, window: int = NUM_TOKENS, scale: float = 1.0, ahead: bool = False, in_turn: bool = False, sink: float = 0.0
) -> Any:
    """Attention, a token and a head at a time."""
    q, k, v = (values.astype(np.float64).reshape(NUM_TOKENS, -1, HEAD_DIM) for values in INPUTS.values())
    mixed = np.zeros((NUM_TOKENS, NUM_HEADS, HEAD_DIM))
    for token in range(NUM_TOKENS):
        seen = slice(max(0, token - window + 1), NUM_TOKENS if ahead else token + 1)
        for head in range(NUM_HEADS):
            kv_head = head % NUM_KV_HEADS if in_turn else head * NUM_KV_HEADS // NUM_HEADS
            scores = k[seen, kv_head] @ q[token, head] * scale / np.sqrt(HEAD_DIM)
            shares = np.exp(scores)
            mixed[token, head] = shares / (shares.sum() + sink) @ v[seen, kv_head]
    return mixed.reshape(NUM_TOKENS, -1).astype(np.float32)


def read(point: str, found: Any, wanted: Any, others: Any = None) -> str:
    async def inspect_other(scale: float, layer: int) -> Any:
        return (others or {}).get((scale, layer), {})

    return asyncio.run(
        best_reading(LayerValues(layer=3, found=found, wanted=wanted, rounded=wanted), point, inspect_other)
    )


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"window": 8}, "a window of 8 tokens"),
        ({"window": 17}, "a window of 17 tokens"),
        ({"scale": 0.5}, "scores scaled by 0.5"),
        ({"scale": HEAD_DIM**-0.5}, "scores scaled by 0.25"),
        ({"ahead": True}, "tokens see those behind them"),
        ({"scale": 1.37}, "scores scaled by 1.37"),
        ({"scale": 0.9}, "scores scaled by 0.9"),
        ({"in_turn": True}, "key heads in turn, and not each for its neighbours"),
        ({"sink": 1.0}, "a sink of logit 0"),
        ({"sink": 7.0}, ""),
    ],
)
def test_a_change_of_attention_is_told_by_its_values(change: Any, name: str) -> None:
    found, wanted = {**INPUTS, "attention": attended(**change)}, {**INPUTS, "attention": attended()}
    assert read("attention", found, wanted) == name


def test_positions_and_layers_are_told_by_what_the_reference_makes_of_them() -> None:
    right, other = {"query": drawn(64)}, {"query": drawn(64)}
    assert read("query", other, right, {(4.0, 3): other}) == "positions scaled by 4"
    assert read("query", other, right, {(4.0, 3): right}) == ""
    right, other = {"attention input": drawn(64)}, {"attention input": drawn(64)}
    assert read("attention input", other, right, {(1.0, 2): other}) == "the weights of layer 2"
    assert read("attention input", other, right, {(1.0, 2): right, (1.0, 4): {}}) == ""


def test_a_factor_is_told_where_it_is_all_that_differs() -> None:
    right = {"query": drawn(64)}
    assert factor({"query": 1.1 * right["query"]}, right, right, "query") == "1.1 times the right values"
    assert factor({"query": 1.1 * right["query"] + 0.01}, right, right, "query") == ""
    assert factor(right, right, right, "query") == ""
    assert factor({"query": right["query"][:, :32]}, right, right, "query") == ""


def test_experts_of_another_number_or_sum_are_told() -> None:
    chosen, start, mlp = RNG.integers(0, 8, (NUM_TOKENS, 2)).astype(np.float32), drawn(32), drawn(32)
    times = RNG.uniform(1.2, 2, (NUM_TOKENS, 1)).astype(np.float32)
    wanted = with_output({"experts": chosen, "after attention": start, "layer 3": start + mlp}, 3)
    found = with_output({"experts": chosen, "after attention": start, "layer 3": start + times * mlp}, 3)
    assert "add up to another sum" in read("output", found, wanted)
    assert read("output", {**found, "output": drawn(32)}, wanted) == ""
    [error] = point_errors({"experts": chosen[:, :1]}, wanted, wanted, ["experts"])
    assert error.is_beyond


def test_experts_that_tokens_take_in_place_of_the_right_ones_are_told() -> None:
    right = {"experts": np.asarray([[0, 1], [1, 2], [2, 3]], np.float32)}
    assert read("experts", {"experts": right["experts"][:, :1]}, right) == "1 a token in place of 2"
    assert read("experts", {"experts": np.asarray([[1, 3], [1, 2], [2, 3]], np.float32)}, right) == "never 0"
    assert read("experts", {"experts": np.asarray([[1, 3], [1, 3], [2, 3]], np.float32)}, right) == ""


def test_an_engine_may_leave_the_last_token_out() -> None:
    right, other = {"attention input": drawn(64)}, {"attention input": drawn(64)}
    short = {"attention input": other["attention input"][:-1]}
    assert read("attention input", short, right, {(1.0, 2): short}) == "the weights of layer 2"

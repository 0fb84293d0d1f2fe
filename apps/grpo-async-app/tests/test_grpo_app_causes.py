"""Causes from evidence, where no process is needed: lag, templates, and engines that do not show their layers."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from grpo_async_app._diagnosis.causes import Diagnosis, find_causes
from grpo_async_app._diagnosis.evidence import Evidence, ExaminedSample, LaggedTokens, is_beyond_rounding
from grpo_async_app._diagnosis.report import conclude, describe, to_json

NUM_TOKENS = 40


def sample(seed: int, **values: Any) -> ExaminedSample:
    """One on which all agree, but for what is given."""
    rng = np.random.default_rng(seed)
    right = -rng.exponential(1.0, NUM_TOKENS).astype(np.float32)
    names = ("sampled", "alone", "trained", "reference", "rounded_engine", "rounded_trainer")
    ids = rng.integers(3, 300, NUM_TOKENS + 8).astype(np.int32)
    made = ExaminedSample(ids=ids, num_prompt=8, occasion="alone", **dict.fromkeys(names, right))
    return replace(
        made, **{name: None if by is None else right + np.asarray(by, np.float32) for name, by in values.items()}
    )


def find(shown: Any = ({}, {}, {}), **evidence: Any) -> Diagnosis:
    async def nothing(*_: object) -> Any:
        return {}

    async def shows(*_: object) -> Any:
        return shown

    settings = {"samples": [sample(seed) for seed in range(4)], "had_other_weights": True, **evidence}
    return asyncio.run(find_causes(Evidence(**settings), shows, nothing, nothing))


def test_sides_that_agree_have_no_cause() -> None:
    found = find()
    assert (found.findings, found.notes) == ([], [])
    assert conclude(found).startswith("no cause found")


def test_lag_is_what_the_samples_of_the_run_have_beyond_fresh_ones() -> None:
    lagged = [
        LaggedTokens(lag=lag, errors=np.full(50, nats, np.float32)) for lag, nats in ((0, 0.01), (1, 0.11), (3, 0.5))
    ]
    [finding] = find(lagged=lagged).findings
    assert (finding.kind, finding.where) == ("lag", "run: lag")
    assert finding.nats == pytest.approx(0.49, abs=1e-3)
    assert "lag 1: 0.11 nats a token, 91% of it lag" in finding.text
    assert find(lagged=lagged[:1]).findings == []


def test_an_engine_that_does_not_show_itself_is_examined_by_what_it_reports() -> None:
    found = find(samples=[sample(seed, alone=None, sampled=0.3) for seed in range(4)])
    assert [each.where for each in found.findings] == ["rollout engine: somewhere"]
    assert found.notes == ["the rollout engine does not say what it computes: what it reported was compared instead"]


def test_another_template_is_named_with_the_first_prompt() -> None:
    [finding] = find(template_changes=["prompt 3 differs from token 5 on", "prompt 4 differs from token 5 on"]).findings
    assert (finding.kind, finding.where) == ("inputs", "run: chat template")
    assert "2 prompts" in finding.text
    assert "prompt 3 differs from token 5 on" in finding.text


def test_one_version_of_the_weights_is_noted() -> None:
    assert find(had_other_weights=False).notes == [
        "caches were not examined across an update: there is one version of the weights"
    ]


def test_rounding_and_what_exceeds_it() -> None:
    rng = np.random.default_rng(0)
    wanted = -rng.exponential(1.0, 500).astype(np.float32)
    noise = rng.standard_normal((2, 500)).astype(np.float32) * np.float32(0.02)
    rounding = np.abs(noise[0])
    assert not is_beyond_rounding(wanted + noise[1], wanted, rounding)
    assert not is_beyond_rounding(wanted + 2 * noise[1], wanted, rounding)
    assert is_beyond_rounding(wanted + 5 * noise[1], wanted, rounding)
    few = wanted.copy()
    few[::8] += 0.5  # one token of eight
    assert is_beyond_rounding(few, wanted, rounding)
    assert not is_beyond_rounding(wanted[:0], wanted[:0], rounding[:0])


def test_text_and_json_hold_every_cause() -> None:
    found = find(samples=[sample(seed, trained=0.3, alone=0.1) for seed in range(4)])
    assert [each["where"] for each in to_json(found)["findings"]] == [each.where for each in found.findings]
    text = describe(found)
    assert all(each.text in text for each in found.findings)


def test_a_trainer_that_is_right_about_single_sequences_packs_them_wrongly() -> None:
    found = find(samples=[sample(seed, trained=0.3, trained_alone=0.0) for seed in range(4)])
    assert [(each.kind, each.where) for each in found.findings] == [("state", "trainer: batch")]
    found = find(samples=[sample(seed, trained=0.3, trained_alone=0.3) for seed in range(4)])
    assert [each.where for each in found.findings] == ["trainer: somewhere"]


FIRST, OTHER, SHORT = (np.arange(start, start + size, dtype=np.int32) for start, size in ((3, 8), (9, 8), (3, 2)))


@pytest.mark.parametrize(
    ("drawn", "says"),
    [
        ((FIRST, FIRST, OTHER), ""),
        ((FIRST, FIRST, FIRST), "two seeds give the same samples"),
        ((FIRST, OTHER, OTHER + 1), "one seed gives other samples each time"),
        ((SHORT, SHORT, SHORT), ""),
    ],
)
def test_samples_follow_seeds(drawn: Any, says: str) -> None:
    findings = find(seeded=[drawn] * 3).findings
    assert [each.where for each in findings] == (["rollout engine: seeds"] if says else [])
    assert all(says in each.text for each in findings)
    assert find(seeded=[drawn, (FIRST, FIRST, OTHER)]).findings == []  # one prompt alone proves nothing


def test_tensors_that_no_update_has_reached_are_named_so() -> None:
    held, wanted = {"a": np.zeros(66), "b": np.ones(66)}, {"a": np.ones(66), "b": np.ones(66)}
    for before, is_stale in ((held, True), (wanted, False), ({}, False)):
        [finding] = find(engine_weights=held, trainer_weights=wanted, earlier_weights=before).findings
        assert finding.where == "rollout engine: a"
        assert ("as they were before the update" in finding.text) == is_stale


def test_the_format_of_a_cache_is_named_where_it_is_set() -> None:
    later = np.full(NUM_TOKENS, 0.1, np.float32)
    later[0] = 0
    findings = find(samples=[sample(seed, sampled=later) for seed in range(4)], kv_format="fp8_e4m3").findings
    assert [each.kind for each in findings] == ["state"]
    assert "the cache of keys and values is set to fp8_e4m3" in findings[0].text


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (slice(1), "first token: only the first token of each sample"),
        (slice(1, None), "decoding: the first token is right and later ones are not"),
        (slice(16, None), "decoding: the first 16 tokens are right and later ones are not"),
        (slice(None), "what it reports: all samples, from the first token on"),
    ],
)
def test_it_is_said_from_which_token_on_samples_differ(wrong: slice, says: str) -> None:
    errors = np.zeros(NUM_TOKENS, np.float32)
    errors[wrong] = 0.3
    [finding] = find(samples=[sample(seed, sampled=errors) for seed in range(4)]).findings
    assert (finding.kind, finding.where) == ("state", f"rollout engine: {says.partition(':')[0]}")
    assert says in finding.text


def values(*points: str) -> dict[str, Any]:
    return {point: np.full((8, 4), len(point), np.float32) for point in points}


def test_a_layer_that_is_left_out_is_named() -> None:
    right = values("embedding", "layer 0", "layer 1", "final norm")
    found = {**values("embedding", "layer 0"), "final norm": right["final norm"] + 1}
    wrong = [sample(seed, alone=0.3, sampled=0.3) for seed in range(4)]
    [finding] = find((found, right, right), samples=wrong).findings
    assert (finding.kind, finding.where) == ("layers", "rollout engine: layer 1")
    found = {"embedding": right["embedding"], "final norm": found["final norm"]}  # it shows none of them
    [finding] = find((found, right, right), samples=wrong).findings
    assert finding.where == "rollout engine: final norm"


def test_where_a_matrix_has_an_adapter_it_is_named_too() -> None:
    right = {**values("embedding", "layer 0", "final norm"), "query projection": np.ones((8, 4), np.float32)}
    found = {**right, "layer 0": right["layer 0"] + 1, "query projection": np.zeros((8, 4), np.float32) + 3}
    wrong = [sample(seed, alone=0.3, sampled=0.3) for seed in range(4)]
    for has_adapter in (True, False):
        [finding] = find((found, right, right), samples=wrong, has_adapter=has_adapter).findings
        assert finding.where == "rollout engine: layer 0: query projection"
        assert ("or its adapter" in finding.text) == has_adapter


def test_an_engine_is_not_blamed_for_weights_that_the_trainer_gave_it() -> None:
    held, saved = {"a": np.ones(67)}, {"a": np.zeros(67)}
    wrong = [sample(seed, sampled=0.3, alone=0.3, trained=0.3) for seed in range(4)]
    weights = {"trainer_weights": held, "saved_weights": saved}
    found = find(samples=wrong, engine_weights=held, **weights)
    assert [each.where for each in found.findings] == ["trainer: a"]
    assert len(found.notes) == 1
    found = find(samples=wrong, engine_weights=saved, **weights)
    assert [each.where for each in found.findings] == ["trainer: a", "rollout engine: a"]

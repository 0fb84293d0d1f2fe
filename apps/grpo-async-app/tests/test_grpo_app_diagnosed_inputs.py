"""Causes among images, turns, ends and draws: by the reference itself, without a process of its own."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._diagnosis.causes import Diagnosis
from grpo_async_app._diagnosis.evidence import Evidence, ExaminedSample, LaggedTokens
from grpo_async_app._diagnosis.inputs import add_input_findings
from grpo_async_app._roles.reference import AS_SET, ReferenceRole
from offbeat_core import Floats, Ids, Image, SamplingParams, load_config
from offbeat_testing import reference_model, small_grpo_run, tiny_model, tiny_vision_model

PARAMS = SamplingParams(temperature=0.8)


def reference(tmp_path: Path, model: Path) -> ReferenceRole:
    config = load_config(small_grpo_run(tmp_path, model), GrpoConfig)
    return ReferenceRole(config=config, model_path=str(model), num_threads=1)


def find(role: ReferenceRole | None = None, params: SamplingParams = PARAMS, **evidence: Any) -> Diagnosis:
    async def explain_images(samples: Any, side: str) -> Mapping[str, float]:
        assert role is not None
        sequences = [(sample.ids, sample.num_prompt, sample.images) for sample in samples]
        return role.image_errors(sequences, [getattr(each, HELD[side]) for each in samples], 1.0)

    async def explain_drawn(samples: Any) -> Mapping[str, float]:
        return role.drawn_likelihoods([(each.ids, each.num_prompt) for each in samples], params) if role else {}

    found = Diagnosis(mismatch=0.0, rounding=0.0)
    settings: dict[str, Any] = {"samples": [], **evidence}
    asyncio.run(add_input_findings(Evidence(**settings), found, explain_images, explain_drawn))
    return found


HELD = {"rollout engine": "sampled", "trainer": "trained"}


def sample(ids: Ids, num_prompt: int, right: Floats, **changed: Any) -> ExaminedSample:
    """One on which all agree, but for what is given."""
    names = ("sampled", "alone", "trained", "reference", "rounded_engine", "rounded_trainer")
    made = ExaminedSample(ids=ids, num_prompt=num_prompt, occasion="alone", **dict.fromkeys(names, right))
    return replace(made, **changed)


# ── images ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def pictured_prompt(model: Any, num_images: int) -> tuple[Ids, tuple[Image, ...]]:
    """Return ids of words, with the placeholders of images of 64 x 64 pixels, and these."""
    rng, image_token = np.random.default_rng(0), model.config.image_token_id
    patches = (64 // model.config.vision_config.patch_size) ** 2 // model.config.vision_config.spatial_merge_size**2
    words = rng.integers(3, 200, 24)
    around = [[model.config.vision_start_token_id, *[image_token] * patches, model.config.vision_end_token_id]]
    ids = np.concatenate([*around * num_images, words]).astype(np.int32)
    images = [rng.integers(0, 256, (64, 64, 3), np.uint8) for _ in range(num_images)]
    return ids, tuple(images)


SEEN_OTHERWISE = {
    "red and blue swapped": lambda images: [image[..., ::-1].copy() for image in images],
    "mirrored": lambda images: [image[:, ::-1].copy() for image in images],
    "images in reverse order": lambda images: images[::-1],
    "blank": lambda images: [np.full_like(image, 255) for image in images],
}


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_it_is_named_what_a_side_makes_of_images(tmp_path: Path, family: Any) -> None:
    folder = tiny_vision_model(tmp_path / "model", family, spread=0.2)
    role = reference(tmp_path, folder)
    ids, images = pictured_prompt(role._model("float32"), 2)
    start = len(ids) - 16
    right = role.logprobs(ids, "float32", 1.0, images)[start:]
    for name, change in SEEN_OTHERWISE.items():
        other = role.logprobs(ids, "float32", 1.0, change(images))[start:]
        assert np.abs(other - right).mean() > 1e-3, f"the model does not see what is {name}"
        for side, held in HELD.items():
            one = sample(ids, start, right, images=images, **{held: other})
            [finding] = find(role, pictured=[one]).findings
            assert (finding.kind, finding.where) == ("inputs", f"{side}: images")
            assert finding.text.endswith(name)
    assert find(role, pictured=[sample(ids, start, right, images=images)]).findings == []


# ── draws ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

DRAWN_BY: dict[str, dict[str, Any]] = {
    AS_SET: {},
    "top_k = 20 in place of none": {"top_k": 20},
    "top_p = 0.7 in place of 1": {"top_p": 0.7},
    "temperature = 1.4 in place of 0.8": {"temperature": 1.4},
}


@pytest.mark.parametrize("name", DRAWN_BY)
def test_samples_say_what_they_were_drawn_from(tmp_path: Path, name: str) -> None:
    """Their log-probabilities are right: only that some tokens never come, or come too often, shows it."""
    folder = tiny_model(tmp_path / "model", spread=0.2)
    role, samples = reference(tmp_path, folder), []
    for seed in range(8):
        drawn = draw(reference_model(folder), seed, **{"temperature": 0.8, **DRAWN_BY[name]})
        right = role.logprobs(drawn, "float32", 0.8)[6:]
        samples.append(sample(drawn, 6, right))
    found = find(role, samples=samples).findings
    assert [each.where for each in found] == ([] if name == AS_SET else [f"rollout engine: draws: {name}"])


def test_a_token_that_is_drawn_too_often_is_named(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model", spread=0.2)
    role, samples = reference(tmp_path, folder), []
    for seed in range(8):
        drawn = draw(reference_model(folder), seed, temperature=0.8)
        drawn[6::4] = 77
        samples.append(sample(drawn, 6, role.logprobs(drawn, "float32", 0.8)[6:]))
    [finding] = find(role, samples=samples).findings
    assert finding.where.startswith("rollout engine: draws: another logit of token 77, ")


def test_a_limit_that_is_none_of_the_run_is_named() -> None:
    [finding] = find(num_cut_short=3).findings
    assert (finding.kind, finding.where) == ("inputs", "rollout engine: stop")
    assert "3 of 0 samples end before max_tokens" in finding.text


# ── what is reported ──────────────────────────────────────────────────────────────────────────────────────────────────

NUM_PROMPT = 20


def penalised(logits: Any, ids: Ids, change: Any) -> Any:
    """Change the logits of tokens that were sampled before each place, given how often."""
    logits = logits.clone()
    for row in range(NUM_PROMPT - 1, len(ids)):
        seen, counts = np.unique(ids[NUM_PROMPT : row + 1], return_counts=True)
        logits[row, seen] = change(logits[row, seen], torch.from_numpy(counts))
    return logits


def with_logit(logits: Any, token: int, more: float) -> Any:
    logits = logits.clone()
    logits[:, token] += more
    return logits


REPORTED: dict[str, Any] = {
    AS_SET: lambda logits, ids: logits,
    "logarithms to base 2": lambda logits, ids: (logits / 0.8).log_softmax(-1) / np.log(2),
    "0.5 times the right ones": lambda logits, ids: (logits / 0.8).log_softmax(-1) / 2,
    "none is below -2": lambda logits, ids: (logits / 0.8).log_softmax(-1).clamp(min=-2),
    "rounded to bfloat16": lambda logits, ids: (logits / 0.8).log_softmax(-1).bfloat16().float(),
    "another logit of token 50 (+4)": lambda logits, ids: with_logit(logits, 50, 4.0),
    "another logit of token 60 (-inf)": lambda logits, ids: with_logit(logits, 60, -np.inf),
    "a frequency penalty of 0.5": lambda logits, ids: penalised(logits, ids, lambda x, n: x - 0.5 * n),
    "a presence penalty of 0.5": lambda logits, ids: penalised(logits, ids, lambda x, n: x - 0.5),
    "a repetition penalty of 1.2 on what was sampled": lambda logits, ids: penalised(
        logits, ids, lambda x, n: torch.where(x > 0, x / 1.2, x * 1.2)
    ),
}
PROMPTS: dict[str, Any] = {
    "the prompt without its last 2 tokens": lambda prompts, n: prompts[n][:-2],
    "the prompt without its first 3 tokens": lambda prompts, n: prompts[n][3:],
    "a token behind the prompt (2)": lambda prompts, n: np.append(prompts[n], np.int32(2)),
    "the prompt of another sample": lambda prompts, n: prompts[n - 1],
}


@pytest.mark.parametrize("name", [*REPORTED, *PROMPTS])
def test_it_is_told_what_was_reported(tmp_path: Path, name: str) -> None:
    folder = tiny_model(tmp_path / "model", spread=0.2)
    role, rng = reference(tmp_path, folder), np.random.default_rng(3)
    sequences = [rng.integers(3, 300, 60).astype(np.int32) for _ in range(3)]
    for ids in sequences:
        ids[NUM_PROMPT:][ids[NUM_PROMPT:] == 60] = 61
        ids[-10:] = ids[NUM_PROMPT : NUM_PROMPT + 10]  # some come again
    prompts = [ids[:NUM_PROMPT] for ids in sequences]
    reported = []
    for number, ids in enumerate(sequences):
        prompt = PROMPTS[name](prompts, number) if name in PROMPTS else prompts[number]
        whole = np.concatenate([prompt, ids[NUM_PROMPT:]])
        with torch.no_grad():
            logits = role._logits(whole, "float32")
        changed = REPORTED[name](logits, ids) if name in REPORTED else logits
        rows = torch.arange(len(prompt) - 1, len(whole) - 1)
        is_score = bool(changed.max() <= 0)
        scores = changed if is_score else (changed / 0.8).log_softmax(-1)
        reported.append(scores[rows, torch.from_numpy(ids[NUM_PROMPT:]).long()].numpy())
    errors = role.sampling_errors([(ids, NUM_PROMPT) for ids in sequences], reported, PARAMS)
    best = min(errors, key=lambda reading: errors[reading])
    assert best == name
    assert name == AS_SET or errors[best] < 0.1 * errors[AS_SET]


def draw(model: Any, seed: int, *, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Ids:
    """[6 + 40] ids, sampled by transformers' own `generate`."""
    torch.manual_seed(seed)
    prompt = torch.randint(3, 300, (1, 6))
    settings = {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    drawn = model.generate(prompt, max_new_tokens=40, min_new_tokens=40, eos_token_id=319, pad_token_id=0, **settings)
    ids: Ids = drawn[0].numpy().astype(np.int32)
    return ids


# ── what the run holds ────────────────────────────────────────────────────────────────────────────────────────────────


def tokens(nats: float, lag: int, *, later: bool = False) -> LaggedTokens:
    return LaggedTokens(lag=lag, is_later_turn=later, errors=np.full(50, nats, np.float32))


def test_later_turns_that_differ_farther_than_first_ones_are_named() -> None:
    [finding] = find(lagged=[tokens(0.02, 1), tokens(0.9, 1, later=True)]).findings
    assert (finding.kind, finding.where) == ("inputs", "run: later turns")
    assert find(lagged=[tokens(0.02, 1), tokens(0.11, 1, later=True), tokens(0.9, 3, later=True)]).findings == []


def test_samples_without_lag_that_differ_where_fresh_ones_do_not_are_named() -> None:
    fresh = sample(np.arange(20, dtype=np.int32), 4, np.full(16, -1.0, np.float32))
    [finding] = find(samples=[fresh], lagged=[tokens(0.5, 0), tokens(0.5, 1)]).findings
    assert (finding.kind, finding.where) == ("state", "run: the engine that sampled")
    assert find(samples=[fresh], lagged=[tokens(0.05, 0), tokens(0.5, 1)]).findings == []


def test_samples_that_go_on_after_their_end_are_named() -> None:
    [finding] = find(num_past_end=2).findings
    assert (finding.kind, finding.where) == ("inputs", "rollout engine: stop")

"""The token budget and activation checkpointing that the memory of a device has room for."""

from collections.abc import Callable
from typing import Any

import pytest

from offbeat_core import ConfigError, ModelError, TrainLayout
from offbeat_placement import BudgetSettings, ModelShape, choose_budget, train_memory

QWEN3: dict[str, Any] = {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8}
SHAPES = {
    "0.6B": ModelShape.from_config(
        {
            **QWEN3,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "tie_word_embeddings": True,
        }
    ),
    "8B": ModelShape.from_config(
        {
            **QWEN3,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "tie_word_embeddings": False,
        }
    ),
}
SAFE = ": recomputing makes a run a third slower, and a run out of memory ends"


def of_trainer(model: str, num_ranks: int) -> Callable[[BudgetSettings], int]:
    """Return the bytes of a rank by its settings, as FSDP shares the model out."""
    layout, shape = TrainLayout(dp=num_ranks, zero_stage=3), SHAPES[model]
    return lambda engine: train_memory(engine, layout, shape, on_cpu=False).estimate(shape).num_bytes


def choose(
    model: str = "0.6B", num_ranks: int = 1, gib: int = 80, given: dict[str, Any] | None = None, **known: Any
) -> tuple[int, bool | str, tuple[str, ...]]:
    engine = BudgetSettings(dtype="bfloat16", **(given or {}))
    held = {"trainer": of_trainer(model, num_ranks)}
    settled, said = choose_budget(engine, held, gib * 2**30, **{"on_cpu": False} | known)
    return settled.max_tokens_per_microbatch, settled.activation_checkpointing, said


@pytest.mark.parametrize(
    ("model", "num_ranks", "gib", "tokens", "recomputes", "why"),
    [
        ("0.6B", 1, 16, 8192, True, "trainer 12.8 of 13.6 GiB"),
        ("0.6B", 1, 80, 32768, False, "trainer 67.9 of 68 GiB"),
        ("0.6B", 1, 141, 32768, False, "trainer 67.9 of 120 GiB"),
        ("0.6B", 8, 16, 32768, True, "trainer 9.75 of 13.6 GiB"),
        ("0.6B", 8, 80, 32768, False, "trainer 62 of 68 GiB"),
        ("0.6B", 8, 141, 32768, False, "trainer 62 of 120 GiB"),
        ("8B", 1, 16, 8192, True, "trainer 129 GiB, more than 85% of 16 GiB"),
        ("8B", 1, 80, 8192, True, "trainer 129 GiB, more than 85% of 80 GiB"),
        ("8B", 1, 141, 8192, True, "trainer 129 GiB, more than 85% of 141 GiB"),
        ("8B", 8, 16, 8192, True, "trainer 35.4 GiB, more than 85% of 16 GiB"),
        ("8B", 8, 80, 32768, True, "trainer 46.6 of 68 GiB"),
        ("8B", 8, 141, 8192, False, "trainer 85.6 of 120 GiB"),
        ("0.6B", 1, 0, 8192, True, f"the memory of the devices is not known{SAFE}"),
    ],
)
def test_the_largest_budget_that_fits_is_chosen_and_recomputing_only_where_none_does(
    model: str, num_ranks: int, gib: int, tokens: int, recomputes: bool, why: str
) -> None:
    chosen = f"max_tokens_per_microbatch = {tokens}, activation_checkpointing = {str(recomputes).lower()}"
    assert choose(model, num_ranks, gib) == (tokens, recomputes, (f"engine.{chosen} ({why})",))


@pytest.mark.parametrize(
    ("given", "gib", "tokens", "recomputes", "said"),
    [
        ({"max_tokens_per_microbatch": 10240}, 80, 10240, False, "engine.activation_checkpointing = false (trainer 2"),
        ({"max_tokens_per_microbatch": 4096}, 16, 4096, True, "engine.activation_checkpointing = true (trainer 1"),
        ({"max_tokens_per_microbatch": 4096}, 0, 4096, True, "engine.activation_checkpointing = true (the memory"),
        ({"activation_checkpointing": True}, 80, 32768, True, "engine.max_tokens_per_microbatch = 32768 (trainer 1"),
        ({"activation_checkpointing": False}, 16, 8192, False, "engine.max_tokens_per_microbatch = 8192 (trainer 25"),
        ({"activation_checkpointing": False}, 48, 16384, False, "engine.max_tokens_per_microbatch = 16384 (trainer 3"),
        ({"activation_checkpointing": False}, 0, 8192, False, "engine.max_tokens_per_microbatch = 8192 (the memory"),
        ({"activation_checkpointing": False, "max_tokens_per_microbatch": 64}, 0, 64, False, ""),
    ],
)
def test_what_is_given_is_kept_and_the_other_is_chosen_around_it(
    given: dict[str, Any], gib: int, tokens: int, recomputes: bool, said: str
) -> None:
    found = choose(gib=gib, given=given)
    assert found[:2] == (tokens, recomputes)
    assert "".join(found[2]).startswith(said)
    assert bool(found[2]) == bool(said)


@pytest.mark.parametrize(
    ("known", "gib", "tokens", "recomputes"),
    [
        ({"longest_tokens": 20000}, 80, 32768, False),
        ({"longest_tokens": 20000}, 60, 20000, False),
        ({"longest_tokens": 40000}, 80, 40000, True),
        ({"longest_tokens": 100_000}, 16, 8192, True),
        ({"step_tokens": 500}, 80, 8192, False),
        ({"step_tokens": 8193}, 80, 16384, False),
        ({"step_tokens": 60000, "longest_tokens": 20000}, 80, 32768, False),
        ({"step_tokens": 20000, "longest_tokens": 20000}, 80, 20000, False),
    ],
)
def test_a_budget_holds_the_longest_sample_where_memory_does_and_is_not_far_above_a_step(
    known: dict[str, int], gib: int, tokens: int, recomputes: bool
) -> None:
    assert choose(gib=gib, **known)[:2] == (tokens, recomputes)


def test_processors_compute_as_they_did() -> None:
    said = "engine.max_tokens_per_microbatch = 8192, activation_checkpointing = false (trains on CPUs)"
    assert choose(on_cpu=True, longest_tokens=20000) == (8192, False, (said,))
    assert choose(on_cpu=True, given={"activation_checkpointing": True})[:2] == (8192, True)


def test_a_model_without_an_estimate_recomputes() -> None:
    def unknown(_: BudgetSettings) -> int:
        raise ModelError("of a family that is not known")

    settled, said = choose_budget(BudgetSettings(), {"trainer": unknown}, 80 * 2**30, on_cpu=False)
    assert (settled.max_tokens_per_microbatch, settled.activation_checkpointing) == (8192, True)
    assert said[0].endswith(f"(the memory of the model cannot be estimated{SAFE})")


def test_roles_that_are_loaded_together_come_before_the_trainer_alone() -> None:
    """An engine of 60 GiB beside the trainer leaves room for it with checkpointing, one of 75 GiB for nothing."""
    alone = of_trainer("0.6B", 1)

    def chosen(engine_gib: int) -> tuple[int, bool | str, str]:
        held = {"trainer + rollout": lambda engine: alone(engine) + engine_gib * 2**30, "trainer": alone}
        settled, [said] = choose_budget(BudgetSettings(dtype="bfloat16"), held, 96 * 2**30, on_cpu=False)
        return settled.max_tokens_per_microbatch, settled.activation_checkpointing, said

    assert chosen(60)[:2] == (32768, True)
    assert "(trainer + rollout 7" in chosen(60)[2]
    assert chosen(75)[:2] == (32768, False)
    assert "(trainer 67.9 of 81.6 GiB)" in chosen(75)[2]


def test_a_budget_too_small_for_engines_is_refused() -> None:
    assert BudgetSettings(max_tokens_per_microbatch=16).max_tokens_per_microbatch == 16
    with pytest.raises(ConfigError, match="max_tokens_per_microbatch = 15 is too small for a pass: set it to 16"):
        BudgetSettings(max_tokens_per_microbatch=15)

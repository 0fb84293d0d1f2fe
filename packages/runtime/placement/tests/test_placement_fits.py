"""The table of docs/placement.md says which models train on so many devices of 80 GB; OFFBEAT_RENEW=1 writes it."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from offbeat_core import TrainEngineSettings, TrainLayout
from offbeat_placement import FILLED_SHARE, ModelShape, train_memory

PAGE = Path(__file__).parents[4] / "docs" / "placement.md"
HEAD = "| model | trains | "
DEVICE_BYTES = 80 * 2**30
DEVICES, CONTEXTS, MOST_DEVICES = (1, 2, 8), (8, 32, 128), 128
QWEN3 = {"model_type": "qwen3", "head_dim": 128, "vocab_size": 151_936, "num_key_value_heads": 8}
EXPERTS = {"model_type": "qwen3_moe", "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-4B": {
        **QWEN3,
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 9728,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": {
        **QWEN3,
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 12_288,
    },
    "Qwen3-32B": {
        **QWEN3,
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "intermediate_size": 25_600,
    },
    "Qwen3-30B-A3B": {
        **QWEN3,
        **EXPERTS,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "attention_bias": True,
    },
    "Qwen3.5-9B": AutoConfig.for_model("qwen3_5_text").to_dict(),  # transformers' defaults are these models' sizes
    "Qwen3.5-35B-A3B": AutoConfig.for_model("qwen3_5_moe_text").to_dict(),
}
BILLIONS = {
    "Qwen3-4B": 4.02,
    "Qwen3-8B": 8.19,
    "Qwen3-32B": 32.76,
    "Qwen3-30B-A3B": 30.53,
    "gpt-oss-20b": 20.91,
    "Qwen3.5-9B": 8.95,
    "Qwen3.5-35B-A3B": 34.66,
}
"""Parameters, as the models' cards give them; those of Qwen3.5 without the vision tower."""


@dataclass(frozen=True)
class Trained:
    """Weights that train, bytes of the moments of each, and of one that does not; what waits in main memory."""

    lora_rank: int = 0
    frozen_bytes: float = 2
    offloads: bool = False
    moment_bytes: float = 8


WHAT = {"all": Trained(), "all, 8-bit moments": Trained(moment_bytes=2.03), "LoRA": Trained(lora_rank=16)}
WHAT["all, offloaded"] = Trained(offloads=True)
WHAT["LoRA, offloaded"] = Trained(lora_rank=16, offloads=True)
WHAT["QLoRA"] = Trained(lora_rank=16, frozen_bytes=0.516)
WHAT["QLoRA, offloaded"] = Trained(lora_rank=16, frozen_bytes=0.516, offloads=True)


def bytes_of_rank(
    shape: ModelShape, trained: Trained, *, tokens: int, recomputes: bool, num_ranks: int = 1, cp: int = 1, ep: int = 1
) -> int:
    """Bytes of one rank of the torch engine, in bfloat16, whose micro-batch is one sequence."""
    engine = TrainEngineSettings(
        dtype="bfloat16",
        lora_rank=trained.lora_rank,
        max_tokens_per_microbatch=tokens,
        activation_checkpointing=recomputes,
    )
    layout = TrainLayout(
        dp=num_ranks // cp,
        cp=cp,
        ep=ep,
        zero_stage=3,
        vocabulary_bytes=2,
        frozen_weight_bytes=trained.frozen_bytes if trained.lora_rank else 0,
        optimizer_bytes=trained.moment_bytes,
        offloads_inputs=trained.offloads,
        offloads_optimizer=trained.offloads,
        fuses_recurrence=True,
    )
    return train_memory(engine, layout, shape, on_cpu=False).estimate(shape).num_bytes


def ways(num_ranks: int, *, has_experts: bool) -> Iterator[tuple[str, bool, int, int]]:
    """Yield ways to train, the simplest first: what is said of one, whether it recomputes, and ranks of cp and ep."""
    yield "yes", False, 1, 1
    for ep in (1, 8) if has_experts and num_ranks >= 8 else (1,):
        for cp in (1, 2, 4, 8, 16, 32):
            if cp <= num_ranks:
                yield "c" + f", cp {cp}" * (cp > 1) + f", ep {ep}" * (ep > 1), True, cp, ep


def fits(shape: ModelShape, trained: Trained, *, tokens: int, num_devices: int) -> str:
    """Return how a model trains on so many devices, or on the next power of two on which it does."""
    num_ranks = num_devices
    while num_ranks <= MOST_DEVICES:
        for said, recomputes, cp, ep in ways(num_ranks, has_experts=shape.expert_parameters > 0):
            how = {"recomputes": recomputes, "num_ranks": num_ranks, "cp": cp, "ep": ep}
            needed = bytes_of_rank(shape, trained, tokens=tokens, **how)
            if needed <= FILLED_SHARE * DEVICE_BYTES:
                return said if num_ranks == num_devices else f"{num_ranks}: {said}"
        num_ranks *= 2
    return "no"


def table() -> list[str]:
    columns = [f"{context}k on {num}" for context in CONTEXTS for num in DEVICES]
    lines = [HEAD + " | ".join(columns) + " |", "|---" * (2 + len(columns)) + "|"]
    for name, config in MODELS.items():
        shape = ModelShape.from_config(config)
        for what, trained in WHAT.items():
            cells = [
                fits(shape, trained, tokens=context * 1024, num_devices=num) for context in CONTEXTS for num in DEVICES
            ]
            lines.append(f"| {name} | {what} | " + " | ".join(cells) + " |")
    return lines


def test_the_page_says_what_fits() -> None:
    lines = PAGE.read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(HEAD))
    stop = next(number for number in range(first, len(lines)) if not lines[number].startswith("|"))
    if os.environ.get("OFFBEAT_RENEW"):
        PAGE.write_text("\n".join([*lines[:first], *table(), *lines[stop:]]) + "\n")
    else:
        assert lines[first:stop] == table()


@pytest.mark.parametrize("name", MODELS)
def test_the_sizes_are_those_of_the_models(name: str) -> None:
    assert round(ModelShape.from_config(MODELS[name]).num_parameters / 1e9, 2) == BILLIONS[name]


def test_long_contexts_fit_under_adapters() -> None:
    """8B at 64k on one device of 80 GB; 4B at 64k in 42 GiB, which prime-rl reports."""
    held = {
        name: bytes_of_rank(ModelShape.from_config(MODELS[name]), WHAT["LoRA"], tokens=64 * 1024, recomputes=True)
        for name in ("Qwen3-8B", "Qwen3-4B")
    }
    assert held["Qwen3-8B"] <= FILLED_SHARE * DEVICE_BYTES
    assert held["Qwen3-4B"] <= 42 * 2**30

"""Shapes of the models that pieces measure with random weights, and what a step on them reads and computes."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from offbeat_testing import tiny_model

BFLOAT16_BYTES: Final = 2
SPREAD: Final = 0.02
"""Standard deviation of the weights, as models of these sizes are initialised."""
MAX_POSITIONS: Final = 40960


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Shape of a Qwen3 with a tied embedding.

    Args:
        num_layers: decoder layers.
        hidden_size: of the residual stream.
        intermediate_size: width of the feed-forward layers.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: numbers of each head.
        vocab_size: rows of the embedding.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def num_parameters(self) -> int:
        """Parameters of all matrices. A decoding step reads each of them once: the tied embedding is the head."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * layer + self.vocab_size * self.hidden_size

    def step_bytes(self, num_cached: float) -> float:
        """Bytes that a decoding step in bfloat16 reads: every weight, and keys and values of the cached tokens."""
        cached = 2 * self.num_layers * self.num_kv_heads * self.head_dim * num_cached
        return BFLOAT16_BYTES * (self.num_parameters + cached)

    def training_operations(self, num_sequences: int, length: int) -> float:
        """Count the operations of forward and backward: 6 for each parameter and token, 6 for each score that
        causal attention uses, times its size.

        Source: PaLM (arXiv:2204.02311), appendix B.
        """
        attention = 6 * self.num_layers * self.num_heads * self.head_dim * num_sequences * length**2
        return 6.0 * self.num_parameters * num_sequences * length + attention


QWEN3_0_6B: Final = Shape(
    num_layers=28,
    hidden_size=1024,
    intermediate_size=3072,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151936,
)
QWEN3_8B: Final = Shape(
    num_layers=36,
    hidden_size=4096,
    intermediate_size=12288,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151936,
)
"""Shape of Qwen3-8B, which has a second matrix for its embedding; a decoding step reads a few rows of it."""
TINY: Final = Shape(
    num_layers=2, hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, head_dim=32, vocab_size=320
)
"""In tests on a CPU; `vocab_size` holds the tokenizer of `tiny_model`."""
PAIR_OF_8B: Final = replace(QWEN3_8B, num_layers=2, vocab_size=TINY.vocab_size)
"""Two layers of Qwen3-8B, with next to no vocabulary: what remains is what each of its 36 layers does."""


def make_model(folder: Path, shape: Shape = QWEN3_0_6B, *, tiny: bool, device: torch.device | None = None) -> Path:
    """Write a model with random weights.

    Args:
        folder: made when missing.
        shape: of the model.
        tiny: take the shape of a test in its place.
        device: draws the weights, an accelerator in a fraction of a CPU's time; None: the CPU.
    """
    if tiny:
        return tiny_model(folder, "qwen3")
    widths: dict[str, Any] = {
        "intermediate_size": shape.intermediate_size,
        "head_dim": shape.head_dim,
        "max_position_embeddings": MAX_POSITIONS,
    }
    with device or torch.device("cpu"):
        return tiny_model(
            folder,
            "qwen3",
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            spread=SPREAD,
            config=widths,
        )

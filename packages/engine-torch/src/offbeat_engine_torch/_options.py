"""What this backend takes beyond `TrainEngineConfig`, under its `options`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from offbeat_types import read_options, setting


@dataclass(frozen=True, kw_only=True)
class TorchEngineOptions:
    """Options of the torch engine."""

    temperature: float = setting(1.0, "Log-probabilities are those of softmax(logits / temperature).", gt=0)
    share_prompts: bool = setting(True, "Compute a prompt once for all sequences that begin with it.")
    entropy_gradient: bool = setting(False, "Let the loss's gradient flow through the entropy.")
    tensor_parallel: int = setting(1, "Ranks that share every layer; the ranks left over are data parallel.", ge=1)
    train_vision: bool = setting(True, "Train the vision tower, if there is one; false leaves it as it is.")
    head_dtype: str = setting(
        "float32",
        "Number format of the products of the vocabulary head; bfloat16 is coarser by 0.01 to 0.1 nats.",
        choices=("float32", "bfloat16"),
    )

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Self:
        """Check names, types and bounds.

        Raises:
            ConfigError: whatever is wrong.
        """
        return read_options("the torch engine", cls, options)

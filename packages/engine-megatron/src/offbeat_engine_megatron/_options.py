"""What this backend takes beyond `TrainEngineConfig`, under its `options`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from offbeat_types import read_options, setting


@dataclass(frozen=True, kw_only=True)
class MegatronEngineOptions:
    """Options of the megatron engine. The ranks that the parallel sizes leave over are data parallel."""

    temperature: float = setting(1.0, "Log-probabilities are those of softmax(logits / temperature).", gt=0)
    entropy_gradient: bool = setting(False, "Let the loss's gradient flow through the entropy.")
    tensor_parallel: int = setting(1, "Ranks that share every layer.", "ranks", ge=1)
    sequence_parallel: bool = setting(True, "With tensor_parallel > 1: cut the tokens between layers over its ranks.")
    context_parallel: int = setting(1, "Ranks that share every sequence.", "ranks", ge=1)
    pipeline_parallel: int = setting(1, "Ranks that each hold some of the layers.", "ranks", ge=1)
    virtual_pipeline: int = setting(1, "Parts of the model that each rank of a pipeline holds.", "parts", ge=1)
    expert_parallel: int = setting(1, "Ranks that share the experts.", "ranks", ge=1)
    batch_p2p: bool = setting(False, "Send between stages in batched calls.")
    overlap_p2p: bool = setting(False, "With virtual_pipeline > 1: send between stages while computing.")
    distributed_optimizer: bool = setting(True, "Cut the optimizer's state over data and context parallel ranks.")
    overlap_grad_reduce: bool = setting(
        False, "Reduce gradients while the last micro-batch computes; then one forward_backward makes an update."
    )
    overlap_param_gather: bool = setting(
        False, "Gather updated weights while the next pass computes; needs distributed_optimizer, overlap_grad_reduce."
    )
    mtp_layers: int = setting(
        0, "Layers behind the model that predict later tokens; made anew where model_path holds none.", "layers", ge=0
    )
    mtp_loss_weight: float = setting(0.1, "Weight of their mean loss, which is added to the loss function's.", ge=0)
    mtp_detached: bool = setting(False, "Train these layers alone: no gradient from their loss to the model.")
    train_vision: bool = setting(True, "Train the vision tower, if there is one; false leaves it as it is.")
    save_deadline_s: float = setting(
        1800.0,
        "How long a checkpoint in the background is waited for: by ranks for each other, by a call for its end.",
        "s",
        gt=0,
    )

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Self:
        """Check names, types and bounds.

        Raises:
            ConfigError: whatever is wrong.
        """
        return read_options("the megatron engine", cls, options)

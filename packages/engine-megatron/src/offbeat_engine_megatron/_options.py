"""What this backend takes beyond `TrainEngineConfig`, under its `options`."""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offbeat_types import METADATA_KEY, ConfigError, setting


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
    save_deadline_s: float = setting(
        1800.0,
        "How long a checkpoint in the background is waited for: by ranks for each other, by a call for its end.",
        "s",
        gt=0,
    )


def read_options(options: Mapping[str, Any]) -> MegatronEngineOptions:
    """Check options against their declarations.

    Raises:
        ConfigError: an option is unknown (the text names the nearest), of the wrong type, or out of bounds.
    """
    fields = {field.name: field for field in dataclasses.fields(MegatronEngineOptions)}
    for name, value in options.items():
        if name not in fields:
            near = difflib.get_close_matches(name, fields, 1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(fields))}"
            raise ConfigError(f"the megatron engine has no option {name!r}; {hint}")
        kind = type(fields[name].default)
        fits = type(value) is kind or (kind is float and type(value) is int)
        complaint = kind.__name__ if not fits else fields[name].metadata[METADATA_KEY].complaint(value)
        if complaint:
            raise ConfigError(f"megatron engine option {name} must be {complaint}: got {value!r}")
    return MegatronEngineOptions(**options)

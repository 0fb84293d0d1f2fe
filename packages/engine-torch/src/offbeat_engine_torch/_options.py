"""What this backend takes beyond `TrainEngineConfig`, under its `options`."""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offbeat_types import METADATA_KEY, ConfigError, setting


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


def read_options(options: Mapping[str, Any]) -> TorchEngineOptions:
    """Check options against their declarations.

    Raises:
        ConfigError: an option is unknown (the text names the nearest), of the wrong type, or out of bounds.
    """
    fields = {field.name: field for field in dataclasses.fields(TorchEngineOptions)}
    for name, value in options.items():
        if name not in fields:
            near = difflib.get_close_matches(name, fields, 1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(fields))}"
            raise ConfigError(f"the torch engine has no option {name!r}; {hint}")
        kind = type(fields[name].default)
        fits = isinstance(value, kind) or (kind is float and type(value) is int)
        complaint = kind.__name__ if not fits else fields[name].metadata[METADATA_KEY].complaint(value)
        if complaint:
            raise ConfigError(f"torch engine option {name} must be {complaint}: got {value!r}")
    return TorchEngineOptions(**options)

"""What transformers says of a model folder: the yardstick of both conformance suites."""

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from offbeat_types import Completion, Floats, Ids


def reference_model(folder: Path) -> Any:
    """Load a model folder with transformers, float32, on the CPU, for inference; its vision tower too, if any."""
    import torch

    transformers: Any = import_module("transformers")
    has_vision = hasattr(transformers.AutoConfig.from_pretrained(folder), "vision_config")
    kind = transformers.AutoModelForImageTextToText if has_vision else transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def reference_logprobs(model: Any, ids: Ids, *, temperature: float = 1.0) -> Floats:
    """[T] float32 nats of each token given those before it, computed in one pass; 0 for the first."""
    import torch

    with torch.no_grad():
        tokens = torch.from_numpy(np.asarray(ids, dtype=np.int64))[None]
        logits = model(tokens, use_cache=False).logits[0, :-1].float() / temperature
        chosen = torch.log_softmax(logits, -1).gather(-1, tokens[0, 1:, None])[:, 0]
    return np.concatenate([np.zeros(1, np.float32), chosen.numpy()])


def logprob_errors(model: Any, prompt_ids: Ids, completion: Completion, *, temperature: float = 1.0) -> Floats:
    """[T] float32 nats between what was reported of each sampled token and what `model` says of it."""
    ids = np.concatenate([prompt_ids, completion.ids])
    expected = reference_logprobs(model, ids, temperature=temperature)[len(prompt_ids) :]
    errors: Floats = np.abs(completion.logprobs - expected)
    return errors


def changed_weights(model: Any, *, scale: float = 0.05, seed: int = 1) -> list[tuple[str, Any]]:
    """Add noise to every weight of `model` in place; return (Hugging Face name, copy), tied weights once."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn(tensor.shape, generator=generator) * scale)
    return [(name, tensor.detach().clone()) for name, tensor in model.named_parameters()]

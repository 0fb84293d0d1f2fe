"""Architectures that the installed vLLM serves, read from its table of models without importing vLLM."""

import ast
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from offbeat_core import BackendError, ModelError

_TABLE_FILE: Final = "model_executor/models/registry.py"
_TABLES: Final = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")
"""Tables of models that generate. Left out: embedding, reward and draft models.

Source: vllm 0.32.0, vllm/model_executor/models/registry.py.
"""


SEEING_BOTH_WAYS: Final = ("gemma3", "paligemma", "molmo2", "moondream3", "bagel")
"""Types of models in which tokens of an image see each other, also those that come later.

Source: vllm 0.32.0, vllm/transformers_utils/model_arch_config_convertor.py (is_mm_prefix_lm).
"""


def sees_both_ways(model: Mapping[str, Any]) -> bool:
    """Return whether tokens of an image see those that come later, by a model's config.json."""
    text = model.get("text_config") or {}
    return model.get("model_type") in SEEING_BOTH_WAYS or text.get("use_bidirectional_attention") == "vision"


def check_router(model: Mapping[str, Any]) -> None:
    """Refuse a DeepSeek-V3 whose experts vLLM would score otherwise than transformers.

    transformers computes a sigmoid whatever the config says, and vLLM a softmax where it says nothing, as in a config
    that transformers has made anew; published ones say it.
    Source: vllm 0.32.0, vllm/model_executor/models/deepseek_v2.py (DeepseekV2MoE: `scoring_func`, `topk_method`).

    Raises:
        ModelError: a setting is missing, or another.
    """
    for key, wanted in {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}.items():
        if model.get("model_type") == "deepseek_v3" and model.get(key) != wanted:
            raise ModelError(
                f"config.json of a deepseek_v3 must have {key} = {wanted!r}, for vLLM to route as transformers does, "
                f"and has {model.get(key)!r}: add it"
            )


def served_architecture(model: Mapping[str, Any]) -> str:
    """Return the architecture by which vLLM serves a model.

    Args:
        model: contents of its config.json.

    Raises:
        BackendError: the installed vLLM has no table of models where it is looked for.
        ModelError: none of the model's architectures is in the table.
    """
    names: Sequence[str] = model.get("architectures") or ()
    table = _read_table()
    for name in names:
        if name in table:
            return name
    raise ModelError(f"vLLM's table of models has no {' or '.join(names) or 'model without architectures'}")


def _read_table() -> frozenset[str]:
    spec = find_spec("vllm")
    path = Path(spec.origin).parent / _TABLE_FILE if spec and spec.origin else Path(_TABLE_FILE)
    try:
        tree = ast.parse(path.read_text())
    except OSError as error:
        raise BackendError(f"vLLM's table of models cannot be read ({error}): install vLLM again") from error
    found = set[str]()
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict(keys=keys)) if name in _TABLES:
                found |= {str(key.value) for key in keys if isinstance(key, ast.Constant)}
    return frozenset(found)

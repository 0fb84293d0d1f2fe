"""The tiny model of a rehearsal: of the recipe's family, with random weights and a tokenizer of characters."""

import json
from pathlib import Path
from typing import Final

from offbeat_data import ARITHMETIC_ALPHABET, build_character_tokenizer
from offbeat_recipes._tiny_vision import SEEING, can_draw, make_seeing_model

ALPHABET: Final = ARITHMETIC_ALPHABET + "*[]"
_FAMILY_OF_NAME: Final = {
    "qwen3-vl": "qwen3_vl",
    "qwen2.5-vl": "qwen2_5_vl",
    "qwen2-vl": "qwen2_vl",
    "-a3b": "qwen3_moe",
    "-a22b": "qwen3_moe",
    "qwen3": "qwen3",
    "qwen2": "qwen2",
    "llama": "llama",
    "smollm": "llama",
}
"""Where there is no config.json: what in a folder's name tells the family; the first that fits."""
_LANGUAGE_HALF: Final = {
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen2_5_vl": "qwen2",
    "qwen2_vl": "qwen2",
}
"""Families that see, and the family of the language model in each."""
_DENSE: Final = {"qwen3_moe": "qwen3", "mistral": "llama", "qwen3_vl_moe": "qwen3_vl", "qwen2_vl": "qwen2_5_vl"}
"""Families that the embedded engines do not take, and the nearest that they do."""
_DECODED: Final = ("qwen3", "qwen2", "llama", *SEEING)


def tiny_family(model_path: str, *, has_experts: bool, can_see: bool) -> tuple[str, str]:
    """The family of the model to make, and a notice where it is not the recipe's own.

    Args:
        model_path: of the recipe; the folder need not be there.
        has_experts: trainer and rollout engine take mixtures of experts; otherwise dense models only.
        can_see: the trainer takes images.
    """
    own = made = _read_family(model_path)
    if not (can_see and can_draw()):
        made = _LANGUAGE_HALF.get(own, own)
    if not has_experts or made in _LANGUAGE_HALF:
        made = _DENSE.get(made, made)
    if made not in (*_DECODED, *_DENSE):
        made = _DECODED[0]
    if made == own:
        return made, ""
    return made, f"model: {own or 'of a family that cannot be told'} is rehearsed with a {made}"


def _read_family(model_path: str) -> str:
    folder = Path(model_path).expanduser()
    try:
        return str(json.loads((folder / "config.json").read_text())["model_type"])
    except (OSError, ValueError, KeyError, TypeError):
        name = folder.name.lower()
        return next((family for part, family in _FAMILY_OF_NAME.items() if part in name), "")


def make_tiny_model(folder: Path, family: str, *, max_positions: int, seed: int) -> None:
    """Write a model of some ten thousand weights in Hugging Face format.

    Two layers, four heads and four experts, so that two ranks can share it in every way that they share a large one.

    Args:
        folder: made when missing.
        family: `model_type` of a causal language model.
        max_positions: longest sequence, in tokens.
        seed: of the weights.
    """
    import torch  # imported late: only a rehearsal's driver needs it
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # one bar for one small file
    if family in SEEING:
        make_seeing_model(folder, family, alphabet=ALPHABET, max_positions=max_positions, seed=seed)
        return
    tokenizer = build_character_tokenizer(folder, ALPHABET)
    torch.manual_seed(seed)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = AutoConfig.for_model(
        family,
        vocab_size=-(-tokenizer.vocab_size // 8) * 8,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the narrowest that vLLM decodes on a CPU
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_id,
        pad_token_id=tokenizer.pad_id,
        **(experts if family.endswith("_moe") else {}),
    )
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)

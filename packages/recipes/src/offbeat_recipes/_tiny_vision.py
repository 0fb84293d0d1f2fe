"""A tiny vision-language model with random weights, for a rehearsal of a recipe with images."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from offbeat_data import build_character_tokenizer

SEEING: Final = ("qwen3_vl", "qwen2_5_vl")
"""Families with a vision tower that can be made here."""
MAX_IMAGE_TOKENS: Final = 16
SQUARE_PX: Final = 8
"""Side of what becomes one token: `_MERGE` patches of `_PATCH_PX`."""
_PATCH_PX: Final = 4
_MERGE: Final = SQUARE_PX // _PATCH_PX
_MARKS: Final = {
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
    "image": "<|image_pad|>",
    "video": "<|video_pad|>",
}
_CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def can_draw() -> bool:
    """Whether Pillow is installed."""
    return find_spec("PIL") is not None


def make_seeing_model(folder: Path, family: str, *, alphabet: str, max_positions: int, seed: int) -> None:
    """Write a Qwen3-VL or Qwen2.5-VL of some ten thousand weights, with tokenizer and image processor.

    Args:
        folder: made when missing.
        family: one of `SEEING`.
        alphabet: characters of its tokenizer.
        max_positions: longest sequence, in tokens.
        seed: of the weights.
    """
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    tokenizer = _write_tokenizer(folder, alphabet)
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(mark) for name, mark in _MARKS.items()}
    text = _text_settings(tokenizer, family, max_positions)
    config = AutoConfig.for_model(
        family, text_config=text, vision_config=_tower_settings(family), tie_word_embeddings=True, **ids
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config).float()
    model.generation_config.eos_token_id = text["eos_token_id"]
    model.save_pretrained(folder)
    _write_processor(folder, tokenizer)


def _write_tokenizer(folder: Path, alphabet: str) -> Any:
    """A tokenizer of characters that knows the marks of images."""
    from transformers import AutoTokenizer

    build_character_tokenizer(folder, alphabet)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_MARKS.values())})
    tokenizer.chat_template = _CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def _text_settings(tokenizer: Any, family: str, max_positions: int) -> dict[str, Any]:
    """Two layers of heads of 32, the narrowest that vLLM decodes on a CPU; time, height and width share their pairs."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    if family != "qwen3_vl":  # the others have no width of their own
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return {
        "vocab_size": -(-len(tokenizer) // 8) * 8,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "max_position_embeddings": max_positions,
        "rope_parameters": {**rope, "mrope_interleaved": True} if family == "qwen3_vl" else rope,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **heads,
    }


def _tower_settings(family: str) -> dict[str, Any]:
    sizes = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": _PATCH_PX,
        "spatial_merge_size": _MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": 64,
    }
    if family == "qwen3_vl":
        return {**sizes, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    return {**sizes, "window_size": 4 * _PATCH_PX, "fullatt_block_indexes": [1]}


def _write_processor(folder: Path, tokenizer: Any) -> None:
    """The image processor; with torchvision the whole of it, which vLLM asks for."""
    transformers: Any = import_module("transformers")
    square = SQUARE_PX**2
    size = {"shortest_edge": 4 * square, "longest_edge": MAX_IMAGE_TOKENS * square}
    patches = {"patch_size": _PATCH_PX, "merge_size": _MERGE, "temporal_patch_size": 2}
    if find_spec("torchvision") is None:
        transformers.Qwen2VLImageProcessorPil(size=size, **patches).save_pretrained(folder)
        return
    transformers.Qwen3VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(size=size, **patches),
        tokenizer=tokenizer,
        video_processor=transformers.Qwen3VLVideoProcessor(**patches),
        chat_template=tokenizer.chat_template,
    ).save_pretrained(folder)

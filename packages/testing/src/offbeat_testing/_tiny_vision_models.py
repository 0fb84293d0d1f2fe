"""Tiny vision-language model folders, made on the spot: real architectures and processors, and no file fetched."""

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal

from offbeat_testing._tiny_models import tiny_tokenizer

VISION_TOKENS: Final = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
VISION_CHAT_TEMPLATE: Final = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Its words are those of the small models' ChatML; its images stand as in Qwen-VL's own template."""
PATCH_PIXELS: Final = 4
MERGE: Final = 2

TinyVisionFamily = Literal["qwen3_vl", "qwen2_5_vl"]


def tiny_vision_model(
    folder: Path,
    family: TinyVisionFamily = "qwen3_vl",
    *,
    tied: bool = True,
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
    spread: float = 0.1,
    seed: int = 0,
) -> Path:
    """Write a random Qwen3-VL or Qwen2.5-VL, float32, with tokenizer and processor, ready for `AutoProcessor`.

    A placeholder token stands for 8 x 8 pixels, and an image for 4 to 64 of them. The processor needs torchvision;
    without it the folder is ready for `AutoImageProcessor` and `AutoTokenizer` only.

    Args:
        folder: made when missing.
        family: architecture.
        tied: input and output embedding are one tensor.
        text: settings of the language model that take the place of the tiny one's.
        vision: such settings of the tower.
        spread: standard deviation of the weights; larger means a more peaked next-token distribution.
        seed: of the weights.

    Returns:
        `folder`.
    """
    import torch

    transformers: Any = import_module("transformers")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(VISION_TOKENS)})
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    settings = _settings(tokenizer, family, tied=tied, spread=spread)
    settings["text_config"] |= text or {}
    settings["vision_config"] |= vision or {}
    name = {"qwen3_vl": "Qwen3VL", "qwen2_5_vl": "Qwen2_5_VL"}[family]
    config = getattr(transformers, f"{name}Config")(**settings)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).float().eval()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.ndim == 1:
                tensor.add_(torch.randn_like(tensor) * spread)
    torch.random.set_rng_state(state)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id], pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    _save_processor(folder, tokenizer, name)
    return folder


def _settings(tokenizer: Any, family: TinyVisionFamily, *, tied: bool, spread: float) -> dict[str, Any]:
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(VISION_TOKENS))
    return {
        "text_config": {**_text(tokenizer, family), "tie_word_embeddings": tied, "initializer_range": spread},
        "vision_config": {**_vision(family), "initializer_range": spread},
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "image_token_id": image,
        "video_token_id": video,
        "tie_word_embeddings": tied,
    }


def _text(tokenizer: Any, family: TinyVisionFamily) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
    own: dict[TinyVisionFamily, dict[str, Any]] = {
        "qwen3_vl": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
        "qwen2_5_vl": {"num_attention_heads": 2, "num_key_value_heads": 1},
    }
    return {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "max_position_embeddings": 2048,
        "rope_parameters": {**rope, **({"mrope_interleaved": True} if family == "qwen3_vl" else {})},
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        **own[family],
    }


def _vision(family: TinyVisionFamily) -> dict[str, Any]:
    own: dict[TinyVisionFamily, dict[str, Any]] = {
        "qwen3_vl": {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        # Windows of 4 x 4 patches: an image has several, and parts of some.
        "qwen2_5_vl": {"window_size": 4 * PATCH_PIXELS, "fullatt_block_indexes": [1], "tokens_per_second": 2},
    }
    return {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": PATCH_PIXELS,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": 64,
        **own[family],
    }


def _save_processor(folder: Path, tokenizer: Any, name: str) -> None:
    transformers: Any = import_module("transformers")
    tokenizer.chat_template = VISION_CHAT_TEMPLATE
    patches = {"patch_size": PATCH_PIXELS, "merge_size": MERGE, "temporal_patch_size": 2}
    pixels = (PATCH_PIXELS * MERGE) ** 2
    whole = find_spec("torchvision") is not None
    images = getattr(transformers, "Qwen2VLImageProcessor" if whole else "Qwen2VLImageProcessorPil")(
        size={"shortest_edge": 4 * pixels, "longest_edge": 64 * pixels}, **patches
    )
    if not whole:
        images.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return
    videos = {"Qwen3VL": "Qwen3VLVideoProcessor", "Qwen2_5_VL": "Qwen2VLVideoProcessor"}[name]
    processor = getattr(transformers, f"{name}Processor")(
        image_processor=images,
        tokenizer=tokenizer,
        video_processor=getattr(transformers, videos)(**patches),
        chat_template=tokenizer.chat_template,
    )
    processor.save_pretrained(folder)

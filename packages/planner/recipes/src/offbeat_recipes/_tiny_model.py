"""Tiny models with random weights in Hugging Face format: of any family that is trained or served, with its tokenizer.

`write_tiny_model` is the one maker; `make_tiny_model` is its form for a rehearsal, with a tokenizer of characters.
"""

import json
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from offbeat_data import ARITHMETIC_ALPHABET, build_character_tokenizer
from offbeat_run import doing

SEEING: Final = ("qwen3_vl", "qwen2_5_vl", "qwen3_5", "gemma3", "gemma4")
"""Families with a vision tower that can be made here."""
MAX_IMAGE_TOKENS: Final = 16
SQUARE_PX: Final = 8
"""Side of what becomes one token: `_MERGE` patches of `_PATCH_PX`."""
_PATCH_PX: Final = 4
_MERGE: Final = SQUARE_PX // _PATCH_PX
_PATCHES: Final = {"patch_size": _PATCH_PX, "merge_size": _MERGE, "temporal_patch_size": 2}
_MARKS: Final = {
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
    "image": "<|image_pad|>",
    "video": "<|video_pad|>",
}
_MARKS_OF_GEMMA: Final = {
    "gemma3": {"boi": "<start_of_image>", "eoi": "<end_of_image>", "image": "<image_soft_token>"},
    "gemma4": {
        "boi": "<|image>",
        "eoi": "<image|>",
        "image": "<|image|>",
        "video": "<|video|>",
        "boa": "<|audio>",
        "eoa": "<audio|>",
        "audio": "<|audio|>",
    },
}
"""Marks of a family by the names of their ids, and of the tokenizer's attributes, which its processor asks for."""
_IMAGE: Final = "<|vision_start|><|image_pad|><|vision_end|>"
_IMAGE_OF_GEMMA: Final = {"gemma3": "<start_of_image>", "gemma4": "<|image|>"}
"""Text that a family's chat template writes for an image."""
_NEWLINES: Final = ["\n" * count for count in range(1, 5)]
"""Tokens of Gemma 3: its processor writes two newlines on each side of an image, and vLLM asks for up to four."""
_SQUARES: Final = 4
"""Tokens along each side of an image of Gemma 3."""
_MAX_SOFT_TOKENS: Final = 70
"""Most tokens of an image of Gemma 4: the least that its processor takes."""
_CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
_FAMILY_OF_NAME: Final = {
    "qwen3-vl": "qwen3_vl",
    "qwen3.5": "qwen3_5",
    "qwen2.5-vl": "qwen2_5_vl",
    "qwen2-vl": "qwen2_vl",
    "-a3b": "qwen3_moe",
    "-a22b": "qwen3_moe",
    "qwen3": "qwen3",
    "qwen2": "qwen2",
    "llama": "llama",
    "smollm": "llama",
}
"""Parts of folders' names and the family they stand for, without a config.json; the first that fits."""
_LANGUAGE_HALF: Final = {
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen2_5_vl": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen3_5": "qwen3_5_text",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
}
"""Families that see, and the family of the language model in each."""
_DENSE: Final = {
    "qwen3_moe": "qwen3",
    "mistral": "llama",
    "qwen3_vl_moe": "qwen3_vl",
    "qwen2_vl": "qwen2_5_vl",
    "gemma3": "qwen3_vl",
    "gemma4": "qwen3_vl",
}
"""Families that the embedded engines do not take, and the nearest that they do."""
_DECODED: Final = ("qwen3", "qwen2", "llama", "qwen3_5_text", "qwen3_vl", "qwen2_5_vl", "qwen3_5")


def tiny_family(model_path: str, *, has_experts: bool, can_see: bool) -> tuple[str, str]:
    """Return the family of the model to make, and a notice where it is not the recipe's own.

    Args:
        model_path: of the recipe; the folder need not be there.
        has_experts: trainer and rollout engine take mixtures of experts; otherwise dense models only.
        can_see: the trainer takes images.
    """
    own = made = _read_family(model_path)
    if not (can_see and find_spec("PIL")):
        made = _LANGUAGE_HALF.get(own, own)
    if not has_experts or made in _LANGUAGE_HALF:
        made = _DENSE.get(made, made)
    if made not in (*_DECODED, *_DENSE):
        made = _DECODED[0]
    if made == own:
        return made, ""
    return made, f"model: {own or 'of an unknown family'} is rehearsed with a {made}"


def _read_family(model_path: str) -> str:
    folder = Path(model_path).expanduser()
    try:
        return str(json.loads((folder / "config.json").read_text())["model_type"])
    except (OSError, ValueError, KeyError, TypeError):
        name = folder.name.lower()
        return next((family for part, family in _FAMILY_OF_NAME.items() if part in name), "")


def make_tiny_model(folder: Path, family: str, *, max_positions: int, seed: int) -> None:
    """Write a model of some ten thousand weights and a tokenizer of characters.

    Two layers, four heads and four experts, so that two ranks can share it in every way that they share a large one.

    Args:
        folder: made when missing.
        family: `model_type` of a causal language model.
        max_positions: longest sequence, in tokens.
        seed: of the weights.
    """
    doing("making a tiny model")
    from transformers import AutoTokenizer  # imported late: only a rehearsal's driver needs it
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # one bar for one small file
    build_character_tokenizer(folder, ARITHMETIC_ALPHABET + "*[]")
    tokenizer, text = AutoTokenizer.from_pretrained(folder), {"max_position_embeddings": max_positions}
    write_tiny_model(folder, family, tokenizer, text=text, seed=seed)


def write_tiny_model(
    folder: Path,
    family: str,
    tokenizer: Any,
    *,
    chat_template: str = _CHAT_TEMPLATE,
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
    tied: bool = True,
    spread: float = 0.02,
    spread_of_vectors: float = 0.0,
    seed: int = 0,
    max_image_tokens: int = MAX_IMAGE_TOKENS,
    max_shard_bytes: int | None = None,
) -> Path:
    """Write a model of some ten thousand random float32 weights, and of a family that sees the processor too.

    Args:
        folder: made when missing.
        family: `model_type` of a causal language model, or one of `SEEING`.
        tokenizer: of transformers, which has been saved into the folder; one that sees is given the marks of images.
        chat_template: of a model that sees.
        text: settings of the language model that take the place of the usual ones.
        vision: such settings of the vision tower.
        tied: input and output embedding are one tensor.
        spread: standard deviation of the weights.
        spread_of_vectors: of what is added to biases, a router's correction bias too, and the weights of norms.
        seed: of the weights; torch's generator is left as it is.
        max_image_tokens: most placeholders that stand for one image, of 8 x 8 pixels each.
        max_shard_bytes: split the weights into files of at most this size.

    Returns:
        `folder`.
    """
    import torch

    transformers: Any = import_module("transformers")
    sees = family in SEEING
    if sees:
        marks = _MARKS_OF_GEMMA.get(family, _MARKS)
        _add_marks(tokenizer, family, marks)
        tokenizer.chat_template = chat_template.replace(_IMAGE, _IMAGE_OF_GEMMA.get(family, _IMAGE))
    shape = {
        **_text_settings(tokenizer, family),
        "tie_word_embeddings": tied,
        "initializer_range": spread,
        **(text or {}),
    }
    if family == "gemma4":
        shape["vocab_size_per_layer_input"] = shape["vocab_size"]
    if sees:
        tower = {**_tower_settings(family), "initializer_range": spread, **(vision or {})}
        ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(mark) for name, mark in marks.items()}
        shape = {"text_config": shape, "vision_config": tower, "tie_word_embeddings": tied, **ids}
        if family == "gemma3":
            shape["mm_tokens_per_image"] = _SQUARES**2
    kind = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = kind.from_config(transformers.AutoConfig.for_model(family, **shape)).float()
        for tensor in model.state_dict().values() if spread_of_vectors else ():
            if tensor.ndim == 1 or not tensor.any():  # Gemma 3's projector is 0 in a new model
                tensor.add_(torch.randn_like(tensor) * spread_of_vectors)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id], pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder, **({"max_shard_size": max_shard_bytes} if max_shard_bytes else {}))
    if sees:
        _write_processor(folder, family, tokenizer, max_image_tokens)
    return folder


def _text_settings(tokenizer: Any, family: str) -> dict[str, Any]:
    """Two layers of heads of 32, the narrowest that vLLM decodes on a CPU; time, height and width share their pairs."""
    settings = {
        "vocab_size": -(-len(tokenizer) // 8) * 8,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]}
    if family == "qwen3_vl":
        settings["rope_parameters"] = {**rope, "mrope_interleaved": True}
    elif family == "qwen2_5_vl":  # its heads have no width of their own
        del settings["head_dim"]
        settings |= {"rope_parameters": rope, "num_attention_heads": 2, "num_key_value_heads": 1}
    elif family in _MARKS_OF_GEMMA:
        both = ["sliding_attention", "full_attention"]
        settings |= {"layer_types": both, "sliding_window": 512}
        if family == "gemma3":
            settings["query_pre_attn_scalar"] = 32
        else:
            settings |= {
                "global_head_dim": 64,
                "hidden_size_per_layer_input": 8,
                "use_bidirectional_attention": "vision",
            }
            settings["vocab_size_per_layer_input"] = settings["vocab_size"]
    elif family in ("qwen3_5", "qwen3_5_text"):
        if family == "qwen3_5":
            part = {"partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
            settings["rope_parameters"] = {**rope, **part}
        settings |= {
            "full_attention_interval": 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
        }
    elif family.endswith("_moe"):
        settings |= {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
        settings["n_routed_experts" if family == "glm4_moe" else "num_experts"] = 4
    return settings


def _tower_settings(family: str) -> dict[str, Any]:
    if family in _MARKS_OF_GEMMA:
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        if family == "gemma3":
            own_side = {"image_size": _SQUARES * SQUARE_PX, "vision_use_head": False}
        else:
            own_side = {"num_key_value_heads": 2, "head_dim": 16, "pooling_kernel_size": _MERGE}
            own_side |= {"position_embedding_size": 256, "default_output_length": _MAX_SOFT_TOKENS}
        return {"patch_size": _PATCH_PX, **shape, **own_side}
    own: dict[str, dict[str, Any]] = {
        "qwen3_vl": {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        "qwen3_5": {"num_position_embeddings": 64},
        # Windows of 4 x 4 patches: an image has several, and parts of some.
        "qwen2_5_vl": {"window_size": 4 * _PATCH_PX, "fullatt_block_indexes": [1]},
    }
    return {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": _PATCH_PX,
        "spatial_merge_size": _MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": 64,
        **own[family],
    }


def _add_marks(tokenizer: Any, family: str, marks: Mapping[str, str]) -> None:
    if family not in _MARKS_OF_GEMMA:
        tokenizer.add_special_tokens({"additional_special_tokens": list(marks.values())})
        return
    named = {f"{name}_token": mark for name, mark in marks.items()}
    tokenizer._set_model_specific_special_tokens(special_tokens=named)
    tokenizer.add_special_tokens(named)
    if family == "gemma3":
        tokenizer.add_tokens(_NEWLINES)


def _write_processor(folder: Path, family: str, tokenizer: Any, max_image_tokens: int) -> None:
    """Tokenizer and image processor; with torchvision the whole processor, which vLLM asks for."""
    transformers: Any = import_module("transformers")
    tokenizer.save_pretrained(folder)
    if family in _MARKS_OF_GEMMA:
        _write_gemma_processor(folder, family, tokenizer)
        return
    size = {"shortest_edge": 4 * SQUARE_PX**2, "longest_edge": max_image_tokens * SQUARE_PX**2}
    if find_spec("torchvision") is None:
        transformers.Qwen2VLImageProcessorPil(size=size, **_PATCHES).save_pretrained(folder)
        return
    name, videos = ("Qwen2_5_VL", "Qwen2VL") if family == "qwen2_5_vl" else ("Qwen3VL", "Qwen3VL")
    getattr(transformers, f"{name}Processor")(
        image_processor=transformers.Qwen2VLImageProcessor(size=size, **_PATCHES),
        tokenizer=tokenizer,
        video_processor=getattr(transformers, f"{videos}VideoProcessor")(**_PATCHES),
        chat_template=tokenizer.chat_template,
    ).save_pretrained(folder)


def _write_gemma_processor(folder: Path, family: str, tokenizer: Any) -> None:
    """Write the image processor; with torchvision the whole processor, which vLLM asks for."""
    transformers: Any = import_module("transformers")
    name, side = {"gemma3": "Gemma3", "gemma4": "Gemma4"}[family], _SQUARES * SQUARE_PX
    own: dict[str, Any] = {"size": {"height": side, "width": side}}
    if family == "gemma4":
        own = {"patch_size": _PATCH_PX, "pooling_kernel_size": _MERGE, "max_soft_tokens": _MAX_SOFT_TOKENS}
    if find_spec("torchvision") is None:
        getattr(transformers, f"{name}ImageProcessorPil")(**own).save_pretrained(folder)
        return
    more: dict[str, Any] = {"image_seq_length": _SQUARES**2}
    if family == "gemma4":
        more = {
            "feature_extractor": transformers.Gemma4AudioFeatureExtractor(),
            "video_processor": transformers.Gemma4VideoProcessor(**own),
        }
    getattr(transformers, f"{name}Processor")(
        image_processor=getattr(transformers, f"{name}ImageProcessor")(**own),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
        **more,
    ).save_pretrained(folder)

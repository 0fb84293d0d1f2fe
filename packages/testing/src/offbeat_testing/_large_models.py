"""Folders of the models that recipes name, with everything but weights: for tests of plans.

Source: the config.json of each model's repository.
"""

from pathlib import Path
from typing import Any, Final

_TEXT: Final = {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8}
_QWEN3_8B: Final = {**_TEXT, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
_QWEN2: Final = {"vocab_size": 152064, "tie_word_embeddings": False}
_SHAPES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "Qwen3-8B": ("Qwen3Config", {**_QWEN3_8B, "num_attention_heads": 32, "tie_word_embeddings": False}),
    "Qwen3-32B": (
        "Qwen3Config",
        {
            **_TEXT,
            "hidden_size": 5120,
            "intermediate_size": 25600,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
            "tie_word_embeddings": False,
        },
    ),
    "Qwen3-1.7B": (
        "Qwen3Config",
        {
            **_TEXT,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen3-30B-A3B": (
        "Qwen3MoeConfig",
        {
            **_TEXT,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "tie_word_embeddings": False,
        },
    ),
    "Qwen2.5-7B": (
        "Qwen2Config",
        {
            **_QWEN2,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
        },
    ),
    "Qwen2.5-32B": (
        "Qwen2Config",
        {
            **_QWEN2,
            "hidden_size": 5120,
            "intermediate_size": 27648,
            "num_hidden_layers": 64,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
        },
    ),
    "deepseek-llm-7b": (
        "LlamaConfig",
        {
            "vocab_size": 102400,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 30,
            "num_attention_heads": 32,
            "tie_word_embeddings": False,
        },
    ),
    "Qwen3-VL-8B-Instruct": (
        "Qwen3VLConfig",
        {
            "text_config": {**_QWEN3_8B, "num_attention_heads": 32},
            "vision_config": {
                "depth": 27,
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "num_heads": 16,
                "out_hidden_size": 4096,
                "num_position_embeddings": 2304,
                "deepstack_visual_indexes": [8, 16, 24],
                "patch_size": 16,
            },
            "tie_word_embeddings": False,
        },
    ),
}


def large_model_configs(folder: Path) -> Path:
    """Write a folder for each, with a config.json as large as the model's and an empty weights file.

    Args:
        folder: takes them.

    Returns:
        `folder`.
    """
    import transformers
    from safetensors.numpy import save_file

    for name, (kind, shape) in _SHAPES.items():
        getattr(transformers, kind)(**shape).save_pretrained(folder / name)
        save_file({}, folder / name / "model.safetensors")
    return folder

"""Model folders made on the spot: tiny real architectures with tokenizer, large ones without weights; the yardstick.

The yardstick of both conformance suites is what transformers says of a folder. Source of the large ones: the
config.json of each model's repository.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from offbeat_core import Completion, Floats, Ids

TinyFamily = Literal["qwen3", "qwen3_moe", "qwen3_5_text", "glm4_moe", "qwen2", "llama"]

CHAT_TEMPLATE: Final = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CORPUS: Final = (
    "the sum of two numbers is a number",
    "what is one and one? the answer is two",
    "an engine that is out of step says so, by name, in seconds",
)


def tiny_tokenizer(folder: Path) -> Any:
    """Write a byte-level BPE tokenizer with a ChatML template into `folder`, and return it.

    Every text can be encoded: ids 0 to 2 are special, then come the 256 bytes and a few merges.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    transformers: Any = import_module("transformers")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return fast


def tiny_model(
    folder: Path,
    family: TinyFamily = "qwen3",
    *,
    tied: bool = True,
    vocab_size: int = 320,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    spread: float = 0.1,
    seed: int = 0,
    max_shard_bytes: int | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a random model of a real family, float32, with tokenizer, ready for `from_pretrained`.

    Biases and norm weights are random too, so that an engine which forgets one of them cannot pass.

    Args:
        folder: made when missing.
        family: architecture; routers of glm4_moe choose with a correction bias; of qwen3_5_text every other
            layer has attention.
        tied: input and output embedding are one tensor.
        vocab_size: rows of the embedding, at least the 300 of the tokenizer (real models pad theirs as well).
        hidden_size: of the residual stream; the feed-forward width is twice that, of each of four experts half of it.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        spread: standard deviation of the weights; larger means a more peaked next-token distribution.
        seed: of the weights.
        max_shard_bytes: split the weights into files of at most this size.
        config: further keys for the Hugging Face config, such as `rope_parameters`.

    Returns:
        `folder`.
    """
    from offbeat_recipes import write_tiny_model

    shape = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": 32 if family.startswith(("qwen3", "glm4")) else hidden_size // num_heads,
        **({"moe_intermediate_size": hidden_size // 2} if family.endswith("_moe") else {}),
        **(config or {}),
    }
    return write_tiny_model(
        folder,
        family,
        tiny_tokenizer(folder),
        text=shape,
        tied=tied,
        spread=spread,
        spread_of_vectors=spread,
        seed=seed,
        max_shard_bytes=max_shard_bytes,
    )


TinyVisionFamily = Literal["qwen3_vl", "qwen2_5_vl", "qwen3_5", "gemma3", "gemma4"]

VISION_CHAT_TEMPLATE: Final = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Its words are those of the small models' ChatML; its images stand as in Qwen-VL's own template."""


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
    """Write a random Qwen3-VL, Qwen2.5-VL, Qwen3.5, Gemma 3 or Gemma 4, float32, with tokenizer and processor.

    A placeholder token stands for 8 x 8 pixels, and an image for 4 to 64 of them; of Gemma 3 for 16, of Gemma 4 for up
    to 70. The processor needs torchvision;
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
    from offbeat_recipes import write_tiny_model

    return write_tiny_model(
        folder,
        family,
        tiny_tokenizer(folder),
        chat_template=VISION_CHAT_TEMPLATE,
        text={"vocab_size": 320, **(text or {})},
        vision={"intermediate_size": 128, **({"hidden_size": 64} if family != "gemma4" else {}), **(vision or {})},
        tied=tied,
        spread=spread,
        spread_of_vectors=spread,
        seed=seed,
        max_image_tokens=64,
    )


_WIDTHS: Final = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_QWEN3: Final = {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "tie_word_embeddings": False}
_QWEN2: Final = {"vocab_size": 152064, "tie_word_embeddings": False}
_EXPERTS: Final = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
_LARGE: Final[dict[str, tuple[str, tuple[int, ...], dict[str, Any]]]] = {
    "Qwen3-8B": ("Qwen3Config", (4096, 12288, 36, 32), _QWEN3),
    "Qwen3-32B": ("Qwen3Config", (5120, 25600, 64, 64), _QWEN3),
    "Qwen3-1.7B": ("Qwen3Config", (2048, 6144, 28, 16), {**_QWEN3, "tie_word_embeddings": True}),
    "Qwen3-30B-A3B": ("Qwen3MoeConfig", (2048, 6144, 48, 32), {**_QWEN3, **_EXPERTS, "num_key_value_heads": 4}),
    "Qwen2.5-7B": ("Qwen2Config", (3584, 18944, 28, 28), {**_QWEN2, "num_key_value_heads": 4}),
    "Qwen2.5-32B": ("Qwen2Config", (5120, 27648, 64, 40), {**_QWEN2, "num_key_value_heads": 8}),
    "deepseek-llm-7b": ("LlamaConfig", (4096, 11008, 30, 32), {"vocab_size": 102400}),
}
"""Class of the configuration, its four widths, and the rest of it."""
_VISION_8B: Final = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "out_hidden_size": 4096,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
    "patch_size": 16,
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

    shapes = {
        name: (kind, dict(zip(_WIDTHS, widths, strict=True)) | rest) for name, (kind, widths, rest) in _LARGE.items()
    }
    text = {key: value for key, value in shapes["Qwen3-8B"][1].items() if key != "tie_word_embeddings"}
    seeing = {"text_config": text, "vision_config": _VISION_8B, "tie_word_embeddings": False}
    shapes["Qwen3-VL-8B-Instruct"] = ("Qwen3VLConfig", seeing)
    for name, (kind, shape) in shapes.items():
        getattr(transformers, kind)(**shape).save_pretrained(folder / name)
        save_file({}, folder / name / "model.safetensors")
    return folder


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

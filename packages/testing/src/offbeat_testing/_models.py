"""Tiny Hugging Face model folders, made on the spot: real architectures, real tokenizer, a few ten thousand weights."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal

TinyFamily = Literal["qwen3", "qwen3_moe", "qwen2", "llama"]

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
        family: architecture.
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
    import torch

    transformers: Any = import_module("transformers")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer(folder)
    shape = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tied,
        "initializer_range": spread,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if family in ("qwen3", "qwen3_moe"):
        shape["head_dim"] = 32
    if family == "qwen3_moe":
        shape |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden_size // 2}
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = _build(family, {**shape, **(config or {})})
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.ndim == 1:
                tensor.add_(torch.randn_like(tensor) * spread)
    torch.random.set_rng_state(state)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id], pad_token_id=tokenizer.pad_token_id
    )
    shards = {"max_shard_size": max_shard_bytes} if max_shard_bytes else {}
    model.save_pretrained(folder, **shards)
    return folder


def _build(family: TinyFamily, settings: dict[str, Any]) -> Any:
    """Make the randomly initialised transformers model."""
    transformers: Any = import_module("transformers")
    name = {"qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "qwen2": "Qwen2", "llama": "Llama"}[family]
    config = getattr(transformers, f"{name}Config")(**settings)
    return getattr(transformers, f"{name}ForCausalLM")(config).float().eval()

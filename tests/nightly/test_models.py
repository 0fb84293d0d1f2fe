"""Every causal language model of transformers, tiny: trained as transformers computes it, or refused by name in a line.

The outcomes are the table of docs/models.md; OFFBEAT_RENEW=1 writes it anew.
"""

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers import __version__ as transformers_version
from transformers.integrations.heterogeneity.configuration_utils import AmbiguousGlobalPerLayerAttributeError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from offbeat_core import ConfigError, ModelError, TrainEngineConfig, TrainSequence
from offbeat_engine_megatron._shape import FAMILIES as MEGATRON_FAMILIES
from offbeat_engine_torch import TorchTrainEngine
from offbeat_rollout_torch import FAMILIES as EMBEDDED_FAMILIES
from offbeat_testing import reference_logprobs, reference_model

TABLE = Path(__file__).parents[2] / "docs" / "models.md"
NOT_OF_TEXT = {"gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "musicgen", "musicgen_melody"}
"""Drafts of another model, decoders of sound, and what needs a package more (gemma3n, whose text is gemma3n_text)."""
USED_MOST = (
    *("qwen3", "qwen3_moe", "qwen2", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"),
    *("llama", "gpt_oss", "gemma3_text", "gemma3", "gemma4_text", "gemma4", "mistral", "deepseek_v3", "glm4_moe"),
    *("olmo3", "phi3"),
)
"""Families that public training scripts name most often (those of tests/import_options), and newer ones of their
makers: they come first in the table."""
FAMILIES = sorted(
    set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - NOT_OF_TEXT,
    key=lambda family: (USED_MOST.index(family) if family in USED_MOST else len(USED_MOST), family),
)
WORKS = "works"
VOCABULARY = 128
MAX_PARAMETERS = 60_000_000
# Float32 on both sides, models of four narrow layers.
TOLERANCE_NATS = 1e-4
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "text_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "dim_ff", "feed_forward_size", "ffn_hidden_size"), 128),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "first_k_dense_replace"), 1),
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "qk_head_dim": 32,
    "head_dim": 16,
    "kv_channels": 16,
    "max_position_embeddings": 256,
    "n_positions": 256,
    # Shorter than the sequences, and longer than what the check at load lowers windows to.
    **dict.fromkeys(("sliding_window", "attention_window_size"), 16),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    "logits_scaling": 4.0,
    "logit_scale": 0.5,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "rotary_dim": 8,
    "hidden_size_global": 64,
    "attention_multiplier": 0.3,
    "routed_scaling_factor": 1.5,
    "hidden_size_per_layer_input": 16,
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
WITH_STATES = {"num_hidden_layers": 6, "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2}
BOTH_KINDS = ["sliding_attention", "full_attention"] * 2
OF_A_FAMILY: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": {
        "layer_types": BOTH_KINDS,
        "rope_parameters": {key: {**ROPE, "mrope_section": [2, 3, 3]} for key in BOTH_KINDS},
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": BOTH_KINDS},
    "gemma4_text": {"layer_types": BOTH_KINDS, "num_kv_shared_layers": 0},
    "gemma4_unified_text": {"layer_types": BOTH_KINDS, "num_kv_shared_layers": 0},
    "gemma4": {"vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "position_embedding_size": 64}},
    "gemma4_unified": {"vision_config": {}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "nemotron": {"num_key_value_heads": 2},
    "prophetnet": {"num_hidden_layers": ..., "num_encoder_layers": 2, "num_decoder_layers": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ngram_vocab_size_base": 64,
        "ple_embed_dim": 8,
        "hc_lowrank": 8,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": (32, 32)},
    "xlnet": {"max_position_embeddings": ...},
    "xmod": {"default_language": "en_XX"},
    "zamba": WITH_STATES,
    "zamba2": WITH_STATES,
    "zaya": {"num_experts_per_tok": 1},
}
"""What `SIZES` does not say, or (...) says wrongly, for one family."""


def sequences() -> list[TrainSequence]:
    """Make two prompts with two completions each: packed, with shared prompts."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(2):
        prompt = rng.integers(3, VOCABULARY, 9)
        for length in (7, 12):
            ids = np.concatenate([prompt, rng.integers(3, VOCABULARY, length)]).astype(np.int32)
            made.append(TrainSequence(ids=ids, loss_mask=np.arange(len(ids)) >= len(prompt)))
    return made


def tiny_config(family: str) -> PretrainedConfig:
    """Make the family's own config class, with sizes of a few dozen wherever it has a size."""
    return _shrink(CONFIG_MAPPING[family])


def _shrink(kind: type[PretrainedConfig]) -> PretrainedConfig:
    usual = kind()
    found = {name: value for name, value in SIZES.items() if _is_size(kind, usual, name)}
    if "kv_lora_rank" in found and "num_key_value_heads" in found:
        found["num_key_value_heads"] = found["num_attention_heads"]
    for name in getattr(kind, "sub_configs", None) or {}:
        if isinstance(part := getattr(usual, name, None), PretrainedConfig):
            found[name] = _shrink(type(part))
    found |= OF_A_FAMILY.get(kind.model_type, {})
    return kind(**{name: value for name, value in found.items() if value is not ...})


def _is_size(kind: type[PretrainedConfig], usual: PretrainedConfig, name: str) -> bool:
    if isinstance(of_class := getattr(kind, name, None), property) and of_class.fset is None:
        return False
    try:
        value = getattr(usual, name)
    except (AttributeError, AmbiguousGlobalPerLayerAttributeError):
        return name == "head_dim" and hasattr(kind, "head_dim")
    return name == "head_dim" or (isinstance(value, int | float) and not isinstance(value, bool))


def write_model(family: str, folder: Path) -> None:
    """Write a random model in which no weight is zero, one, or the value of a fresh model."""
    config = tiny_config(family)
    with torch.device("meta"):
        size = sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
    assert size < MAX_PARAMETERS, f"{family} has {size} parameters: SIZES lacks one of its names"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor) * 0.1)
        model.eval()(
            torch.tensor([[5, 9, 7]]), use_cache=False
        )  # a family is not refused for what its tiny configuration lacks
    model.save_pretrained(folder)


def outcome(family: str, folder: Path) -> str:
    """Return `works`, or why the engine refuses the family; raises where neither holds."""
    write_model(family, folder)
    settings = TrainEngineConfig(model_path=str(folder), device="cpu", learning_rate=1e-3)
    try:
        engine = TorchTrainEngine.create(settings)
    except (ModelError, ConfigError) as error:
        message = str(error).removeprefix(f"{folder}: ")
        assert "\n" not in message
        return f"refused: {message.partition(' (')[0].partition('. ')[0]}"  # neither numbers nor pointers to a report
    assert_agree(engine, folder)
    engine.forward_backward(sequences(), lambda tokens: (-tokens.logprobs_N.mean(), {}))
    assert engine.step()["grad_norm"].value > 0
    engine.save(folder / "saved")
    assert_agree(engine, folder / "saved")
    resumed = TorchTrainEngine.create(settings)
    resumed.load(folder / "saved")
    assert_agree(resumed, folder / "saved")
    return WORKS


def assert_agree(engine: TorchTrainEngine, folder: Path) -> None:
    """Check that the engine's log-probabilities are those that transformers computes from a folder."""
    model = reference_model(folder)
    for sequence, found in zip(sequences(), engine.logprobs(sequences()), strict=True):
        wanted = reference_logprobs(model, sequence.ids) * sequence.loss_mask
        np.testing.assert_allclose(found, wanted, atol=TOLERANCE_NATS)


OUTCOMES: dict[str, str] = {}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_trained_faithfully_or_refused_in_one_line(family: str, tmp_path: Path) -> None:
    OUTCOMES[family] = outcome(family, tmp_path / "model")


def test_the_table_says_what_is() -> None:
    rows = re.findall(r"^\| `(\S+)` \| (.+) \| (\S+) \| (\S+) \| (\S+) \|$", TABLE.read_text(), re.MULTILINE)
    listed, served = {row[0]: row[1] for row in rows}, {row[0]: row[4] for row in rows}
    if os.environ.get("OFFBEAT_RENEW"):
        TABLE.write_text(table({**listed, **OUTCOMES}, served, TABLE.read_text()))
        return
    assert {family: listed.get(family) for family in OUTCOMES} == OUTCOMES
    assert [row[0] for row in rows] == [family for family in FAMILIES if family in listed]
    assert {row[0]: row[2:4] for row in rows} == {row[0]: engines(row[0]) for row in rows}


def engines(family: str) -> tuple[str, str]:
    """Return whether engine-megatron trains a family and rollout-torch samples it."""
    return tuple("yes" if family in known else "–" for known in (MEGATRON_FAMILIES, EMBEDDED_FAMILIES))  # type: ignore[return-value]


def table(outcomes: dict[str, str], served: dict[str, str], page: str) -> str:
    """Return the page of docs, with the sections of the old one between its head and its table.

    Args:
        outcomes: of the torch engine, by family.
        served: column of vLLM, which is not installed here: tests of rollout-vllm read and renew it.
        page: as it was.
    """
    rows = [
        f"| `{family}` | {outcomes[family]} | {' | '.join(engines(family))} | {served.get(family, '–')} |"
        for family in FAMILIES
        if family in outcomes
    ]
    head = [
        "# Model families",
        "",
        f"This page lists the causal language models of transformers {transformers_version}, by `model_type`, which",
        "trainer trains them and which engine samples them. Families with images are in [vision.md](vision.md) too.",
        "",
        "Of the torch trainer:",
        "",
        "- *Works*: a tiny random model of the family is trained for a step, saved and loaded again. Before and after,",
        f"  its log-probabilities match those of transformers to {TOLERANCE_NATS:g} nats.",
        "- *Refused*: `create` raises a one-line error with the reason.",
        "",
        "Of the others, *yes* means that the backend has the family: engine-megatron, the embedded engine (rollouts",
        "`torch`), and vLLM 0.32.0 by its own table of models.",
        "",
        "`nox -s models` checks this table, and the tests of rollout-vllm its column; `OFFBEAT_RENEW=1` rewrites it.",
        "",
        *page[page.index("## Lengths") : page.index("## Families")].splitlines(),
        "## Families",
        "",
        "Families that public training scripts name most often come first, and newer ones of their makers.",
        "",
        "| family | trainer `torch` | trainer `megatron` | rollouts `torch` | rollouts `vllm` |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*head, *rows, ""])

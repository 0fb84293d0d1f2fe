"""Gated delta rule and its short convolution over packed sequences (Qwen3-Next, Qwen3.5, OLMo Hybrid).

Both start anew at the beginning of each sequence of a pack. A shared prompt is therefore read again before each of its
completions, in these two steps alone: the projections around them are computed once for each packed token.

- On an accelerator in bfloat16: the kernels of flash-linear-attention and causal-conv1d, each where it is
  installed, on all sequences one after the other.
- Elsewhere: transformers' own torch functions on padded rows. What is computed after the end of a row's sequence is
  thrown away, and nothing before it sees it.

Ranks that share the tokens of a pack swap in each of the two: a rank gets all tokens of its share of the channels, or
of the heads, and hands back what it has computed for those of others (DeepSpeed-Ulysses).

Shapes: T packed tokens, R rows, L tokens of a row, F tokens of all sequences with their prompts, C channels, H heads,
D head size; t of the T tokens are on a rank.
Source: Yang et al., "Gated Delta Networks", arXiv:2412.06464.
"""

import inspect
import sys
from collections.abc import Callable, Iterable
from functools import cache, partial, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor, nn

from offbeat_engine_torch._layers.exchange import SharedTokens
from offbeat_engine_torch._layers.plan import AttentionPlan, WholeRows

DELTA_RULE_FAMILIES: Final = {"olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"}
"""`model_type` of the language models whose layers of type linear_attention call the two functions packed here."""
RULE, CONVOLUTION = "torch_chunk_gated_delta_rule", "causal_conv1d_fn"
"""Names of the two in transformers' modeling modules since 5.16.0."""
_FUSED_RULE: Final = "fla.ops.gated_delta_rule"


def pack_recurrence(whole: nn.Module) -> None:
    """Let the layers of a transformers model keep packed sequences apart; doing it twice changes nothing.

    The functions are replaced in the modules of transformers. Called without a plan they compute as before.
    """
    for modeling in {sys.modules[type(module).__module__] for module in whole.modules()}:
        for name, pack in ((RULE, _packed_rule), (CONVOLUTION, _packed_convolution)):
            own = vars(modeling).get(name)
            if own is not None and not hasattr(own, "is_packed"):
                packed: Any = pack(inspect.unwrap(own))  # transformers has wrapped its own choice of a kernel around it
                packed.is_packed = True
                setattr(modeling, name, packed)


def has_recurrence(whole: Any) -> bool:
    """Return whether a transformers model has layers that call the functions packed here."""
    config = whole.config.get_text_config()
    return config.model_type in DELTA_RULE_FAMILIES and "linear_attention" in config.layer_types


def missing_kernels(whole: Any, dtype: str) -> str:
    """Return the packages to install for a model's layers to compute faster, " and " between them; "" for none."""
    if not has_recurrence(whole) or whole.get_input_embeddings().weight.is_cpu or dtype != "bfloat16":
        return ""
    kernels = {"flash-linear-attention": fused_rule(), "causal-conv1d": fused_convolution()}
    return " and ".join(name for name, kernel in kernels.items() if kernel is None)


def _packed_rule(reference: Callable[..., tuple[Tensor, Any]]) -> Callable[..., Any]:
    """Return `reference`, transformers' torch function of the rule, for packed sequences."""

    @wraps(reference)
    def rule(
        query_1THD: Tensor,
        key_1THD: Tensor,
        value_1THD: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        plan: AttentionPlan | None = None,
        **settings: Any,
    ) -> tuple[Tensor, Any]:
        # The family computes it in float32 in a model of bfloat16 too, and autocast would turn it back.
        with torch.autocast(query_1THD.device.type, enabled=False):
            if plan is None:
                return reference(query_1THD, key_1THD, value_1THD, g=g, beta=beta, **settings)
            times = value_1THD.shape[2] // key_1THD.shape[2]
            if times > 1:  # transformers repeats key heads in the layer (5.19) or in the rule (5.24)
                query_1THD, key_1THD = (x.repeat_interleave(times, 2) for x in (query_1THD, key_1THD))
            normalizes = {"use_qk_l2norm_in_kernel": settings.get("use_qk_l2norm_in_kernel", False)}
            fused = fused_rule() if _suits_kernels(query_1THD) else None
            rows, more = plan.whole_rows(), {}
            if fused is not None:
                line = plan.whole_line()
                rows, more = line.rows, {"cu_seqlens": line.bounds}
            update = partial(fused or reference, **normalizes, **more)
            ranks = plan.ranks
            given: tuple[Tensor, ...] = (query_1THD, key_1THD, value_1THD, g, beta)
            if ranks is not None:
                given = _of_own_heads(ranks, *given)
            found_1THD = _by_rows(rows, given, lambda *each: update(*each)[0])
            return (found_1THD if ranks is None else ranks.take_tokens(found_1THD)), None

    return rule


def _of_own_heads(
    ranks: SharedTokens, query_1tHD: Tensor, key_1tHD: Tensor, value_1tHD: Tensor, g_1tH: Tensor, beta_1tH: Tensor
) -> tuple[Tensor, ...]:
    """Swap this rank's tokens for its share of the heads, in two calls."""
    vectors, numbers = (query_1tHD, key_1tHD, value_1tHD), (g_1tH.float()[..., None], beta_1tH.float()[..., None])
    query, key, value = _swap(ranks, *vectors)
    g, beta = _swap(ranks, *numbers)
    return query, key, value, g[..., 0].to(g_1tH.dtype), beta[..., 0].to(beta_1tH.dtype)


def _swap(ranks: SharedTokens, *given_1tHD: Tensor) -> tuple[Tensor, ...]:
    """[1, t, H, D] each, of one format, to [1, T, H / ranks, D] each."""
    joined = ranks.take_heads(torch.cat(given_1tHD, -1).transpose(1, 2)).transpose(1, 2)
    return torch.split(joined, [each.shape[-1] for each in given_1tHD], -1)


def _packed_convolution(reference: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return `reference`, transformers' torch function of the convolution, for packed sequences."""

    @wraps(reference)
    def convolution(
        x_1CT: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        *,
        plan: AttentionPlan | None = None,
        **_: Any,
    ) -> Tensor:
        if plan is None:
            return reference(x_1CT, weight, bias, activation=activation)
        fused = fused_convolution() if _suits_kernels(x_1CT) else None
        rows, more = plan.whole_rows(), {}
        if fused is not None:
            line = plan.whole_line()
            rows, more = line.rows, {"seq_idx": line.sequence_1F}

        ranks = plan.ranks
        if ranks is not None:  # a channel has a filter of its own
            weight = weight.chunk(ranks.size)[ranks.rank]
            bias = None if bias is None else bias.chunk(ranks.size)[ranks.rank]
            x_1CT = ranks.take_heads(x_1CT[..., None])[..., 0]

        def convolve(x_RLC: Tensor) -> Tensor:
            out: Tensor = (fused or reference)(x_RLC.transpose(1, 2), weight, bias, activation=activation, **more)
            return out.transpose(1, 2)

        found_1TC = _by_rows(rows, (x_1CT.transpose(1, 2),), convolve)
        if ranks is not None:
            found_1TC = ranks.take_tokens(found_1TC[..., None])[..., 0]
        return found_1TC.transpose(1, 2)

    return convolution


def check_shared_heads(config: Any, size: int) -> str:
    """Return why so many ranks cannot share the tokens of a model with these layers; "" where they can."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    wanted = {
        "linear_num_value_heads": config.linear_num_value_heads,
        "channels of keys": keys,
        "channels of values": values,
    }
    for name, count in wanted.items():
        if count % size:
            return f"its {name} ({count}) must be a multiple of cp, as ranks swap tokens for heads in the delta rule"
    return ""


def _by_rows(whole: WholeRows, tensors: Iterable[Tensor], compute: Callable[..., Tensor]) -> Tensor:
    """[1, T, ...] of packed tokens, by a function of [R, L, ...] of whole sequences."""
    flat = [tensor.squeeze(0) for tensor in tensors]
    parts = [
        compute(*(each.index_select(0, index_RL.flatten()).view(*index_RL.shape, *each.shape[1:]) for each in flat))
        for index_RL in whole.indices
    ]
    return torch.cat([part.flatten(0, 1) for part in parts]).index_select(0, whole.place_T)[None]


def _suits_kernels(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and not x.is_cpu


def has_fused_rule() -> bool:
    """Return whether flash-linear-attention is installed; a plan does not import it, for it looks for a device."""
    return find_spec(_FUSED_RULE.partition(".")[0]) is not None


@cache
def fused_rule() -> Callable[..., Any] | None:
    """Return flash-linear-attention's kernel; None where it is not installed."""
    return _found(_FUSED_RULE, "chunk_gated_delta_rule")


@cache
def fused_convolution() -> Callable[..., Any] | None:
    """Return causal-conv1d's kernel; None where it is not installed."""
    return _found("causal_conv1d", "causal_conv1d_fn")


def _found(module: str, name: str) -> Callable[..., Any] | None:
    try:
        kernel: Callable[..., Any] = getattr(import_module(module), name)
    except ModuleNotFoundError:
        return None
    return kernel

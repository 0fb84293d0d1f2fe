"""Layer with the gated delta rule in the place of attention: a short convolution, then a state for each head.

A sample holds the state and what the convolution reads again of its last tokens, however many came before. Both are
those after the tokens that are counted as cached, and nothing says what they were before: a sequence goes on from
there, or begins anew from zeros.

Several tokens are computed a chunk at a time, in which each token's change of the state is the solution of one
triangular system; a single token is a chunk of one.

Shapes: N tokens of a pass, n rows of a part of it, W tokens of a row (padded), C channels of the convolution, H value
heads, K and V widths of a key and of a value, L tokens of a chunk.
Source: Yang et al., "Gated Delta Networks", arXiv:2412.06464; transformers 5.19, Qwen3_5GatedDeltaNet.
"""

from collections.abc import Callable, Sequence
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from offbeat_rollout_torch._families import Architecture, RuleShape
from offbeat_rollout_torch._parameters import Arena, Parameter

CHUNK_TOKENS: Final = 64
"""Longer chunks take fewer products, and each more memory: as transformers and flash-linear-attention have it."""
_NORM_EPS: Final = 1e-6
"""Added to the sum of the squares of a query or key, whatever the norms of the model have."""


class StateRows:
    """Rows whose states a part of a pass reads and writes, in the order of its tokens.

    Args:
        states_LRS: [layers with the rule, rows, numbers] float32.
        slots: of the rows; neighbours in order, of which the memory itself is written, or any.
        counts: new tokens of each row.
        is_new: of each row whether its sequence begins with these tokens, so that what lies there is another's.
    """

    def __init__(
        self, states_LRS: Tensor, slots: slice | Tensor, counts: Sequence[int], is_new: Sequence[bool]
    ) -> None:
        self._states_LRS, self._slots, device = states_LRS, slots, states_LRS.device
        self.num_rows, self.width, self.num_tokens = len(counts), max(counts), sum(counts)
        self._is_new_n1 = torch.tensor(is_new, device=device)[:, None] if any(is_new) else None
        counts_n1 = torch.tensor(counts)[:, None]
        is_token_nW = torch.arange(self.width) < counts_n1
        self.is_token_nW, self.padding_N = None, None
        if self.num_tokens < is_token_nW.numel():
            self.padding_N = is_token_nW.view(-1).nonzero()[:, 0].to(device)
            self.is_token_nW = is_token_nW.to(device)
        self._counts_n1 = counts_n1.to(device)

    def ends(self, num_places: int) -> Tensor:
        """[n, num_places] of a row with so many tokens before the new ones: where its last so many tokens lie."""
        return self._counts_n1 + torch.arange(num_places, device=self._counts_n1.device)

    def read(self, place: int) -> Tensor:
        """Return what the rows hold, [n, numbers], zeros of those that begin. Change it in place, and `write` it."""
        held_nS = self._states_LRS[place][self._slots]
        if self._is_new_n1 is not None:
            held_nS.masked_fill_(self._is_new_n1, 0)
        return held_nS

    def write(self, place: int, held_nS: Tensor) -> None:
        if isinstance(self._slots, Tensor):  # an index has made a copy, a slice has not
            self._states_LRS[place].index_copy_(0, self._slots, held_nS)

    def pad(self, x_NO: Tensor) -> Tensor:
        """[tokens, O] to [n, W, O]."""
        if self.padding_N is not None:
            x_NO = x_NO.new_zeros(self.num_rows * self.width, x_NO.shape[1]).index_copy_(0, self.padding_N, x_NO)
        return x_NO.view(self.num_rows, self.width, -1)

    def unpad(self, x_nWHV: Tensor) -> Tensor:
        """[n, W, H, V] to [tokens, H, V]."""
        x = x_nWHV.flatten(0, 1)
        return x if self.padding_N is None else x.index_select(0, self.padding_N)


class DeltaRule:
    """Weights of the rule in one layer, but for its two matrices, and what it makes of the first one's output.

    Args:
        architecture: of a model with such layers.
        like: format and device of the weights.
    """

    def __init__(self, architecture: Architecture, like: Tensor | Arena) -> None:
        assert architecture.rule is not None
        self._shape, self._norm_eps = architecture.rule, architecture.norm_eps
        self.filters_C1W = like.new_empty(self._shape.num_channels, 1, self._shape.window)
        self.log_decay_H = like.new_empty(self._shape.num_value_heads)
        self.step_bias_H = like.new_empty(self._shape.num_value_heads)
        self.norm_V = like.new_empty(self._shape.value_dim)

    def __call__(self, inputs_NO: Tensor, rows: Sequence[StateRows], place: int) -> Tensor:
        """Return what the second matrix takes, [N, H * V].

        Args:
            inputs_NO: what the first matrix gives: channels of the convolution, gates of the output, a rate and a
                decay for each head.
            rows: of the tokens, one part after the other.
            place: of the layer among those with the rule.
        """
        parts = torch.split(inputs_NO, [each.num_tokens for each in rows])
        mixed = [self._part(part, each, place) for part, each in zip(parts, rows, strict=True)]
        mixed_NHV = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        start = self._shape.num_channels
        gates_NHV = inputs_NO[:, start : start + self._shape.value_width].view(mixed_NHV.shape)
        normed = self.norm_V * F.rms_norm(mixed_NHV.float(), self.norm_V.shape, None, self._norm_eps).to(
            inputs_NO.dtype
        )
        return (normed * F.silu(gates_NHV.float())).to(inputs_NO.dtype).flatten(1)

    def _part(self, inputs_NO: Tensor, rows: StateRows, place: int) -> Tensor:
        """[tokens of a part, O] to [tokens of a part, H, V]; the states of its rows go on."""
        s, x_nWO = self._shape, rows.pad(inputs_NO)
        held_nS = rows.read(place)
        window, states_nHKV = split_state(held_nS, s)
        mixed_nWC = self._convolve(x_nWO[..., : s.num_channels], window, rows)
        rate_nWH, step_nWH = x_nWO[..., -2 * s.num_value_heads :].chunk(2, -1)
        rate_nWH = rate_nWH.sigmoid().float()
        decay_nWH = -self.log_decay_H.float().exp() * F.softplus(step_nWH.float() + self.step_bias_H)
        if rows.is_token_nW is not None:  # a token that fills a row up leaves the state as it is
            rate_nWH, decay_nWH = (each * rows.is_token_nW[..., None] for each in (rate_nWH, decay_nWH))
        query, key, value = torch.split(mixed_nWC.float(), [s.key_width, s.key_width, s.value_width], -1)
        out = apply_rule(
            self._heads(query, s.key_dim) * s.key_dim**-0.5,
            self._heads(key, s.key_dim),
            torch.unflatten(value, -1, (-1, s.value_dim)).transpose(1, 2),
            decay_nWH.transpose(1, 2),
            rate_nWH.transpose(1, 2),
            states_nHKV,
        )
        rows.write(place, held_nS)
        return rows.unpad(out.transpose(1, 2).to(inputs_NO.dtype))

    def _convolve(self, x_nWC: Tensor, window_nCw: Tensor, rows: StateRows) -> Tensor:
        """[n, W, C] to the same; the window goes on to the last tokens of each row."""
        line = torch.cat((window_nCw.to(x_nWC.dtype), x_nWC.transpose(1, 2)), -1)
        ends = rows.ends(window_nCw.shape[-1])[:, None].expand(window_nCw.shape)
        window_nCw.copy_(line.gather(-1, ends))
        return F.silu(F.conv1d(line, self.filters_C1W, groups=len(self.filters_C1W))).transpose(1, 2)

    def _heads(self, x_nWC: Tensor, width: int) -> Tensor:
        """[n, W, key heads * K] to [n, H, W, K], of length 1; each key head serves several value heads."""
        x = torch.unflatten(x_nWC, -1, (-1, width)).transpose(1, 2)
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)
        return x.repeat_interleave(self._shape.num_value_heads // self._shape.num_key_heads, 1)

    def parameters(self) -> dict[str, Parameter]:
        """Tensors by the names of folders, without the layer's prefix."""
        held: dict[str, Callable[[], Tensor]] = {
            "conv1d.weight": lambda: self.filters_C1W,
            "A_log": lambda: self.log_decay_H,
            "dt_bias": lambda: self.step_bias_H,
            "norm.weight": lambda: self.norm_V,
        }
        return {f"linear_attn.{name}": Parameter(get, slice(None), tuple(get().shape)) for name, get in held.items()}


def split_state(held_nS: Tensor, shape: RuleShape) -> tuple[Tensor, Tensor]:
    """View what rows hold as windows, [n, C, window - 1], and states, [n, H, K, V]."""
    windows, states = torch.split(held_nS, [shape.num_channels * (shape.window - 1), shape.state_size], -1)
    heads = shape.num_value_heads, shape.key_dim, shape.value_dim
    return torch.unflatten(windows, -1, (shape.num_channels, -1)), torch.unflatten(states, -1, heads)


def apply_rule(
    query_nHWK: Tensor, key_nHWK: Tensor, value_nHWV: Tensor, decay_nHW: Tensor, rate_nHW: Tensor, states_nHKV: Tensor
) -> Tensor:
    """Apply S <- exp(decay) S, then S <- S + rate key (value - S^T key)^T, and read S^T query, token after token.

    Args:
        query_nHWK: scaled.
        key_nHWK: of length 1.
        value_nHWV: to be read where the key is asked for.
        decay_nHW: logarithms, at most 0.
        rate_nHW: from 0 to 1.
        states_nHKV: changed in place.

    Returns:
        [n, H, W, V]
    """
    given = (query_nHWK, key_nHWK, value_nHWV, decay_nHW, rate_nHW)
    chunks = zip(*(torch.split(each, CHUNK_TOKENS, 2) for each in given), strict=True)
    return torch.cat([_apply_to_chunk(q, k, v, decay, rate, states_nHKV) for q, k, v, decay, rate in chunks], 2)


def _apply_to_chunk(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, states: Tensor) -> Tensor:
    """[n, H, L, ...] each: token i adds u_i to what key i finds, and u_i depends on those before it."""
    # In float64: sums reach hundreds, and float32 would leave only four digits to the differences of two of them.
    num_tokens, since_start = q.shape[2], decay.double().cumsum(-1)[..., None]
    k_rate, decayed = k * rate[..., None], since_start.exp().to(q)
    wanted = v * rate[..., None] - (k_rate * decayed) @ states
    if num_tokens == 1:
        added, within = wanted, (q * k).sum(-1, keepdim=True)
    else:
        later = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=q.device).triu(1)
        between = (since_start - since_start.transpose(-1, -2)).masked_fill(later, -torch.inf).exp().to(q)
        system = (k_rate @ k.transpose(-1, -2)) * between
        added = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        within = (q @ k.transpose(-1, -2)) * between
    out = (q * decayed) @ states + within @ added
    to_end = (since_start[..., -1:, :] - since_start).exp().to(q)
    states.mul_(decayed[..., -1:, :]).add_((k * to_end).transpose(-1, -2) @ added)
    return out

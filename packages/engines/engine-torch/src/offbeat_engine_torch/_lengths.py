"""Lengths from which on a model computes something else: read from its configuration, lowered to check it, limited.

transformers makes some things depend on the length of a whole call, which is a pack here and not a sequence, and some
families mask beyond a window in a way that is not passed to packed attention. Up to that length all of them are
trained as they are.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from torch import nn
from transformers import PretrainedConfig

from offbeat_core import ModelError, TrainSequence

LOWERED_TOKENS: Final = 8
"""Tokens that thresholds are lowered to for a check."""
_THRESHOLD: Final = re.compile(r"window|chunk|original_max_position|floor_scale|local_attention|block_size")
_NO_THRESHOLD: Final = re.compile(r"layers|pattern|feed_forward")
"""Names that `_THRESHOLD` finds too, of counts of layers, and of a way to save memory that changes no result."""
_ORIGINAL: Final = "original_max_position_embeddings"


@dataclass(frozen=True, kw_only=True)
class LengthLimit:
    """The longest sequence that the engine computes as its family does.

    Args:
        num_tokens: of prompt and completion.
        reason: what changes beyond it, and the key of config.json that says so.
    """

    num_tokens: int
    reason: str

    def check(self, sequences: Sequence[TrainSequence]) -> None:
        """Refuse sequences beyond the limit.

        Raises:
            ModelError: with the length found.
        """
        longest = max((len(sequence.ids) for sequence in sequences), default=0)
        if longest > self.num_tokens:
            raise ModelError(
                f"sequences must not be longer than {self.num_tokens} tokens: got {longest}; {self.reason}. Lower the "
                "longest prompt and completion"
            )


def shorter(*limits: LengthLimit | None) -> LengthLimit | None:
    """Return the limit that forbids the most."""
    return min((limit for limit in limits if limit), key=lambda limit: limit.num_tokens, default=None)


def rotary_limit(config: Any) -> LengthLimit | None:
    """Return the length beyond which rotary frequencies depend on the longest sequence of a pack; None for other kinds.

    Source: `dynamic_rope_update` in transformers, modeling_rope_utils.py.
    """
    config = config.get_text_config()
    whole = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    limits = []
    for rope in (whole, *(each for each in whole.values() if isinstance(each, Mapping))):
        kind = str(rope.get("rope_type") or rope.get("type") or "")
        if kind != "longrope" and "dynamic" not in kind:
            continue
        key = _ORIGINAL if kind == "longrope" else "max_position_embeddings"
        tokens = rope.get(key) or getattr(config, key, None) or config.max_position_embeddings
        reason = (
            f"with rope_type {kind!r} transformers takes other rotary frequencies for a whole pack beyond {key} = "
            f"{tokens}"
        )
        limits.append(LengthLimit(num_tokens=int(tokens), reason=reason))
    return shorter(*limits)


def find_thresholds(decoder: nn.Module, config: Any) -> dict[str, int]:
    """Lengths by the name of the setting, in tokens, above what they would be lowered to.

    Args:
        decoder: modules that may hold a setting as an attribute.
        config: of the decoder; what `rotary_limit` limits is left out.
    """
    limited = rotary_limit(config) is not None
    found: dict[str, int] = {}
    for holder in _holders(decoder, config):
        for name, value in _thresholds_of(holder):
            if not (limited and name == _ORIGINAL):
                found[name] = min(value, found.get(name, value))
    return found


@contextmanager
def lowered_thresholds(decoder: nn.Module, config: Any, names: Sequence[str]) -> Iterator[None]:
    """Lower thresholds of a model in memory to `LOWERED_TOKENS`, and put them back at the end."""
    changed = [
        (holder, name, value)
        for holder in _holders(decoder, config)
        for name, value in _thresholds_of(holder)
        if name in names
    ]
    for holder, name, _ in changed:
        holder[name] = LOWERED_TOKENS
    try:
        yield
    finally:
        for holder, name, value in changed:
            holder[name] = value


def _thresholds_of(holder: Mapping[str, Any]) -> list[tuple[str, int]]:
    return [
        (name, value)
        for name, value in holder.items()
        if type(value) is int and value > LOWERED_TOKENS and _THRESHOLD.search(name) and not _NO_THRESHOLD.search(name)
    ]


def _holders(decoder: nn.Module, config: Any) -> list[dict[str, Any]]:
    """Return the attributes of each configuration and module of a decoder, and the dictionaries in the former."""
    configs = [config.get_text_config(), *(getattr(module, "config", None) for module in decoder.modules())]
    holders: dict[int, dict[str, Any]] = {}
    for each in configs:
        if isinstance(each, PretrainedConfig):
            _add_nested(vars(each), holders)
    holders |= {id(vars(module)): vars(module) for module in decoder.modules()}
    return list(holders.values())


def _add_nested(holder: dict[str, Any], holders: dict[int, dict[str, Any]]) -> None:
    if id(holder) in holders:
        return
    holders[id(holder)] = holder
    for value in holder.values():
        if isinstance(value, dict):
            _add_nested(value, holders)

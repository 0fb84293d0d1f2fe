"""Where the tokens of a pass stand, and what the tower says to them, for models that see.

Shapes: N tokens of a pass, C half of head_dim, P positions, M placeholder tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offbeat_rollout_torch._decoder import Sight
from offbeat_rollout_torch._vision import Pictures, look


@dataclass(frozen=True)
class Stretch:
    """Consecutive tokens of one sequence in a pass.

    Args:
        pictures: of its prompt; None without any.
        first: place of the first of them in the sequence.
        num_tokens: how many.
    """

    pictures: Pictures | None
    first: int
    num_tokens: int


def turns_of(stretches: Sequence[Stretch], rotations_PC2: Tensor, axes_C: Tensor) -> Tensor | None:
    """[N, C, 2], where positions have axes; None where the place in the cache says it all."""
    if not len(axes_C):
        return None
    positions_3N = np.concatenate([_positions(each) for each in stretches], 1)
    by_pair_CN = torch.from_numpy(positions_3N).to(axes_C.device).index_select(0, axes_C)
    return rotations_PC2.gather(0, by_pair_CN.T[..., None].expand(-1, -1, 2))


def _positions(stretch: Stretch) -> npt.NDArray[np.int64]:
    """[3, num_tokens]: in time, height and width."""
    start, num_tokens, pictures = stretch.first, stretch.num_tokens, stretch.pictures
    index = np.arange(start, start + num_tokens)
    if pictures is None:
        return np.tile(index, (3, 1))
    found = np.tile(index + pictures.offset, (3, 1))
    of_prompt = pictures.positions_3P[:, start : start + num_tokens]
    found[:, : of_prompt.shape[1]] = of_prompt
    return found


def sight_of(stretches: Sequence[Stretch], tower: Any, device: torch.device) -> Sight | None:
    """What the tower says to those tokens of the pass that stand for images; None where there are none."""
    parts: list[tuple[Tensor, tuple[Tensor, ...]]] = []
    start = 0
    for each in stretches:
        if (pictures := each.pictures) is not None:
            first = each.first
            there = np.flatnonzero((pictures.place_M >= first) & (pictures.place_M < first + each.num_tokens))
            if len(there):
                seen = look(pictures, tower)
                rows = torch.from_numpy(there).to(device)
                place = torch.from_numpy(pictures.place_M[there] - first + start).to(device)
                parts.append((place, tuple(layer.index_select(0, rows) for layer in seen)))
        start += each.num_tokens
    if not parts:
        return None
    embeds, *deeper = (torch.cat(layer) for layer in zip(*(layers for _, layers in parts), strict=True))
    return Sight(torch.cat([place for place, _ in parts]), embeds, tuple(deeper))

"""Packs whose tokens several ranks share: each computes one of equal runs of the pack, and all get all answers.

Shapes: T tokens of a pack, t of them on a rank; N loss tokens, n of them predicted on a rank; C ranks, E hidden size.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from offbeat_engine_torch._layers.exchange import ContextParallel
from offbeat_engine_torch._layers.plan import AttentionPlan, to_device
from offbeat_mesh import Mesh
from offbeat_training import Indices


@dataclass(frozen=True, kw_only=True)
class CutPack:
    """One rank's run of a pack, and what the ranks found of the whole.

    Args:
        ranks: that share it.
        ids_t: token ids of the run.
        positions_t: of each in its sequence; [3, t] where a position has three axes.
        plan: of the whole pack, with this rank's run.
        query: `HeadQuery` of the loss tokens that the run predicts, at least one; None for hidden states.
        owner_N: rank that predicts each loss token.
        num_tokens: T.
        run: first token that is here, and the one after the last.
        routes_LKt: of the run, see `Routing.follow`; None where the pack has none.
    """

    ranks: ContextParallel
    ids_t: Tensor
    positions_t: Tensor
    plan: AttentionPlan
    query: Any
    owner_N: Indices
    num_tokens: int
    run: tuple[int, int]
    routes_LKt: Tensor | None = None

    def join(self, answer: Any) -> Any:
        """Return the answer for the whole pack: tensors [N] for a query, else hidden states [T, E]."""
        if self.query is None:
            return self.ranks.join(answer).flatten(0, 1)[: self.num_tokens]
        counts = np.bincount(self.owner_N, minlength=self.ranks.size)
        here_2n = torch.stack(list(answer))[:, : counts[self.ranks.rank]]
        longest = int(counts.max())
        if not longest:
            return tuple(here_2n)
        rows_C2n = self.ranks.join(functional.pad(here_2n, (0, longest - here_2n.shape[1])))
        # The number of each loss token among those of its rank.
        place_N = np.empty_like(self.owner_N)
        for rank, count in enumerate(counts):
            place_N[self.owner_N == rank] = np.arange(count)
        index_N = to_device(self.owner_N * longest + place_N, here_2n.device)
        return tuple(rows_C2n.transpose(0, 1).flatten(1).index_select(1, index_N))


@dataclass(frozen=True, kw_only=True)
class PackShare:
    """The share of a rank in every pack.

    Args:
        ranks: that share it.
        swaps_heads: in attention they swap tokens for heads; else each gathers keys and values. See `SharedTokens`.
    """

    ranks: ContextParallel
    swaps_heads: bool

    @classmethod
    def of(cls, mesh: Mesh, *, num_heads: int) -> "PackShare":
        """Return the share of this rank of a mesh; `num_heads`: query heads of a layer that are here."""
        ranks = ContextParallel.of(mesh, "cp")
        return cls(ranks=ranks, swaps_heads=num_heads % ranks.size == 0)

    def cut(
        self, ids_T: Tensor, positions_T: Tensor, plan: AttentionPlan, query: Any, routes_LKT: Tensor | None = None
    ) -> CutPack:
        """Cut a pack, padded to a multiple of the ranks with tokens that are a sequence of their own."""
        num_tokens, size = len(ids_T), self.ranks.size
        length = -(-num_tokens // size)
        first, stop = run = self.ranks.rank * length, (self.ranks.rank + 1) * length
        ids_t, positions_t, routes_LKt = (
            None if each is None else functional.pad(each, (0, length * size - num_tokens))[..., first:stop]
            for each in (ids_T, positions_T, routes_LKT)
        )
        assert ids_t is not None
        assert positions_t is not None
        owner_N = np.zeros(0, np.int64) if query is None else query.predictor_N // length
        return CutPack(
            ranks=self.ranks,
            ids_t=ids_t,
            positions_t=positions_t,
            plan=plan.shared(self.ranks.tokens, length * size, None if self.swaps_heads else run),
            query=None if query is None else _predicted_here(query, owner_N == self.ranks.rank, first),
            owner_N=owner_N,
            num_tokens=num_tokens,
            run=run,
            routes_LKt=routes_LKt,
        )


def _predicted_here(query: Any, is_here_N: Any, first: int) -> Any:
    """Return the query of loss tokens that are predicted here; of one where there are none: see `CutPack.join`."""
    if not is_here_N.any():  # kernels of the head take no empty tensors
        return replace(query, predictor_N=np.zeros(1, np.int64), target_N=np.zeros(1, np.int64))
    return replace(query, predictor_N=query.predictor_N[is_here_N] - first, target_N=query.target_N[is_here_N])

"""What the engine is asked, divided over its ranks, and passes over packs through megatron-core's pipeline schedules.

Shapes: T tokens of a sequence, N loss tokens of a micro-batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from offbeat_engine_megatron._groups import Ranks
from offbeat_engine_megatron._layout import Parallel
from offbeat_engine_megatron._mtp import TokensAhead
from offbeat_engine_megatron._packing import PassInputs, Share, cut, lay_out_all, plan_shares
from offbeat_mesh import Mesh
from offbeat_training import ImageProcessor, LossCalls, MicroBatch, count_tokens
from offbeat_types import DataError, Floats, TrainSequence, check_token_ids, spread_values

Found = Callable[[int, Tensor], Tensor]
"""Given a micro-batch's number and its answer [2, N], the loss to differentiate."""


class Passes:
    """Runs the parts of a model that this rank holds.

    Args:
        parts: of the model, wrapped or not.
        mesh: over megatron's groups.
        device: of this rank.
        ahead: takes part in training.
        images: of a model with a vision tower; None of a model for text.
        sees_always: run the tower though a pack has no image: it learns, and whatever waits for its gradients or its
            weights (megatron-core's overlapped reductions and gathers) finds the same on all ranks.
    """

    def __init__(
        self,
        parts: Sequence[Any],
        mesh: Mesh,
        device: torch.device,
        ahead: TokensAhead | None = None,
        images: ImageProcessor | None = None,
        *,
        sees_always: bool = False,
    ) -> None:
        self._parts, self._device, self._ahead = list(parts), device, ahead
        self._images = images if mesh.coordinates["pp"] == 0 else None  # there the tower is
        self._sees_always = sees_always
        self._cp = mesh.group("cp")
        self._run = get_forward_backward_func()

    def tensors(self) -> list[Tensor]:
        """All parameters of the parts."""
        return [parameter.detach() for part in self._parts for parameter in part.parameters()]

    def train(self, packs: Sequence[MicroBatch], losses: LossCalls) -> None:
        """Forward and backward over all packs; gradients are added up. Losses are called for on the last stage."""

        def differentiate(number: int, values_2N: Tensor) -> Tensor:
            value, nothing = losses.of(packs[number], *values_2N), values_2N.sum() * 0.0
            return nothing if value is None else value + nothing  # every rank of the schedule goes backward

        self._schedule(packs, differentiate, forward_only=False)

    @torch.no_grad()
    def answer(self, packs: Sequence[MicroBatch]) -> list[Tensor]:
        """[N] log-probabilities of each pack, without gradient; on the last stage, elsewhere nothing."""
        answers: dict[int, Tensor] = {}

        def keep(number: int, values_2N: Tensor) -> Tensor:
            answers[number] = values_2N[0]
            return values_2N

        self._schedule(packs, keep, forward_only=True)
        return [answers[number] for number in sorted(answers)]

    def _schedule(self, packs: Sequence[MicroBatch], found: Found, *, forward_only: bool) -> None:
        asked = [self._inputs(pack, trains=not forward_only) for pack in packs]

        def forward(numbered: Any, part: Any) -> tuple[Tensor, Callable[..., Any]]:
            number, this = next(numbered)
            return part(this), partial(_report, found, number)

        self._run(
            forward_step_func=forward,
            data_iterator=[iter(enumerate(asked)) for _ in self._parts],
            model=self._parts,
            num_microbatches=len(asked),
            seq_length=len(packs[0].ids_T),  # read where all are alike; else each micro-batch sends its own
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _inputs(self, pack: MicroBatch, *, trains: bool) -> PassInputs:
        asked = cut(pack, self._cp.rank, self._cp.size, self._device)
        if self._images is not None and (pack.images or self._sees_always):
            pixels, grid = self._images.pixels(pack.images)
            asked = replace(asked, pixels_PC=pixels.to(self._device), grid_I3=grid.to(self._device))
        return replace(asked, ahead=self._ahead.look(pack)) if self._ahead is not None and trains else asked


def _report(found: Found, number: int, values_2N: Tensor, non_loss_data: bool = False) -> Any:
    """What megatron-core asks for: nothing, or (loss, tokens to divide by, numbers to log)."""
    value = found(number, values_2N)
    return None if non_loss_data else (value, torch.zeros([], dtype=torch.int), {})


class Updates:
    """The share of this rank in each update, and of all in each answer.

    Args:
        ranks: of the trainer.
        parallel: sizes of the axes.
        budget: tokens of a micro-batch.
        vocabulary: token ids are below it.
        device: of this rank.
        images: of a model with a vision tower; None of a model for text.
    """

    def __init__(
        self,
        ranks: Ranks,
        parallel: Parallel,
        *,
        budget: int,
        vocabulary: int,
        device: torch.device,
        images: ImageProcessor | None = None,
    ) -> None:
        self._ranks, self._parallel, self._budget = ranks, parallel, budget
        self._vocabulary, self._device, self._images = vocabulary, device, images
        # What the number of micro-batches must be a multiple of.
        self._round = parallel.pp if parallel.vpp > 1 else 1

    def packs(self, what: str, sequences: Sequence[TrainSequence]) -> list[MicroBatch]:
        """Lay out the micro-batches of this rank, one at least: the ranks meet in each.

        Args:
            what: the call, for errors.
            sequences: of the whole update, the same on all ranks.

        Raises:
            ModelError: an id is not in the vocabulary.
            DataError: there are images and the model takes none, or their placeholders are others.
            MismatchError: another rank was given other sequences; on all.
        """
        self._ranks.check_same(what, sequences)  # called from here, so that a verdict shows whose call this was
        self._check(sequences)  # of what all have: all raise, or none
        share = self._shares(sequences)[self._ranks.share] or [[]] * self._round
        return lay_out_all(sequences, share, self._parallel, self._images)

    def logprobs(self, what: str, sequences: Sequence[TrainSequence], passes: Passes) -> list[Floats]:
        """[T] float32 nats of every sequence, 0 where loss_mask is False, on every rank; arguments as for `packs`."""
        self._ranks.check_same(what, sequences)
        self._check(sequences)
        shares = self._shares(sequences)
        packs = lay_out_all(sequences, shares[self._ranks.share], self._parallel, self._images)
        answers = [each.float().cpu().numpy() for each in passes.answer(packs)] if packs else []
        members = [list(chain.from_iterable(share)) for share in shares]
        counts = count_tokens(sequences, members)
        own = np.concatenate(answers) if answers else np.zeros(0, np.float32)
        found = self._ranks.gather_shares(own, counts, self._device) if any(counts) else []
        return spread_values(sequences, members if found else [], found)

    def _shares(self, sequences: Sequence[TrainSequence]) -> list[Share]:
        """Micro-batches of every share."""
        return plan_shares(sequences, budget=self._budget, num_shares=self._ranks.num_shares, round_up_to=self._round)

    def _check(self, sequences: Sequence[TrainSequence]) -> None:
        if self._images is not None:
            self._images.check(sequences)
        elif any(sequence.images for sequence in sequences):
            raise DataError(
                "sequences hold images, and the model takes none: train a vision-language model, or leave them out"
            )
        check_token_ids(sequences, self._vocabulary)

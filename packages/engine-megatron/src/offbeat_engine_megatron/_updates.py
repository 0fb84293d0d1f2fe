"""Divides what the engine is asked over its ranks, and brings their answers together.

Shapes: T tokens of a sequence.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from offbeat_engine_megatron._packing import MicroBatch, Share, lay_out_all, plan_shares
from offbeat_engine_megatron._parallel import Parallel
from offbeat_engine_megatron._passes import Passes
from offbeat_engine_megatron._ranks import Ranks
from offbeat_training import ImageProcessor, count_tokens
from offbeat_types import DataError, Floats, TrainSequence, check_token_ids, spread_values


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

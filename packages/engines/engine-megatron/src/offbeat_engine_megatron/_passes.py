"""Passes over packs through megatron-core's pipeline schedules, with the work divided over the engine's ranks.

Shapes: T tokens of a sequence, N loss tokens of a micro-batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from offbeat_core import Floats, TrainSequence, check_token_ids
from offbeat_device import MaskedAttention
from offbeat_engine_megatron._kernels import MASKED
from offbeat_engine_megatron._layers.experts import check_routes
from offbeat_engine_megatron._layout import Plan
from offbeat_engine_megatron._packing import PassInputs, attended_tokens, cut, lay_out_all
from offbeat_mesh import Mesh
from offbeat_training import (
    ImageInputs,
    ImageProcessor,
    LossCalls,
    MicroBatch,
    Share,
    TrainerRanks,
    answers_of_all,
    plan_shares,
)

Found = Callable[[int, Tensor], Tensor]
"""Given a micro-batch's number and its answer [2, N], the loss to differentiate."""

DeviceAttention = Callable[[MicroBatch], MaskedAttention | None]
"""Attention of a micro-batch by the device's own kernel, with the mask that belongs to its ids."""


def device_attention(plan: Plan, mesh: Mesh) -> DeviceAttention | None:
    """Return what asks the device for its attention of a micro-batch; None where the engine attends itself."""
    if plan.kernels(mesh.device).attention != MASKED:
        return None
    cp, image_ids = mesh.group("cp"), frozenset([plan.hf_config.image_token_id] if plan.shape.tower else [])

    def ask(pack: MicroBatch) -> MaskedAttention | None:
        return mesh.device.masked_attention(attended_tokens(pack, cp.rank, cp.size, image_ids))

    return ask


class Passes:
    """Runs the parts of a model that this rank holds, wrapped or not.

    With `attention` the device shapes each micro-batch for its own kernel: it is asked on every rank of every stage,
    since all of them attend. With `sees_always` the vision tower runs though a pack has no image: it learns, and what
    waits for its gradients or its weights (megatron-core's overlapped reductions and gathers) finds the same on all
    ranks.
    """

    def __init__(
        self,
        parts: Sequence[Any],
        mesh: Mesh,
        images: ImageInputs,
        *,
        attention: DeviceAttention | None = None,
        mtp_layers: int = 0,
        sees_always: bool = False,
    ) -> None:
        self._parts, self._device, self._mtp_layers = list(parts), mesh.device.torch_device, mtp_layers
        self._attention = attention
        is_first = mesh.coordinates["pp"] == 0  # there the tower is
        self._images = images if isinstance(images, ImageProcessor) and is_first else None
        self._sees_always = sees_always
        self._cp = mesh.group("cp")
        self._run = get_forward_backward_func()

    def tensors(self) -> list[Tensor]:
        """Return all parameters of the parts."""
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
            if self._attention is not None:  # here, so that masks of later micro-batches take no memory yet
                this = replace(this, attention=self._attention(packs[number]))
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
        mtp_layers = self._mtp_layers if trains else 0
        asked = cut(pack, self._cp.rank, self._cp.size, self._device, mtp_layers=mtp_layers)
        if self._images is not None and (pack.images or self._sees_always):
            pixels, grid = self._images.pixels(pack.images)
            asked = replace(asked, pixels_PC=pixels.to(self._device), grid_I3=grid.to(self._device))
        return asked


def _report(found: Found, number: int, values_2N: Tensor, non_loss_data: bool = False) -> Any:
    """Return what megatron-core asks for: nothing, or (loss, tokens to divide by, numbers to log)."""
    value = found(number, values_2N)
    return None if non_loss_data else (value, torch.zeros([], dtype=torch.int), {})


class Updates:
    """The share of this rank in each update, and of all in each answer."""

    def __init__(self, ranks: TrainerRanks, plan: Plan, images: ImageInputs) -> None:
        self._ranks, self._plan, self._images = ranks, plan, images
        # What the number of micro-batches must be a multiple of.
        self._round = plan.parallel.pp if plan.parallel.vpp > 1 else 1

    def packs(self, what: str, sequences: Sequence[TrainSequence]) -> list[MicroBatch]:
        """Lay out the micro-batches of this rank, one at least: the ranks meet in each.

        Args:
            what: the call, for errors.
            sequences: of the whole update, the same on all ranks.
        """
        self._ranks.check_same(what, sequences)  # called from here, so that a verdict shows whose call this was
        share = self._shares(sequences)[self._ranks.share] or [[]] * self._round
        return lay_out_all(sequences, share, self._plan.parallel, self._images)

    def logprobs(self, what: str, sequences: Sequence[TrainSequence], passes: Passes) -> list[Floats]:
        """[T] float32 nats of every sequence, 0 where loss_mask is False, on every rank; arguments as for `packs`."""
        self._ranks.check_same(what, sequences)
        shares = self._shares(sequences)
        packs = lay_out_all(sequences, shares[self._ranks.share], self._plan.parallel, self._images)
        answers = [each.float() for each in passes.answer(packs)] if packs else []
        return answers_of_all(self._ranks, sequences, shares, answers)

    def _shares(self, sequences: Sequence[TrainSequence]) -> list[Share]:
        """Micro-batches of every share."""
        self._images.check(sequences)  # of what all have: all raise, or none
        check_token_ids(sequences, self._plan.shape.vocabulary)
        check_routes(sequences, self._plan.shape)
        return plan_shares(
            sequences,
            budget=self._plan.config.max_tokens_per_microbatch,
            share_prompts=False,
            num_shares=self._ranks.num_shares,
            even=True,
            round_up_to=self._round,
        )

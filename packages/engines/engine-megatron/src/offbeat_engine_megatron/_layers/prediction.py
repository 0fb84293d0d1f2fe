"""Multi-token prediction: its layers, their first values, and its loss.

Layer k gets the hidden states of the layer before it (k = 1: of the model) and the embedding of
the token k places on, and predicts the token after that one, with the model's own embedding and head. The layers are
megatron-core's. Source: DeepSeek-V3 (arXiv:2412.19437), section 2.2;
megatron/core/transformer/multi_token_prediction.py.

Shapes: L tokens of this rank, E hidden size, n predictors on this rank.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from offbeat_core import Metric, Metrics, TrainSequence
from offbeat_engine_megatron._layers.attention import SequenceNorm
from offbeat_engine_megatron._layout import MegatronEngineOptions
from offbeat_engine_megatron._packing import MtpInputs
from offbeat_engine_megatron._slots import Slot
from offbeat_mesh import Mesh


def mtp_block_spec(layer: ModuleSpec, num_layers: int) -> MultiTokenPredictionBlockSubmodules:
    """megatron-core's layers, around transformer layers like the model's."""
    spec = ModuleSpec(
        module=MultiTokenPredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=SequenceNorm,
            hnorm=SequenceNorm,
            eh_proj=ColumnParallelLinear,
            transformer_layer=layer,
            layer_norm=SequenceNorm,
        ),
    )
    return MultiTokenPredictionBlockSubmodules(layer_specs=[spec] * num_layers)


def new_mtp_tensors(slots: Iterable[Slot], *, seed: int, std: float) -> Iterator[tuple[str, Tensor]]:
    """(name, first values) of each tensor, the same on all ranks and in every layout: norms one, biases zero, matrices
    normal with this deviation.
    """
    for slot in slots:
        if slot.name.endswith(".bias"):
            yield slot.name, torch.zeros(slot.shape)
        elif len(slot.shape) == 1:
            yield slot.name, torch.ones(slot.shape)
        else:
            digest = hashlib.blake2b(f"{seed} {slot.name}".encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
            yield slot.name, torch.randn(slot.shape, generator=generator) * std


MTP_METRIC: Final = "mtp_loss"


class MtpLoss:
    """Adds the loss of multi-token prediction to that of the model, and says what it was.

    The loss of layer k is the mean cross entropy, nats, over the loss tokens of the update that have k + 1 tokens
    before them; the layers' mean, times the weight, is added to the loss function's. All ranks of the last stage take
    part in its sum over dp and cp; one reports it.
    """

    def __init__(self, mesh: Mesh, options: MegatronEngineOptions) -> None:
        self._mesh, self._detached = mesh, options.mtp_detached
        self._shares = mesh.group("dp", "cp")
        self._scale, self._depths = options.mtp_loss_weight / options.mtp_layers, range(1, options.mtp_layers + 1)
        self.begin(())

    def begin(self, sequences: Sequence[TrainSequence]) -> None:
        """Begin an update; this rank computes a share of it."""
        places = [np.flatnonzero(sequence.loss_mask) for sequence in sequences]
        self._totals = [sum(int((each > depth).sum()) for each in places) for depth in self._depths]
        self._sums = torch.zeros(len(self._depths), device=self._mesh.device.torch_device)

    def attach(
        self, model: Any, hidden_L1E: Tensor, weight: Tensor | None, inputs: Sequence[MtpInputs], **layer: Any
    ) -> Tensor:
        """Return the hidden states as they are, with the gradient of the layers' loss behind them.

        Args:
            model: the last part: its layers, embedding and head are used.
            hidden_L1E: of the model, normalised; under sequence parallelism this rank's tokens.
            weight: of the head when it is shared.
            inputs: of each layer.
            **layer: further arguments of each transformer layer.
        """
        weight = model.output_layer.weight if weight is None else weight
        states = hidden_L1E.detach().requires_grad_() if self._detached else hidden_L1E
        loss = hidden_L1E.new_zeros(())
        for number, (block, asked) in enumerate(zip(model.mtp.layers, inputs, strict=True)):
            embedded = model.embedding(input_ids=asked.ids_1L, position_ids=None)
            if self._detached:
                embedded, weight = embedded.detach().requires_grad_(), weight.detach()
            states = _run(block, states, embedded, layer)
            logprobs_n, _ = model.output_layer.answer(states, weight, asked.predictor_n, asked.target_n)
            total = -logprobs_n.sum()
            self._sums[number] += total.detach()
            loss = loss + self._scale / max(self._totals[number], 1) * total
        found: Tensor = MTPLossAutoScaler.apply(hidden_L1E, loss)
        return found

    def metrics(self) -> Metrics:
        """Loss of each layer over the whole update, on the one rank that reports; a call of all."""
        with self._mesh.where(pp="last") as takes_part:
            if takes_part:
                self._shares.all_reduce(self._sums)
        if not self._mesh.where(pp="last", dp=0, cp=0, tp=0):
            return {}
        return {
            f"{MTP_METRIC}_{depth}": Metric(value=value / max(total, 1), weight=float(total))
            for depth, value, total in zip(self._depths, self._sums.tolist(), self._totals, strict=True)
        }


def _run(block: Any, states: Tensor, embedded: Tensor, layer: dict[str, Any]) -> Tensor:
    """Return one layer, computed again in the backward pass where the model's layers are."""

    def compute(states: Tensor, embedded: Tensor) -> Tensor:
        answer: Tensor = block._proj_and_transformer_layer(hidden_states=states, decoder_input=embedded, **layer)
        return answer

    if block.config.recompute_granularity != "full":
        return compute(states, embedded)
    # megatron-core's own way there hands everything to the checkpoint, which keeps tensors only.
    found: Tensor = tensor_parallel.checkpoint(compute, False, states, embedded)
    return found

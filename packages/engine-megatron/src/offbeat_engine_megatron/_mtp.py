"""Multi-token prediction: layers behind the model that predict the tokens after the next one.

Layer k gets the hidden states of the layer before it (k = 1: of the model) and the embedding of the token k places on,
and predicts the token after that one, with the model's own embedding and head. The layers are megatron-core's; the
tokens k places on are laid out on the host, for all ranks alike: megatron-core's own roll exchanges them between
context parallel ranks by sends in the order of sequences, twice a layer.
Source: DeepSeek-V3 (arXiv:2412.19437), section 2.2; megatron/core/transformer/multi_token_prediction.py.

Shapes: L tokens of this rank, T packed tokens, E hidden size, n predictors on this rank.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from offbeat_engine_megatron._layers import SequenceNorm
from offbeat_engine_megatron._packing import token_logprobs, zigzag
from offbeat_engine_megatron._slots import Slot
from offbeat_mesh import Mesh
from offbeat_training import MicroBatch
from offbeat_types import Metric, Metrics, TrainSequence

METRIC: Final = "mtp_loss"


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """What one layer computes with, on this rank's device.

    Args:
        ids_1L: for each token of this rank the one that many places on in its sequence; 0 beyond its end.
        predictor_n: index among all tokens of this context parallel rank of those whose prediction counts.
        target_n: the ids they should predict.
    """

    ids_1L: Tensor
    predictor_n: Tensor
    target_n: Tensor


def block_spec(layer: ModuleSpec, num_layers: int) -> MultiTokenPredictionBlockSubmodules:
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


def new_tensors(slots: Sequence[Slot], *, seed: int, std: float) -> Iterator[tuple[str, Tensor]]:
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


class TokensAhead:
    """Adds the loss of the layers to that of the model, and says what it was.

    The loss of layer k is the mean cross entropy, nats, over the loss tokens of the update that have k + 1 tokens
    before them; the layers' mean, times the weight, is added to the loss function's. All ranks of the last stage take
    part in its sum over dp and cp; one reports it.

    Args:
        mesh: over megatron's groups.
        device: of this rank.
        num_layers: how many.
        weight: of their mean.
        detached: train the layers alone, not the model behind them.
    """

    def __init__(self, mesh: Mesh, device: torch.device, *, num_layers: int, weight: float, detached: bool) -> None:
        self._mesh, self._device, self._detached = mesh, device, detached
        self._cp, self._shares = mesh.group("cp"), mesh.group("dp", "cp")
        self._scale, self._depths = weight / num_layers, range(1, num_layers + 1)
        self._totals = [0] * num_layers
        self._sums = torch.zeros(num_layers, device=device)

    def begin(self, sequences: Sequence[TrainSequence]) -> None:
        """An update comes, of which this rank computes a share."""
        places = [np.flatnonzero(sequence.loss_mask) for sequence in sequences]
        self._totals = [sum(int((each > depth).sum()) for each in places) for depth in self._depths]
        self._sums = torch.zeros(len(self._depths), device=self._device)

    def look(self, pack: MicroBatch) -> tuple[Ahead, ...]:
        """What the layers compute with on this rank, of one micro-batch."""
        places = zigzag(pack.lengths, self._cp.rank, self._cp.size)
        here_T = np.full(len(pack.ids_T), -1)
        here_T[places] = np.arange(len(places))
        ends = np.cumsum(pack.lengths)
        start_N = (ends - np.asarray(pack.lengths))[pack.sequence_N]
        end_T = np.repeat(ends, pack.lengths)
        found = []
        for depth in self._depths:
            later_T = np.arange(len(pack.ids_T)) + depth
            ids_T = np.where(later_T < end_T, pack.ids_T[np.minimum(later_T, len(pack.ids_T) - 1)], 0)
            predictor_N = pack.predictor_N - depth
            counts = (predictor_N >= start_N) & (here_T[np.maximum(predictor_N, 0)] >= 0)
            arrays = ids_T[places], here_T[predictor_N[counts]], pack.target_N[counts]
            ids, predictor, target = (torch.from_numpy(each).to(self._device) for each in arrays)
            found.append(Ahead(ids_1L=ids[None], predictor_n=predictor, target_n=target))
        return tuple(found)

    def attach(
        self, model: Any, hidden_L1E: Tensor, weight: Tensor | None, ahead: Sequence[Ahead], **layer: Any
    ) -> Tensor:
        """The hidden states as they are, with the gradient of the layers' loss behind them.

        Args:
            model: the last part: its layers, embedding and head are used.
            hidden_L1E: of the model, normalised; under sequence parallelism this rank's tokens.
            weight: of the head when it is shared.
            ahead: what `look` gave.
            **layer: further arguments of each transformer layer.
        """
        weight = model.output_layer.weight if weight is None else weight
        states = hidden_L1E.detach().requires_grad_() if self._detached else hidden_L1E
        loss = hidden_L1E.new_zeros(())
        for number, (block, asked) in enumerate(zip(model.mtp.layers, ahead, strict=True)):
            embedded = model.embedding(input_ids=asked.ids_1L, position_ids=None)
            if self._detached:
                embedded, weight = embedded.detach().requires_grad_(), weight.detach()
            states = _run(block, states, embedded, layer)
            total = -_logprobs(model.output_layer, states, weight, asked).sum()
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
            f"{METRIC}_{depth}": Metric(value=value / max(total, 1), weight=float(total))
            for depth, value, total in zip(self._depths, self._sums.tolist(), self._totals, strict=True)
        }


def _run(block: Any, states: Tensor, embedded: Tensor, layer: dict[str, Any]) -> Tensor:
    """One layer, computed again in the backward pass where the model's layers are."""

    def compute(states: Tensor, embedded: Tensor) -> Tensor:
        answer: Tensor = block._proj_and_transformer_layer(hidden_states=states, decoder_input=embedded, **layer)
        return answer

    if block.config.recompute_granularity != "full":
        return compute(states, embedded)
    # megatron-core's own way there hands everything to the checkpoint, which keeps tensors only.
    found: Tensor = tensor_parallel.checkpoint(compute, False, states, embedded)
    return found


def _logprobs(head: Any, states_L1E: Tensor, weight: Tensor, asked: Ahead) -> Tensor:
    """[n] log-probabilities of the targets at temperature 1."""
    tp = head.settings.tp
    if head.settings.sequence_parallel:
        states_L1E = gather_from_sequence_parallel_region(states_L1E, group=tp.process_group)
    else:
        states_L1E = copy_to_tensor_model_parallel_region(states_L1E, group=tp.process_group)
    chosen = states_L1E[:, 0].index_select(0, asked.predictor_n)
    return token_logprobs(chosen, weight, asked.target_n, tp, scale=1.0, entropy_gradient=False)[0]

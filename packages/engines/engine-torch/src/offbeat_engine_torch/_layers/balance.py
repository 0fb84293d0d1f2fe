"""Choices of routers, counted over whole updates; the loss that balances experts; the rule that moves biases.

All three look at sequences, each with its tokens up to the last that it trains on, however they are packed: a prompt
that several sequences share counts once for each. So they do not depend on micro-batches, shared prompts and ranks.

The loss is the mean, over sequences and layers with experts, of transformers' `load_balancing_loss_func` of the one
sequence in the one layer: X sum_i f_i P_i, with the share f_i of its tokens that chose expert i and the mean P_i of
their probabilities of it; K when all experts are alike. A sum over sequences is the same in any micro-batches, which
is why DeepSeek-V3 takes fractions within a sequence as well (arXiv:2412.19437, equations 17 to 20). Of routers with
sigmoids, probabilities are the scores of a token divided by their sum, as there.

Shapes: t tokens of a micro-batch on this rank, X experts, K experts of a token, L layers with experts, G segments of a
pack, S its sequences.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from offbeat_core import ConfigError, Metric, Metrics
from offbeat_engine_torch._formats import ROUTER_BIASES, is_router, wrap_router
from offbeat_engine_torch._layers.exchange import ContextParallel
from offbeat_engine_torch._layers.plan import to_device
from offbeat_training import MicroBatch


@dataclass(frozen=True, kw_only=True)
class RoutedTokens:
    """Tokens of a micro-batch on this rank, and the sequences of the pack.

    Args:
        times_t: sequences that a token is of, int64; 0 for padding and for a rank without work.
        segment_t: segment of the pack that it is in.
        member_SG: float32, 1 where a segment is of a sequence.
        length_S: float32, tokens of each sequence.
        num_sequences: of the whole update, over all ranks.
        counts: whether choices are counted; they are not when the forward pass runs again in the backward pass.
    """

    times_t: Tensor
    segment_t: Tensor
    member_SG: Tensor
    length_S: Tensor
    num_sequences: int
    counts: bool = True


class Routers:
    """The routers of a model that trains.

    Args:
        whole: transformers model. Its layers of experts get a `watch`.
        context: ranks that share the tokens of each pack; None where this rank has them.
        loss_weight: coefficient of the loss that balances experts; 0: there is none.
        bias_rate: by which a step moves the biases of its routers; 0: they stay.

    Attributes:
        now: tokens of the micro-batch in hand; None outside of an update.
        counts: choices of each layer's experts on this rank, [X] int64, since they were last taken.
        loss: of balance on this rank since then.

    Raises:
        ConfigError: the model has no routers with probabilities, or no biases, where these are asked for.
    """

    def __init__(
        self, whole: nn.Module, context: ContextParallel | None, *, loss_weight: float, bias_rate: float
    ) -> None:
        self.name, self.context = f"routers {id(self)}", context
        self.now: RoutedTokens | None = None
        self.loss_weight, self._bias_rate = loss_weight, bias_rate
        device = next(whole.parameters()).device
        layers = list(find_expert_layers(whole))
        check_balance(whole, loss_weight=loss_weight, bias_rate=bias_rate)
        self.counts = [torch.zeros(experts.num_experts, dtype=torch.int64, device=device) for _, experts in layers]
        self.loss = torch.zeros((), device=device)
        biases = [find_bias(block) for block, _ in layers] if bias_rate else []
        self._biases = [bias for bias in biases if bias is not None]
        self._since_step: list[Tensor] = []
        for (block, experts), counts in zip(layers, self.counts, strict=True):
            experts.watch = LayerWatch(self, counts, find_router(block) if loss_weight else None)
        _BY_NAME[self.name] = self

    @contextmanager
    def watching(self, batch: MicroBatch, num_sequences: int) -> Iterator[None]:
        """Look at a micro-batch of an update of so many sequences, until its backward pass is over."""
        if self.counts:
            self.now = self._routed(batch, num_sequences)
        try:
            yield
        finally:
            self.now = None

    def counted(self) -> None:
        """Count no more: the forward pass is over, and may run again."""
        if self.now is not None:
            self.now = replace(self.now, counts=False)

    def take(self) -> tuple[list[Tensor], Tensor]:
        """Return the counts of this rank and its loss of balance, and begin anew."""
        taken, loss = [each.clone() for each in self.counts], self.loss.clone()
        for each in (*self.counts, self.loss):
            each.zero_()
        return taken, loss

    def keep(self, counts: list[Tensor]) -> None:
        """Add counts of all ranks to those that the next step moves biases by."""
        if self._bias_rate:
            kept = self._since_step or [torch.zeros_like(each) for each in counts]
            self._since_step = [old + new for old, new in zip(kept, counts, strict=True)]

    def drop(self) -> None:
        """Forget what no step has used."""
        self.take()
        self._since_step = []

    @torch.no_grad()
    def move_biases(self) -> None:
        """Raise the bias of each expert that fewer tokens chose than the mean of its layer, and lower the others'.

        Source: arXiv:2408.15664, algorithm 1.
        """
        for bias, counts in zip(self._biases, self._since_step, strict=bool(self._biases)):
            surplus = counts * len(counts) - counts.sum()  # in whole numbers: at the mean a bias stays
            bias.view(-1).sub_(self._bias_rate * surplus.sign())

    def _routed(self, batch: MicroBatch, num_sequences: int) -> RoutedTokens:
        device, members = self.loss.device, members_of(batch)
        lengths = np.array([segment.length for segment in batch.segments])
        segment_T = np.repeat(np.arange(len(lengths)), lengths)
        times_T = members.sum(0).astype(np.int64)[segment_T]
        if self.context is not None:
            segment_T, times_T = (_run_of(each, self.context) for each in (segment_T, times_T))
        return RoutedTokens(
            times_t=to_device(times_T, device),
            segment_t=to_device(segment_T, device),
            member_SG=to_device(members.astype(np.float32), device),
            length_S=to_device((members @ lengths).astype(np.float32), device),
            num_sequences=num_sequences,
        )


_BY_NAME: Final[WeakValueDictionary[str, Routers]] = WeakValueDictionary()
"""Routers of each model, in which an operation of a compiled layer finds the tokens in hand."""


class LayerWatch:
    """Watch over one layer's choices.

    Args:
        routers: all of the model's.
        counts: where this layer's choices are added up, [X].
        router: whose probabilities the loss needs; None for no loss.
    """

    def __init__(self, routers: Routers, counts: Tensor, router: nn.Module | None) -> None:
        self._routers, self._counts = routers, counts
        self._scores = _Scores(router, len(counts), routers) if router is not None else None

    def see(self, expert_tK: Tensor, weight_tK: Tensor) -> Tensor:
        """Count choices; return their weights, through which the gradient of the loss reaches the router."""
        _count_choices(expert_tK, self._counts, self._routers.name)
        now = self._routers.now
        if self._scores is None or now is None:
            return weight_tK
        with torch.autocast(expert_tK.device.type, enabled=False):
            loss = self._loss(self._scores.probabilities(), expert_tK, now)
        if now.counts:
            self._routers.loss += loss.detach()
        balanced: Tensor = _Beside.apply(weight_tK, self._routers.loss_weight * loss)  # type: ignore[no-untyped-call]
        return balanced

    def _loss(self, probability_tX: Tensor, expert_tK: Tensor, now: RoutedTokens) -> Tensor:
        """Return this rank's part of the loss.

        Counts carry no gradient, so it is linear in the probabilities: those of a token are weighed by the counts of
        the sequences that it is of.
        """
        is_real_t = (now.times_t > 0).float()
        with torch.no_grad():
            counts_GX = is_real_t.new_zeros(now.member_SG.shape[1] * len(self._counts))
            place_tK = now.segment_t[:, None] * len(self._counts) + expert_tK
            counts_GX.index_add_(0, place_tK.flatten(), is_real_t.repeat_interleave(expert_tK.shape[1]))
            counts_SX = now.member_SG @ counts_GX.view(-1, len(self._counts))
            if self._routers.context is not None and len(counts_SX):  # all that share a pack know its sequences
                self._routers.context.group.all_reduce(counts_SX)
            counts_SX *= (len(self._counts) / now.length_S**2)[:, None]
            weight_GX = now.member_SG.T @ counts_SX
            weight_tX = weight_GX[now.segment_t] * is_real_t[:, None]
        return (probability_tX * weight_tX).sum() / (len(self._routers.counts) * now.num_sequences)


class _Scores:
    """The logits of a router's last call.

    Args:
        router: of a transformers model, which returns them, [t, X], among other tensors.
        num_experts: X.
        routers: all of the model's.
    """

    def __init__(self, router: nn.Module, num_experts: int, routers: Routers) -> None:
        self._num_experts, self._routers = num_experts, routers
        self._logits: Tensor | None = None
        self._has_sigmoids: bool | None = None
        wrap_router(router, self)

    def probabilities(self) -> Tensor:
        """Return those of the last call, [t, X] float32, which add up to 1 for each token; once."""
        assert self._logits is not None, "experts were chosen by no router"
        logits, self._logits = self._logits.float(), None
        if not self._has_sigmoids:
            return logits.softmax(-1)
        scores = logits.sigmoid()
        return scores / scores.sum(-1, keepdim=True)

    def __call__(self, router: nn.Module, own: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if self._routers.now is None:
            return own(*args, **named)
        if self._has_sigmoids is None:
            with _Sigmoids() as sigmoids:
                found = own(*args, **named)
            self._has_sigmoids = sigmoids.seen
        else:
            found = own(*args, **named)
        tensors = [each for each in found if each.is_floating_point() and each.shape[-1] == self._num_experts]
        self._logits = tensors[0].reshape(-1, self._num_experts)
        return found


class _Sigmoids(TorchFunctionMode):
    """Notes whether a sigmoid is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= func in (torch.sigmoid, Tensor.sigmoid, functional.sigmoid)
        return func(*args, **(kwargs or {}))


class _Beside(torch.autograd.Function):
    """Values as they are, and a loss that has a gradient of 1 where these have one."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones((), device=grads[0].device)


@torch.library.custom_op("offbeat_engine_torch::count_choices", mutates_args={"counts"})
def _count_choices(expert_tK: Tensor, counts: Tensor, name: str) -> None:
    """Add choices to a layer's counts, each for every sequence that its token is of."""
    now = _BY_NAME[name].now
    if now is not None and now.counts:
        counts.index_add_(0, expert_tK.flatten(), now.times_t.repeat_interleave(expert_tK.shape[1]))


def statistics(counts: list[Tensor]) -> Metrics:
    """Return what the choices of all ranks in an update say of the routers; nothing where nothing was chosen."""
    numbers = iter(torch.cat(counts).tolist())  # one copy from the device
    layers = [[next(numbers) for _ in each] for each in counts]
    if not any(map(sum, layers)):
        return {}
    load = max(max(layer) * len(layer) / sum(layer) for layer in layers)
    unused = sum(layer.count(0) for layer in layers)
    return {
        "router_max_load": Metric(value=load, how="max"),
        "router_unused_experts": Metric(value=float(unused)),
    }


def members_of(batch: MicroBatch) -> npt.NDArray[np.bool_]:
    """Return, [S, G], which segments of a pack are of each of its sequences."""
    starts = [segment.start for segment in batch.segments]
    members = np.zeros((len(batch.members), len(starts)), np.bool_)
    for number in range(len(batch.members)):
        # The last token that trains is predicted by the last that the sequence has in the pack.
        last = batch.predictor_N[batch.sequence_N == number][-1]
        segment = int(np.searchsorted(starts, last, side="right")) - 1
        while segment >= 0:
            members[number, segment] = True
            segment = batch.segments[segment].parent
    return members


def _run_of(values_T: npt.NDArray[np.int64], context: ContextParallel) -> npt.NDArray[np.int64]:
    """Return those of the tokens of a pack that are here; 0 for padding."""
    length = -(-len(values_T) // context.size)
    padded = np.pad(values_T, (0, length * context.size - len(values_T)))
    return padded[context.rank * length : (context.rank + 1) * length]


def find_expert_layers(whole: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """Iterate over the blocks with a layer of experts, and the layer.

    They are those that transformers hands to the function of `experts_implementation`, and marks by an attribute.
    """
    for block in whole.modules():
        for layer in block.children():
            if hasattr(layer, "_is_expert_parallel"):
                yield block, layer


def find_router(block: nn.Module) -> nn.Module | None:
    """Return the router of a block; None where it has none of a class of its own."""
    return next((each for each in block.children() if is_router(each)), None)


def find_bias(block: nn.Module) -> Tensor | None:
    """Return what the router of a block adds to its scores before it chooses; None where it adds nothing."""
    named = ((name.rpartition(".")[2], each) for name, each in block.named_buffers())
    return next((each for name, each in named if name in ROUTER_BIASES), None)


def check_balance(whole: nn.Module, *, loss_weight: float, bias_rate: float) -> None:
    """Refuse a model whose experts cannot be balanced as asked.

    Raises:
        ConfigError: with what to change.
    """
    family, blocks = type(whole).__name__, [block for block, _ in find_expert_layers(whole)]
    if loss_weight and not (blocks and all(find_router(block) for block in blocks)):
        what = "has a layer of experts without a router of its own class" if blocks else "has no stacks of experts"
        raise ConfigError(f"option router_aux_loss needs probabilities of experts: {family} {what}; set it to 0")
    if bias_rate and not (blocks and all(find_bias(block) is not None for block in blocks)):
        raise ConfigError(f"option router_bias_rate needs routers with a bias, and {family} has none; set it to 0")

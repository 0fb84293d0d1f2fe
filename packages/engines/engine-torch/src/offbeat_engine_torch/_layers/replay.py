"""Routers that follow the engine that sampled: R3, rollout routing replay (arXiv:2510.11370).

A router of transformers scores all experts, takes the best by `torch.topk`, and weighs them by their scores. Where
routes are replayed, `topk` gives the experts of the route and their scores, so that everything after it is the family's
own: softmax, sigmoid, normalised, scaled. Weights and their gradients are the trainer's; only the choice is not.

Shapes: T tokens of a pass, E experts of a layer, K of them for each token, L decoder layers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from offbeat_core import ModelError, TrainSequence
from offbeat_engine_torch._formats import is_router, wrap_router

_TOPK: Final = (torch.topk, Tensor.topk)


class Routing:
    """The routers of a model, which choose by themselves unless they are given routes.

    Args:
        whole: a transformers model; each of its routers is wrapped.

    Attributes:
        problem: why routes cannot be replayed, once the routers were watched; "" where they can.
    """

    def __init__(self, whole: Any) -> None:
        found = [(name, each) for name, each in whole.named_modules() if is_router(each)]
        self._routers = [_Router(module, _layer_of(name)) for name, module in found]
        self._num_layers = int(getattr(whole.config.get_text_config(), "num_hidden_layers", 0)) if found else 0
        self.problem = "" if self._routers else "the model has no routers that this engine knows"

    @property
    def has_routers(self) -> bool:
        """Return whether there are any."""
        return bool(self._routers)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Learn from the passes of the block how each router chooses; see `problem`."""
        for router in self._routers:
            router.is_watched = True
        yield
        for router in self._routers:
            router.is_watched = False
        widths = {router.num_chosen for router in self._routers}
        for router in self._routers:
            self.problem = self.problem or router.problem
        if len(widths) > 1 and not self.problem:
            self.problem = f"its layers take {', '.join(map(str, sorted(widths)))} experts, and routes one number"

    def follow(self, routes_LKT: Tensor | None, *, replays: bool = True) -> None:
        """Take these routes in all passes from here on, those that recompute activations too; None: take none.

        Args:
            routes_LKT: [L, K, T] int16; below 0 for a token whose router chooses.
            replays: take them; otherwise choices are only compared with them.
        """
        for router in self._routers:
            router.replays = replays
            router.route_TK = None if routes_LKT is None else routes_LKT[router.layer].t()

    def differing(self) -> Tensor | None:
        """[T] share of the layers in which the routers, in the last pass, would have chosen another set of experts.

        Below 0 for tokens without a route; None without routes.
        """
        found = [router.differs_T for router in self._routers if router.route_TK is not None]
        return torch.stack([each for each in found if each is not None]).float().mean(0) if found else None

    def check(self, sequences: Sequence[TrainSequence], family: str) -> None:
        """Refuse routes that are not of this model.

        Raises:
            ModelError: with what was found.
        """
        routes = [each for sequence in sequences for each in sequence.routes]
        if not routes:
            return
        if self.problem:
            raise ModelError(f"routes of {family} cannot be replayed: {self.problem}; set rollout.replay_routes = off")
        layers, width = self._num_layers, self._routers[0].num_chosen
        num_experts = min(router.num_experts for router in self._routers)
        wrong = next((e for e in routes if e.shape[1:] != (layers, width) or e.highest >= num_experts), None)
        if wrong is not None:
            raise ModelError(
                f"routes must be of {layers} layers with {width} of {num_experts} experts, as {family} has them: got "
                f"{wrong.shape[1]} layers with {wrong.shape[2]} experts numbered up to {wrong.highest}"
            )


def _layer_of(name: str) -> int:
    """Return the number of the decoder layer that a module is in: the first number in its name."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), 0)


class _Router:
    """The choice of a router.

    Attributes:
        layer: number of its decoder layer.
        is_watched: a pass runs to find out how it chooses.
        replays: whether its choice is replaced, or only compared.
        num_experts, num_chosen: E and K, once it was watched.
        route_TK: experts to take; None: its own.
        differs_T: of the last pass with a route, whether its own choice was another set; -1 without a route.
    """

    def __init__(self, module: Any, layer: int) -> None:
        self.layer = layer
        self.is_watched, self.replays = False, True
        self.num_experts = self.num_chosen = 0
        self.route_TK: Tensor | None = None
        self.differs_T: Tensor | None = None
        self._name, self._method = type(module).__name__, getattr(module, "topk_method", "greedy")
        wrap_router(module, self)

    @property
    def problem(self) -> str:
        """Why it cannot follow a route; "" where it can."""
        if not self.num_chosen:
            return f"{self._name} does not choose by topk"
        # Its weights are scores of which those outside of the groups it chose itself are 0.
        return f"{self._name} weighs experts by groups" if self._method == "group_limited_greedy" else ""

    def __call__(self, router: Any, own: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if self.route_TK is None and not self.is_watched:
            return own(*args, **named)
        with _Choices(self):
            return own(*args, **named)

    def choose(self, scores_TE: Tensor, own: Any) -> Any:
        """Return what `topk` returns of the scores: of the route's experts, where there is one.

        Args:
            scores_TE: that it chooses by.
            own: what `topk` has returned.
        """
        if self.is_watched:  # the last choice is that of experts, after one of groups
            self.num_experts, self.num_chosen = scores_TE.shape[1], own.indices.shape[1]
        if self.route_TK is None or (scores_TE.shape[1], own.indices.shape[1]) != (self.num_experts, self.num_chosen):
            return own
        route_TK = self.route_TK.long()
        is_known_T = route_TK[:, 0] >= 0
        differs_T = (own.indices.sort(-1).values != route_TK.sort(-1).values).any(-1)
        self.differs_T = torch.where(is_known_T, differs_T.int(), -1)
        if not self.replays:
            return own
        index_TK = torch.where(is_known_T[:, None], route_TK, own.indices)
        return torch.return_types.topk((scores_TE.gather(-1, index_TK), index_TK))


class _Choices(TorchFunctionMode):
    """Shows a router each choice that is made while it computes."""

    def __init__(self, router: _Router) -> None:
        super().__init__()
        self._router = router

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in _TOPK and args[0].dim() == 2:
            return self._router.choose(args[0], found)
        return found

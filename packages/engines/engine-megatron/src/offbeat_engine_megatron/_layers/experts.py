"""Experts in grouped products, and their routers: a bias that no gradient moves, and choices that follow routes.

megatron-core moves the bias itself after every update, by which experts were taken (DeepSeek-V3's balancing without a
loss); here it stays as the checkpoint has it, as in engine-torch by default.

Routes (R3, arXiv:2510.11370) go with each micro-batch through its layers, as its `packed_seq_params`: so a layer that
is computed again in the backward pass finds those of its own micro-batch, whatever ran in between. megatron-core's
`RouterReplay` keeps them in the routers of the process, in a list of all, which a second model would join.
Source: megatron/core/transformer/moe/router.py and moe_utils.py, `topk_routing_with_score_function` (0.16.1).

Shapes: X experts of this rank or of a router, F their width, E hidden size, S tokens sent to them; t tokens of a layer
on this rank, L layers of the model, K experts of a token.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, silu

from offbeat_core import ModelError, TrainSequence
from offbeat_engine_megatron._shape import ModelShape


class GroupedExperts(MegatronModule):  # type: ignore[misc]
    """The experts of a rank in grouped products of torch. Takes the arguments that megatron-core gives its own.

    Not megatron-core's GroupedMLP: that one wants another package for its product, and computes in bfloat16 alone.
    """

    def __init__(self, num_experts: int, config: Any, submodules: Any = None, pg_collection: Any = None) -> None:
        super().__init__(config=config)
        hidden, size = config.hidden_size, config.moe_ffn_hidden_size
        like = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
        self.weight1 = nn.Parameter(torch.empty(num_experts, 2 * size, hidden, **like))  # gate, up
        self.weight2 = nn.Parameter(torch.empty(num_experts, hidden, size, **like))
        for weight in (self.weight1, self.weight2):  # as on each expert's own: every rank's part of the norm counts
            tensor_parallel.set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=0, stride=1)

    def forward(self, x_SE: Tensor, tokens_per_expert: Tensor, weight_S: Tensor) -> tuple[Tensor, None]:
        """[S, E]: what each expert makes of its tokens, which stand together, times what the router gives it."""
        ends_X = tokens_per_expert.cumsum(0).to(x_SE.device, torch.int32)
        gate_SF, up_SF = grouped_mm(x_SE, self.weight1.transpose(1, 2), offs=ends_X).chunk(2, -1)
        inner_SF = (silu(gate_SF) * up_SF * weight_S[:, None]).to(x_SE.dtype)
        return grouped_mm(inner_SF, self.weight2.transpose(1, 2), offs=ends_X), None


class Router(TopKRouter):  # type: ignore[misc]
    """megatron-core's router; with `has_bias` it chooses by scores plus a bias, and weighs by scores alone."""

    def __init__(self, config: Any, pg_collection: Any = None, *, has_bias: bool = False) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.router_replay = RoutedChoice()
        if has_bias:
            bias_X = torch.zeros(config.num_moe_experts, dtype=torch.float32, device=torch.cuda.current_device())
            self.expert_bias = nn.Parameter(bias_X, requires_grad=False)


class RoutedChoice:
    """Choice of a router, which asks it in place of megatron-core's `RouterReplay`.

    Attributes:
        route_tK: experts to take, below 0 for a token whose router chooses; None: it chooses for all.
    """

    route_tK: Tensor | None = None

    def get_replay_topk(
        self, scores_tX: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        """Return the scores of the experts to take, and their numbers: [t, K] both."""
        own_tK, index_tK = choose(scores_tX, topk, num_groups=num_groups, group_topk=group_topk)
        if self.route_tK is None:
            return own_tK, index_tK
        index_tK = torch.where(self.route_tK[:, :1] < 0, index_tK, self.route_tK.long())
        return scores_tX.gather(1, index_tK), index_tK


def follow_routes(layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Give the router of a layer, before the layer computes, the routes of the micro-batch in hand."""
    routes_tLK = kwargs["packed_seq_params"].routes_tLK
    layer.mlp.router.router_replay.route_tK = None if routes_tLK is None else routes_tLK[:, layer.layer_number - 1]


def check_routes(sequences: Sequence[TrainSequence], shape: ModelShape) -> None:
    """Refuse routes that are not of this model.

    Raises:
        ModelError: with what was found.
    """
    wanted = (shape.num_layers, shape.experts_per_token)
    for routes in (each for sequence in sequences for each in sequence.routes):
        if not shape.num_experts:
            raise ModelError(f"routes of {shape.family} cannot be replayed: the model has no experts; send none")
        if routes.shape[1:] != wanted or routes.highest >= shape.num_experts:
            raise ModelError(
                f"routes must be of {wanted[0]} layers with {wanted[1]} of {shape.num_experts} experts, as "
                f"{shape.family} has them: got {routes.shape[1]} layers with {routes.shape[2]} experts numbered up to "
                f"{routes.highest}"
            )

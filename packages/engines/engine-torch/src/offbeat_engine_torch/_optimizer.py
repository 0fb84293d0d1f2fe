"""The optimizer of a policy: which weights AdamW updates, and which Muon."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from offbeat_core import TrainEngineConfig
from offbeat_device import Device, StreamedMemory
from offbeat_engine_torch._layout import TorchEngineOptions
from offbeat_engine_torch._model import ADAPTER_SIDES, CausalModel, plain_name
from offbeat_engine_torch._parallel.ranks import Ranks
from offbeat_engine_torch._pieces import Piece, trained_parameters
from offbeat_engine_torch._policy import Policy
from offbeat_training import MUON_MOMENTS, ClippedAdamW, HeldMoments, Muon


def make_optimizer(
    policy: Policy, config: TrainEngineConfig, options: TorchEngineOptions, device: Device, ranks: Ranks
) -> ClippedAdamW:
    """Make the optimizer of the weights that a policy trains."""
    stream = StreamedMemory(device) if options.offload_optimizer else None
    parameters = trained_parameters(policy.pieces)
    return ClippedAdamW(
        parameters,
        config,
        moments=options.moments_dtype,
        places={piece.name: (piece.shape, piece.box) for piece in policy.pieces},
        fused=policy.is_compiled,
        muon=_make_muon(policy, parameters, config, options, ranks, stream) if options.optimizer == "muon" else None,
        stream=stream,
    )


def _make_muon(
    policy: Policy,
    parameters: Mapping[str, nn.Parameter],
    config: TrainEngineConfig,
    options: TorchEngineOptions,
    ranks: Ranks,
    stream: StreamedMemory | None,
) -> Muon:
    names = hidden_matrices(policy.model)
    pieces = {each.name: each for each in policy.pieces if each.name in names and each.parameter.requires_grad}
    places = {name: (piece.shape, piece.box) for name, piece in pieces.items()}
    held = HeldMoments(
        {name: each for name, each in parameters.items() if name in pieces},
        places,
        MUON_MOMENTS,
        options.moments_dtype,
        stream,
    )

    def gather(name: str, part: Tensor | None) -> Tensor:
        piece = pieces[name]
        return ranks.gather(
            replace(piece, local=piece.local.to(torch.bfloat16) if part is None else part), torch.bfloat16
        )

    shared = {name for name, piece in pieces.items() if _is_shared(piece)}
    return Muon(held, places, shared, config, gather, ranks.exchange)


def _is_shared(piece: Piece) -> bool:
    """Return whether ranks cut matrices, and not only stacks of them: a rule that says the same on all ranks."""
    num_dims = len(piece.shape)
    return num_dims == 2 or (piece.tp_dim is not None and piece.tp_dim >= num_dims - 2)


def hidden_matrices(model: CausalModel) -> set[str]:
    """Return the names of the weights that map hidden states to hidden states, which Muon updates; routers too.

    Embedding and head are no such maps, and AdamW suits them better (arXiv:2502.16982, section 2.2; torch.optim.Muon
    says so as well). Nor are convolutions, biases of experts, and matrices of one row. Adapters are not either: of the
    product B A, which is the update of a layer, orthogonal factors say nothing, and B is 0 at first.
    """
    lookups = [module for module in model.whole.modules() if isinstance(module, nn.Embedding)]
    filters = [module for module in model.whole.modules() if isinstance(module, nn.Conv1d)]
    others = {id(module.weight) for module in (*lookups, *filters, model.head)}
    return {
        plain_name(name)
        for name, each in model.whole.named_parameters()
        if each.ndim in (2, 3) and min(each.shape[-2:]) > 1 and id(each) not in others
        if not plain_name(name).endswith((*ADAPTER_SIDES, "bias"))
    }

"""The choice of when ranks add up gradients: with each micro-batch, or once a pass."""

import logging
from collections.abc import Sequence

from offbeat_core import ModelError, TrainEngineConfig, TrainLayout
from offbeat_device import Device, DeviceMemory
from offbeat_engine_torch._layout import GRADIENT_BYTES
from offbeat_engine_torch._parallel.ranks import Ranks
from offbeat_engine_torch._pieces import Piece
from offbeat_placement import FILLED_SHARE, read_shape, train_memory

log = logging.getLogger(__name__)


def choose_reduce_once(
    option: str,
    config: TrainEngineConfig,
    layout: TrainLayout,
    device: Device,
    ranks: Ranks,
    pieces: Sequence[Piece],
    *,
    keeps_reference: bool,
) -> bool:
    """Return whether gradients are added up once a pass; a call of all ranks, which all get the same.

    Args:
        option: auto, on or off.
        config: of the engine.
        layout: how its ranks share the model.
        device: of this rank.
        ranks: that train together.
        pieces: of the policy that trains.
        keeps_reference: there is a copy of the first policy.
    """
    if option != "auto" or layout.dp * layout.cp == 1:
        return option == "on" and layout.dp * layout.cp > 1
    if not device.memory_of_smallest():
        fits = False
    else:
        estimate = _estimate_bytes(config, layout, keeps_reference=keeps_reference)
        wanted = estimate + whole_gradients_bytes(pieces, layout)
        fits = bool(estimate) and has_room(wanted, device.memory())
    chosen = all(ranks.exchange(fits))
    if ranks.leader:
        log.info("gradients are added up over the ranks %s", "once a pass" if chosen else "with each micro-batch")
    return chosen


def has_room(wanted_bytes: int, memory: DeviceMemory) -> bool:
    """Return whether a process may hold so much in all, given what it holds and what is free."""
    return wanted_bytes <= FILLED_SHARE * (memory.allocated_bytes + memory.free_bytes)


def whole_gradients_bytes(pieces: Sequence[Piece], layout: TrainLayout) -> int:
    """Bytes of the gradients of whole parameters, but for what ranks of tp and ep hold between them."""
    trained = [piece for piece in pieces if piece.parameter.requires_grad]
    shares = [1 if piece.tp_dim is None else layout.ep if piece.is_stack else layout.tp for piece in trained]
    numbers = [piece.parameter.numel() // share for piece, share in zip(trained, shares, strict=True)]
    return GRADIENT_BYTES * sum(numbers)


def _estimate_bytes(config: TrainEngineConfig, layout: TrainLayout, *, keeps_reference: bool) -> int:
    """Bytes of a rank that adds up gradients with each micro-batch; 0 for a family whose sizes are not known."""
    try:
        shape = read_shape(config.model_path, has_head=config.head == "tokens")
    except ModelError:
        return 0
    memory = train_memory(config, layout, shape, on_cpu=False, keeps_reference=keeps_reference)
    return memory.estimate(shape).num_bytes

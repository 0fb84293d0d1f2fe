"""What a model is asked once when it is loaded: a family that the engine would get wrong must not be trained.

Shapes: T tokens of the sequence asked about, V vocabulary (of this rank, where it is cut).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from offbeat_engine_torch._model import CausalModel, HeadQuery, one_line
from offbeat_engine_torch._rows import AttentionPlan
from offbeat_training import Segment, logprobs_of_logits
from offbeat_types import ModelError, OffbeatError

NUM_TOKENS: Final = 12
TOLERANCE_NATS: Final = {None: 0.01, torch.bfloat16: 0.5}
"""By the format of the layers. Two kernels of attention that sum float32 in different orders are 1e-6 (tiny models) to
1e-3 nats apart (deep ones); a forgotten scale, mask or layer is 0.1 to 20. Bfloat16 rounds logits of 16 to 32 to
multiples of 0.125, so that there only what is far off can be told."""
TOLERANCE_OF_STATES: Final = {None: 1e-2, torch.bfloat16: 5e-2}
"""By the format of the layers, as a share of the largest hidden state: bfloat16 keeps 8 bits, and errors of layers add
up. Sequences that see each other differ by 0.1 to 1."""
TOKENS_WITHIN: Final = 0.75
"""Share of the tokens that must agree: rounding may send a token to another expert, whose log-probability then jumps.
"""


@torch.no_grad()
def check_family(model: CausalModel, folder: Path, autocast: torch.dtype | None = None) -> None:
    """Ask a model in ways that its family answers alike if the engine can train it. All ranks of a mesh take part.

    Args:
        model: as it will be trained.
        folder: named in errors.
        autocast: format of the layers' products, where their weights are gathered in it; None for float32.

    Raises:
        ModelError: packed sequences see each other; log-probabilities are not those of the model's own logits; or the
            model cannot be run as the engine runs it.
    """
    with _as_refusal(model, folder):
        _check_isolation(model, folder, autocast)
        _check_logprobs(model, folder, autocast)


@contextmanager
def _as_refusal(model: CausalModel, folder: Path) -> Iterator[None]:
    """Name the family where its code raises."""
    try:
        yield
    except (OffbeatError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ModelError(
            f"{folder}: {_name(model)} does not run on packed sequences: family not supported "
            f"({type(error).__name__}: {one_line(error)})"
        ) from error


def _check_isolation(model: CausalModel, folder: Path, autocast: torch.dtype | None) -> None:
    """Run two sequences packed and alone."""
    device = model.head.weight.device
    ids = torch.tensor([1, 2, 3, 2, 1], device=device) % model.head.out_features
    positions = torch.tensor([0, 1, 2, 2, 0], device=device)
    segments = (Segment(start=0, length=2), Segment(start=2, length=1, parent=0), Segment(start=3, length=1, parent=0))
    together = (*segments, Segment(start=4, length=1))
    share = TOLERANCE_OF_STATES[autocast]
    packed = model(ids, positions, AttentionPlan(together, device), autocast=autocast)
    for real in ([0, 1, 2], [0, 1, 3], [4]):
        index = torch.tensor(real, device=device)
        plan = AttentionPlan((Segment(start=0, length=len(real)),), device)
        alone = model(ids[index], positions[index], plan, autocast=autocast)
        if not torch.allclose(packed[index], alone, rtol=share, atol=share * float(alone.abs().max())):
            raise ModelError(f"{folder}: {_name(model)} gives other results for packed sequences: family not supported")


def _check_logprobs(model: CausalModel, folder: Path, autocast: torch.dtype | None) -> None:
    """Compare one sequence's log-probabilities with the model's own logits, under the model's own attention."""
    device, index_T = model.head.weight.device, torch.arange(NUM_TOKENS)
    ids_T = ((7 * index_T) % 61 + 3).to(device) % model.head.out_features
    positions_T = index_T.to(device)
    plan = AttentionPlan((Segment(start=0, length=NUM_TOKENS),), device)
    query = HeadQuery(predictor_N=positions_T[:-1], target_N=ids_T[1:])
    found_N: Tensor = model(ids_T, positions_T, plan, query=query, autocast=autocast)[0]
    with model.own_attention():
        logits_TV: Tensor = model(ids_T, autocast=autocast)
    wanted_N = logprobs_of_logits(logits_TV[:-1], ids_T[1:], model.part)
    error = float((found_N - wanted_N).abs().quantile(TOKENS_WITHIN))
    if not error <= TOLERANCE_NATS[autocast]:
        raise ModelError(
            f"{folder}: {_name(model)} computes other log-probabilities than this engine does: family not supported "
            f"({error:.2g} nats apart, {TOLERANCE_NATS[autocast]} allowed)"
        )


def _name(model: CausalModel) -> str:
    return type(model.whole).__name__

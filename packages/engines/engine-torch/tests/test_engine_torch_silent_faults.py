"""Silent faults of gradients and norms that were reported of other trainers: planted, each is seen by a comparison.

While one of them is there, nothing fails and the loss looks right. Source: NVIDIA/Megatron-LM, issue 7452;
NVIDIA-NeMo/RL, pull request 3788; THUDM/slime, pull request 1748.
"""

import dataclasses
from dataclasses import dataclass, field

import pytest
import torch.distributed as dist
from test_engine_torch_ranks import assert_same, config, three_steps, weighted
from torch.distributed.fsdp import FSDPModule

from offbeat_engine_torch import TorchTrainEngine, _policy
from offbeat_engine_torch._layers.exchange import _Enter, _Gather, _Join, _Leave
from offbeat_engine_torch._parallel.ranks import ShardedRanks
from offbeat_testing import tiny_model
from offbeat_training import LossCalls

SEEN = 1e-3
"""A hundred times the tolerance of ranks."""
TP, CP, DP = {"tp": 2}, {"cp": 2}, {"dp": 2}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault.

    Args:
        why: the mechanism.
        ranks: sizes of the axes on which it bites.
        num_heads: of the model; cp does not divide 3, and gathers keys.
        plant: puts it in, with pytest's monkeypatch.
    """

    why: str
    ranks: dict[str, int]
    num_heads: int = 4
    plant: object = field(repr=False)


def leave_partial_sums(patch):
    patch.setattr(ShardedRanks, "add_partial", lambda self, gradients: None)


def count(counted):
    """Let the norm count a piece where `counted` says so of it."""

    def plant(patch):
        real = _policy.find_pieces

        def find(model, **place):
            return [dataclasses.replace(piece, owned=counted(piece)) for piece in real(model, **place)]

        patch.setattr(_policy, "find_pieces", find)

    return plant


def hand_back(function, changed):
    """Hand back another gradient from an exchange: `changed` of the one that came and the one that should go."""

    def plant(patch):
        real = function.backward

        def backward(ctx, *grads):
            found, *rest = real(ctx, *grads)
            return changed(grads[0], found), *rest

        patch.setattr(function, "backward", staticmethod(backward))

    return plant


def average(patch):
    """Average over ranks the gradients of a loss that is divided by the tokens of all of them."""
    real = FSDPModule.set_gradient_divide_factor
    patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda self, factor: real(self, 2.0))


def divide_by_own_tokens(patch):
    """Divide the loss of each micro-batch by its own tokens: a mean of means."""
    real = LossCalls.of

    def of(self, batch, logprobs, entropy, differing):
        tokens, sequences = self._totals
        self._totals = (len(logprobs) * -(-tokens // 20), sequences)
        found = real(self, batch, logprobs, entropy, differing)
        self._totals = (tokens, sequences)
        return found

    patch.setattr(LossCalls, "of", of)


FAULTS = [
    Fault(why="norms of heads see those of their own rank", ranks=TP, plant=leave_partial_sums),
    Fault(why="the norm counts what ranks hold alike once a rank", ranks=TP, plant=count(lambda piece: True)),
    Fault(
        why="the norm counts parts of the first rank alone", ranks=TP, plant=count(lambda piece: dist.get_rank() == 0)
    ),
    Fault(
        why="the input of columns gets the gradient of its own columns",
        ranks=TP,
        plant=hand_back(_Enter, lambda came, goes: came),
    ),
    Fault(why="the gradient of a sum is summed again", ranks=TP, plant=hand_back(_Leave, lambda came, goes: goes * 2)),
    Fault(
        why="ranks that share a pack add up gradients that each has whole",
        ranks=CP,
        plant=hand_back(_Join, lambda came, goes: goes * 2),
    ),
    Fault(
        why="gathered keys get the gradient of the queries of their own rank",
        ranks=CP,
        num_heads=3,
        plant=hand_back(_Gather, lambda came, goes: came.unflatten(0, (2, -1))[dist.get_rank()].view_as(goes)),
    ),
    Fault(why="gradients are averaged over ranks", ranks=DP, plant=average),
    Fault(why="each micro-batch divides its loss by its own tokens", ranks=DP, plant=divide_by_own_tokens),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Returns a tiny model for each number of heads."""
    return {
        heads: tiny_model(
            tmp_path_factory.mktemp("faults") / str(heads), hidden_size=8 * heads, num_heads=heads, num_kv_heads=heads
        )
        for heads in {fault.num_heads for fault in FAULTS}
    }


@pytest.mark.parametrize(
    "fault", [pytest.param(each, id=each.why, marks=pytest.mark.mesh(**{"dp": 1} | each.ranks)) for each in FAULTS]
)
def test_a_comparison_with_one_process_sees_a_silent_fault(fault, mesh, make_groups, models, monkeypatch):
    settings = config(models[fault.num_heads])
    one = three_steps(TorchTrainEngine.create(settings), make_groups, weighted)
    fault.plant(monkeypatch)
    many = three_steps(TorchTrainEngine.create(settings, mesh), make_groups, weighted)
    with pytest.raises(AssertionError):
        assert_same(many, one, SEEN)

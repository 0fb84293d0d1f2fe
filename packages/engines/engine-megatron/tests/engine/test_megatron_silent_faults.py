"""Silent faults of gradients and norms that were reported of megatron-core: planted, each is seen by a comparison.

While one of them is there, nothing fails and the loss looks right. Source: NVIDIA/Megatron-LM, issue 7452 and pull
requests 5916 and 7530; ROCm/TransformerEngine, pull request 715; THUDM/slime, pull request 1748.
"""

import sys
from dataclasses import dataclass, field

import pytest
from megatron.core import tensor_parallel
from megatron_layouts import LAYOUTS, Layout, train_with_engine
from megatron_yardstick import compare, train_with_transformers

from offbeat_engine_megatron import _lora, _model
from offbeat_engine_megatron._packing import _Gathered

SEEN = 1e-3
"""A hundred times the tolerance of the layouts."""
FINALIZE = sys.modules["megatron.core.distributed.finalize_model_grads"]  # its package exports a function of that name
SP_OFF = {"sequence_parallel": False}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault.

    Args:
        why: the mechanism.
        layout: where it bites.
        shows: the field of `Errors` in which it has to be seen.
        plant: puts it in, with pytest's monkeypatch.
    """

    why: str
    layout: Layout
    shows: str
    plant: object = field(repr=False)


def leave_partial_sums(patch):
    """Leave each tp rank with the gradients of its own tokens, or heads, for what all of them hold."""
    patch.setattr(FINALIZE, "_allreduce_non_tensor_model_parallel_grads", lambda *args, **named: None)


def count(counted):
    """Let the norm count what `counted` says of a parameter and this tp rank."""

    def plant(patch):
        def counts(parameter, tp_group=None):
            return counted(parameter, tensor_parallel.layers.get_tensor_model_parallel_rank())

        patch.setattr(tensor_parallel, "param_is_not_tensor_parallel_duplicate", counts)

    return plant


def exchange(module, name, **how):
    """Call megatron-core's exchange in another way."""

    def plant(patch):
        real = getattr(module, name)
        patch.setattr(module, name, lambda *args, **named: real(*args, **named, **how))

    return plant


def leave_out(module, name):
    """Hand on what should be exchanged: its gradient is then this rank's part of the sum."""
    return lambda patch: patch.setattr(module, name, lambda tensor, group=None: tensor)


def scale_by_ranks(patch):
    """Add up, over the ranks that share a pack, gradients that each of them has whole."""
    real = _Gathered.backward

    def backward(ctx, *grads):
        found, *rest = real(ctx, *grads)
        return found * 2, *rest

    patch.setattr(_Gathered, "backward", staticmethod(backward))


def reduce_experts_as_the_rest(patch):
    """Leave out the mark by which the gradients of experts are added up over their own group."""
    real = _model.PolicyModel.__init__

    def make(self, *args, **named):
        real(self, *args, **named)
        for parameter in self.parameters():
            parameter.allreduce = True

    patch.setattr(_model.PolicyModel, "__init__", make)


TP, MOE = Layout(axes={"tp": 2}), Layout(model="qwen3-moe", axes={"tp": 2})
FAULTS = [
    Fault(why="norms see the tokens of their own rank", layout=TP, shows="gradient", plant=leave_partial_sums),
    Fault(
        why="norms of heads see the heads of their own rank, without sequence parallel",
        layout=Layout(axes={"tp": 2}, options=SP_OFF),
        shows="gradient",
        plant=leave_partial_sums,
    ),
    Fault(
        why="the norm counts what ranks hold alike once a rank",
        layout=TP,
        shows="grad_norm",
        plant=count(lambda parameter, rank: True),
    ),
    Fault(
        why="the norm counts parts of the first rank alone",
        layout=TP,
        shows="grad_norm",
        plant=count(lambda parameter, rank: rank == 0),
    ),
    Fault(
        why="gathered tokens hand back their gradient as if it were whole",
        layout=TP,
        shows="gradient",
        plant=exchange(_model, "gather_from_sequence_parallel_region", tensor_parallel_output_grad=False),
    ),
    Fault(
        why="the head's gradient is that of its own vocabulary",
        layout=Layout(axes={"tp": 2}, options=SP_OFF),
        shows="gradient",
        plant=leave_out(_model, "copy_to_tensor_model_parallel_region"),
    ),
    Fault(
        why="ranks that share a pack scale its loss by their number",
        layout=Layout(axes={"cp": 2}),
        shows="gradient",
        plant=scale_by_ranks,
    ),
    Fault(why="experts of tp ranks are not added up", layout=MOE, shows="gradient", plant=reduce_experts_as_the_rest),
    Fault(why="routers see the tokens of their own rank", layout=MOE, shows="gradient", plant=leave_partial_sums),
    Fault(
        why="adapters see the tokens of their own rank",
        layout=Layout(axes={"tp": 2}, lora=True),
        shows="weight",
        plant=leave_out(_lora, "copy_to_tensor_model_parallel_region"),
    ),
]


@pytest.fixture(scope="module")
def yardsticks(models):
    """Returns what transformers makes of each model, with adapters and without."""
    kinds = {(fault.layout.model, fault.layout.lora) for fault in FAULTS}
    return {kind: train_with_transformers(models[kind[0]], lora=kind[1]) for kind in kinds}


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.why, marks=pytest.mark.mesh(**({"dp": 1} | fault.layout.axes), deadline_s=150))
        for fault in FAULTS
    ],
)
def test_a_comparison_with_one_process_sees_a_silent_fault(create, fault, mesh, yardsticks, monkeypatch):
    fault.plant(monkeypatch)
    errors = compare(train_with_engine(create(fault.layout, mesh)), yardsticks[fault.layout.model, fault.layout.lora])
    assert getattr(errors, fault.shows) > SEEN, errors


def test_each_fault_is_planted_in_a_layout_that_is_compared():
    assert all(fault.layout in LAYOUTS for fault in FAULTS)

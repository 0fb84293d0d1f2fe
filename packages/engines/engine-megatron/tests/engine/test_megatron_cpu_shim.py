"""The shim is applied by a call, undone by another, and leaves nothing behind."""

import sys
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils

from offbeat_engine_megatron._megatron import ACCELERATOR, CpuShim, _replacements, shim_for


def everything():
    """What the shim replaces, as it is now, and what torch itself is."""
    replaced = [(owner, name, owner.__dict__.get(name)) for owner, names in _replacements() for name in names]
    modules = [torch, torch.cuda, torch.cuda.random, torch.Tensor, dist]
    return replaced, [dict(vars(module)) for module in modules]


def test_everything_is_restored():
    before = everything()
    shim = CpuShim()
    with shim:
        inside = everything()
        with shim:
            assert torch.zeros(1, device=ACCELERATOR).device.type == "cpu"
        assert torch.zeros(1, device=ACCELERATOR).device.type == "cpu"
    after = everything()
    assert [value for *_, value in inside[0]] != [value for *_, value in before[0]]
    assert [value for *_, value in after[0]] == [value for *_, value in before[0]]
    assert after[1] == before[1]
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device=ACCELERATOR)


def test_an_error_restores_too():
    before = everything()
    with pytest.raises(ZeroDivisionError), CpuShim():
        raise ZeroDivisionError
    assert everything()[0] == before[0]


def test_importing_the_engine_changes_nothing():
    assert "offbeat_engine_megatron._megatron" in sys.modules
    assert torch.cuda.current_device.__module__.startswith("torch.cuda")
    assert torch.compile.__module__ == "torch"


def test_an_accelerator_of_any_kind_gets_no_shim():
    for accelerator in (torch.device(ACCELERATOR, 0), torch.device("meta")):  # "meta" stands for a third kind
        assert not isinstance(shim_for(accelerator), CpuShim)
    assert isinstance(shim_for(torch.device("cpu")), CpuShim)


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="TransformerEngine is installed")
def test_routers_find_no_transformer_engine_on_any_device():
    """Outside of the shim too: a router of megatron-core 0.16.1 raises NameError, and latent attention TypeError."""
    assert moe_utils.te_general_gemm is None
    assert not multi_latent_attention.HAVE_TE


def test_devices_pinned_memory_and_types():
    x = torch.ones(2)
    with CpuShim():
        made = [
            torch.tensor([1.0], device=torch.device(ACCELERATOR)),
            torch.empty(3, device=torch.cuda.current_device(), pin_memory=True),
            x.cuda(),
            x.to(ACCELERATOR),
            x.to(device=ACCELERATOR),
        ]
        kind = x.type()
        torch.cuda.synchronize()
        torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
        with torch.cuda.stream(torch.cuda.Stream()) as stream:
            stream.record_event().synchronize()
    assert all(each.device.type == "cpu" and not each.is_pinned() for each in made)
    assert kind == "torch.FloatTensor"  # the other name is for callers in megatron


def test_random_state_is_that_of_the_cpu():
    with CpuShim():
        torch.cuda.manual_seed(5)
        state = torch.cuda.get_rng_state()
        first = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(torch.rand(3), first)


@pytest.mark.ranks(2, compare=False)
def test_averages_and_splits_over_gloo(ranks):
    with CpuShim():
        x = torch.full((2,), float(ranks.rank))
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
        assert x.tolist() == [0.5, 0.5]
        sent = torch.arange(3.0) + 10 * ranks.rank
        received = torch.empty(2 if ranks.rank == 0 else 4)
        theirs = [1, 1] if ranks.rank == 0 else [2, 2]
        dist.all_to_all_single(received, sent, torch.tensor(theirs), torch.tensor([1, 2]))
    assert received.tolist() == ([0.0, 10.0] if ranks.rank == 0 else [1.0, 2.0, 11.0, 12.0])

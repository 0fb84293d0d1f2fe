"""Roles on devices: chosen, named with the reason, and refused where it cannot. Needs no megatron-core."""

from types import SimpleNamespace

import pytest
import torch

from offbeat_core import ConfigError
from offbeat_engine_megatron import MegatronEngineOptions, _kernels
from offbeat_engine_megatron._kernels import GROUPED, GROUPED_TE, SEQUENTIAL, choose_kernels
from offbeat_engine_megatron._layout import Parallel
from offbeat_engine_megatron._shape import ModelShape
from offbeat_engine_megatron._slots import list_mtp_slots, list_slots, view_of

SHAPE = ModelShape(
    family="qwen3_moe",
    num_layers=4,
    hidden_size=32,
    num_heads=8,
    num_groups=4,
    head_size=8,
    ffn_size=64,
    vocabulary=320,
    norm_eps=1e-6,
    tied=True,
    num_experts=6,
    experts_per_token=2,
    expert_size=16,
    sparse_layers=(False, True, True, True),
    mtp_layers=1,
)
DENSE = ModelShape(**(vars(SHAPE) | {"num_experts": 0, "sparse_layers": ()}))
ODD = ModelShape(**(vars(SHAPE) | {"expert_size": 18}))
CPU = SimpleNamespace(torch_device=torch.device("cpu"), packed_attention="split", shapes_masks=False)
GPU = SimpleNamespace(torch_device=torch.device("cuda", 0), packed_attention="varlen", shapes_masks=False)
OTHER = SimpleNamespace(torch_device=torch.device("meta"), packed_attention="rows", shapes_masks=True)
ABSENT = "TransformerEngine is not installed"


def choose(device=GPU, dtype=torch.bfloat16, shape=SHAPE, **options):
    return choose_kernels(MegatronEngineOptions.parse(options), shape, dtype, device)


@pytest.fixture
def te(monkeypatch):
    """Says which version of TransformerEngine is installed, and what its import raises."""

    def install(version=None, error=None):
        def load(name):
            assert name == "transformer_engine.pytorch"
            if error is not None:
                raise error

        monkeypatch.setattr(_kernels, "find_spec", lambda name: version)
        monkeypatch.setattr(_kernels.metadata, "version", lambda name: version)
        monkeypatch.setattr(_kernels, "import_module", load)
        _kernels._why_no_te.cache_clear()

    yield install
    _kernels._why_no_te.cache_clear()


TE_LAYERS = "layers of TransformerEngine"
CHOSEN = {
    "a GPU with it": ({}, "2.10.0+4ba8e2c", f"{TE_LAYERS}, experts grouped by TransformerEngine"),
    "a dense model": ({"shape": DENSE}, "2.9.0", TE_LAYERS),
    "a GPU without it": ({}, None, f"local layers ({ABSENT}), attention by varlen, experts grouped by torch"),
    "one that is too old": (
        {"shape": DENSE},
        "2.8.0",
        "local layers (TransformerEngine 2.8.0 is older than 2.9), attention by varlen",
    ),
    "float32": (
        {"dtype": torch.float32, "shape": DENSE},
        "2.10.0",
        "local layers (TransformerEngine takes packs in bfloat16, with heads of a multiple of 8 up to 256), "
        "attention by runs",
    ),
    "a CPU": (
        {"device": CPU},
        None,
        "local layers (TransformerEngine needs a GPU: got cpu), attention by runs, experts grouped by torch",
    ),
    "another device": (
        {"device": OTHER, "layers": "local"},
        None,
        "local layers (asked for), attention by the device's kernel under its mask, experts one by one (torch has no "
        "grouped products on meta)",
    ),
    "runs asked for on another device": (
        {"device": OTHER, "layers": "local", "attention": "runs", "shape": DENSE},
        None,
        "local layers (asked for), attention by runs",
    ),
    "local asked for": ({"layers": "local", "shape": DENSE}, "2.10.0", "local layers (asked for), attention by varlen"),
    "runs asked for": ({"attention": "runs", "shape": DENSE}, "2.10.0", f"{TE_LAYERS}, attention by runs"),
    "one by one asked for": ({"experts": "sequential"}, "2.10.0", f"{TE_LAYERS}, experts one by one (asked for)"),
}


@pytest.mark.parametrize(("asked", "version", "message"), CHOSEN.values(), ids=CHOSEN)
def test_the_fastest_that_can_be_is_chosen_and_what_cannot_is_told(te, asked, version, message):
    te(version)
    assert str(choose(**asked)) == message


REFUSED = {
    "layers that are not installed": ({"layers": "te"}, rf'layers = "te" cannot be: {ABSENT}; set it to "auto"'),
    "layers on a CPU": ({"layers": "te", "device": CPU}, "needs a GPU: got cpu; set it to"),
    "rows that are not aligned": (
        {"experts": "grouped", "shape": ODD},
        r'experts = "grouped" cannot be: .* hidden_size = 32 and moe_intermediate_size = 18 in torch\.bfloat16 are not',
    ),
}


@pytest.mark.parametrize(("asked", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_with_the_reason(te, asked, message):
    te(None)
    with pytest.raises(ConfigError, match=message):
        choose(**asked)


def test_an_engine_that_cannot_be_imported_is_not_taken(te):
    te("2.10.0", ImportError("undefined symbol: _ZN3c10"))
    assert "(TransformerEngine cannot be imported: undefined symbol: _ZN3c10)" in str(choose())


@pytest.mark.parametrize("form", [SEQUENTIAL, GROUPED, GROUPED_TE])
@pytest.mark.parametrize("parallel", [Parallel(), Parallel(dp=4, ep=2, pp=2)], ids=["one rank", "ep2 pp2"])
def test_every_expert_has_its_place_in_every_form(form, parallel):
    """Each form holds the same tensors; what they fill of a rank's parameters, they fill once."""
    slots, usual = ([*list_slots(SHAPE, parallel, f), *list_mtp_slots(SHAPE, parallel, f)] for f in (form, SEQUENTIAL))
    assert {(s.name, s.shape, s.owner) for s in slots} == {(s.name, s.shape, s.owner) for s in usual}
    assert [s for s in slots if ".experts." not in s.name] == [s for s in usual if ".experts." not in s.name]
    held = 6 // parallel.ep
    sizes = {"1": (32, 32), "2": (32, 16)}  # gate and up, down
    for owner in range(parallel.ep):
        own = [s for s in slots if ".experts." in s.name and s.owner in (None, owner)]
        filled = {}
        for number, slot in enumerate(own):
            which = next(digit for digit in sizes if f"fc{digit}" in slot.place.path or slot.place.path.endswith(digit))
            if form == GROUPED_TE:
                which = slot.place.path.partition("linear_fc")[2][0]
            size = (held, *sizes[which]) if form == GROUPED else sizes[which]
            view = view_of(slot, filled.setdefault(slot.place, torch.zeros(size)), SHAPE, 1)
            assert view.shape == slot.shape
            assert not view.any()
            view.fill_(number + 1)
        assert all(parameter.all() for parameter in filled.values())
        assert len(filled) == 4 * 2 * (1 if form == GROUPED else held)

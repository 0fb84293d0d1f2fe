"""Which vision-language models are accepted, and what they are refused with. Needs no megatron-core."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from offbeat_core import ConfigError, ModelError, TrainEngineConfig, TrainSequence
from offbeat_engine_megatron._layout import Parallel, plan_engine
from offbeat_engine_megatron._packing import cut, lay_out_all
from offbeat_engine_megatron._shape import angles_of, read_model, rotary_axes
from offbeat_engine_megatron._slots import list_slots
from offbeat_testing import tiny_vision_model
from offbeat_training import Family

FAMILIES = ("qwen2_5_vl", "qwen3_vl")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return tiny_vision_model(tmp_path_factory.mktemp("vision") / request.param, request.param)


def test_every_tensor_has_its_place_under_transformers_name(folder):
    _, shape = read_model(str(folder))
    slots = list_slots(shape, Parallel())
    model = AutoModelForImageTextToText.from_pretrained(folder)
    assert {slot.name: slot.shape for slot in slots} == {
        name: tuple(parameter.shape) for name, parameter in model.named_parameters()
    }
    assert shape.deepstack == (1 if "qwen3" in shape.family else 0)


def test_angles_are_turned_by_the_axes_that_transformers_says(folder):
    config = AutoConfig.from_pretrained(folder)
    rotary = AutoModelForImageTextToText.from_pretrained(folder).model.language_model.rotary_emb
    positions = torch.tensor([[[0, 3, 5]], [[0, 4, 1]], [[0, 9, 2]]])
    cos, sin = rotary(torch.zeros(1), positions)
    angles = angles_of(positions[:, 0], rotary_axes(config, positions.device), rotary.inv_freq)[:, 0, 0]
    torch.testing.assert_close(angles.cos(), cos[0])
    torch.testing.assert_close(angles.sin(), sin[0])


class Marked:
    """Takes runs of 7 for placeholders."""

    def positions(self, sequence):
        return np.arange(len(sequence.ids)) + np.array([[0], [100], [200]])

    def spans(self, sequence):
        places = np.flatnonzero(sequence.ids == 7)
        return [(int(places[0]), int(places[-1]) + 1)] if len(places) else []


@pytest.mark.parametrize("cp", [1, 2])
def test_each_placeholder_lies_on_one_rank(cp):
    ids = [[1, 7, 7, 7, 2, 3, 4], [5, 6, 5], [1, 2, 7, 7, 3, 8]]
    images = [1, 0, 1]
    sequences = [
        TrainSequence(
            ids=np.array(each, np.int32),
            loss_mask=np.arange(len(each)) == len(each) - 1,
            images=(np.zeros((8, 8, 3), np.uint8),) * count,
        )
        for each, count in zip(ids, images, strict=True)
    ]
    families = [Family(members=(each,), prefix=0, num_tokens=len(ids[each]) - 1) for each in (2, 1, 0)]
    [pack] = lay_out_all(sequences, [families], Parallel(cp=cp), Marked())
    assert (pack.ids_T[pack.place_M] == 7).all()
    assert (len(pack.place_M), len(pack.images)) == (5, 2)
    assert (np.diff(pack.positions_T, axis=0) == 100)[:, pack.place_M].all()
    found = []
    for rank in range(cp):
        local = cut(pack, rank, cp)
        assert (local.ids_1L[0, local.place_m] == 7).all()
        found += local.seen_m.tolist()
    assert sorted(found) == list(range(5))


REFUSED = {
    "adapters": ({"lora_rank": 4}, "lora_rank with a vision tower"),
    "later tokens": ({"options": {"mtp_layers": 1}}, "mtp_layers with a vision tower"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_what_a_tower_does_not_go_with_is_refused(folder, changes, message):
    with pytest.raises(ConfigError, match=message):
        plan_engine(TrainEngineConfig(model_path=str(folder), **changes))


def test_layers_of_deepstack_lie_beside_the_tower(tmp_path):
    settings = {"text": {"num_hidden_layers": 4}, "vision": {"deepstack_visual_indexes": [0, 1]}}
    config = TrainEngineConfig(model_path=str(tiny_vision_model(tmp_path, **settings)))
    alone = {"dp": 1, "cp": 1, "tp": 1, "ep": 1}
    assert plan_engine(config, alone | {"pp": 2}).shape.deepstack == 2
    with pytest.raises(ConfigError, match=r"DeepStack of qwen3_vl .* first 2 layers, .* = 4 leaves 1 there"):
        plan_engine(config, alone | {"pp": 4})


def test_other_families_with_images_are_refused(folder):
    text = (folder / "config.json").read_text()
    try:
        (folder / "config.json").write_text('{"model_type": "qwen2_vl", "vision_config": {}}')
        with pytest.raises(ModelError, match="qwen3_vl: got 'qwen2_vl'"):
            read_model(str(folder))
    finally:
        (folder / "config.json").write_text(text)

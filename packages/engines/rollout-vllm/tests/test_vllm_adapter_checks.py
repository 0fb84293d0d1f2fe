"""The engine's side of adapters and images, without an engine: versions by label, shapes, folders, placeholders."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from offbeat_core import (
    Completion,
    ConfigError,
    DataError,
    GenerateRequest,
    LoraAdapter,
    ModelError,
    ModelFolder,
    WeightSyncError,
)
from offbeat_rollout_vllm._adapters import AdapterReadback, Adapters, check_adapter_shapes, read_peft_adapter
from offbeat_rollout_vllm._options import AdapterLimits
from offbeat_rollout_vllm._requests import ServedVersions
from offbeat_rollout_vllm._vllm_objects import _embedded, check_request
from offbeat_testing import FakeWeightStream, tiny_model

LAYERS = {"model.q_proj.weight": (6, 4), "model.norm.weight": (4,)}
DOWN, UP = (f"base_model.model.model.q_proj.lora_{part}.weight" for part in "AB")


def test_a_label_stands_for_the_last_update_of_the_adapter_or_the_model():
    served = ServedVersions()
    for version, adapter in ((3, ""), (4, "poet"), (4, "clerk"), (5, "poet"), (7, "")):
        label = served.next_label
        served.update(version, adapter)
        assert served.next_label == label + 1
    spans = [(label, 10) for label in range(6)]

    def segments(adapter=""):
        found = Completion.join(range(60), [0.0] * 60, served.segments(spans, adapter), None, "").segments
        return [(segment.version, segment.num_tokens) for segment in found]

    assert segments() == [(0, 10), (3, 40), (7, 10)]
    assert segments("poet") == [(0, 10), (3, 10), (4, 20), (5, 10), (7, 10)]
    assert segments("clerk") == [(0, 10), (3, 20), (4, 20), (7, 10)]
    assert served.segments([], "poet") == []


def test_an_adapter_that_fits_is_taken_with_and_without_pefts_prefix():
    check_adapter_shapes({DOWN: (2, 4), UP: (6, 2)}, LAYERS.get, "it")
    prefix = len("base_model.model.")
    check_adapter_shapes({DOWN[prefix:]: (2, 4), UP[prefix:]: (6, 2)}, LAYERS.get, "it")


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({}, "got none"),
        ({DOWN: (2, 4)}, r"needs 'base_model\.model\.model\.q_proj\.lora_B\.weight', which did not come"),
        ({DOWN: (2, 4), UP: (6, 3)}, r"lora_B\.weight' must have shape \(6, 2\), got \(6, 3\)"),
        ({DOWN: (2, 5), UP: (6, 2)}, r"lora_A\.weight' must have shape \(2, 4\), got \(2, 5\)"),
        ({DOWN: (0, 4), UP: (6, 0)}, "must have shape"),
        ({"model.q_proj.weight": (6, 4)}, "as PEFT names them"),
        ({DOWN.replace("q_", "z_"): (2, 4), UP.replace("q_", "z_"): (6, 2)}, r"no matrix 'model\.z_proj\.weight'"),
        ({DOWN.replace("q_proj", "norm"): (2, 4), UP.replace("q_proj", "norm"): (4, 2)}, "no matrix 'model.norm"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_by_name(found, words):
    with pytest.raises(WeightSyncError, match=f"it: .*{words}"):
        check_adapter_shapes(found, LAYERS.get, "it")


class TakingWorkers:
    """Reads what it is given of an adapter, as vLLM does: from a folder that is gone afterwards."""

    def __init__(self):
        self.numbers = []

    def call(self, method, *, number, name="", path=""):
        self.numbers.append((method, number, name))
        if method == "add_adapter":
            from safetensors.torch import load_file

            self.config = json.loads(Path(path, "adapter_config.json").read_text())
            self.tensors = load_file(Path(path, "adapter_model.safetensors"))


class Trusted(FakeWeightStream):
    """Asks for no proof: these workers hold nothing."""

    def prove(self, read):
        return self.expected()


@pytest.fixture
def workers():
    return TakingWorkers()


@pytest.fixture
def adapters(workers):
    """Room for two, of rank 4 at most."""
    folder, limits = SimpleNamespace(shape_of=LAYERS.get), AdapterLimits(num_adapters=2, max_rank=4)
    return Adapters(workers, folder, limits, "float32", lambda num_bytes: None, on_cpu=True)


def poet(rank=2, version=3):
    torch = pytest.importorskip("torch")
    return Trusted([(DOWN, torch.arange(4.0 * rank).view(rank, 4)), (UP, torch.ones(6, rank))], version)


def test_vllm_gets_what_the_stream_brought_with_the_scale_in_b(adapters, workers):
    stream = poet()
    assert adapters.load(LoraAdapter(name="poet", scale=1.5), stream, "it") == stream.expected()
    sent = dict(stream.tensors)
    assert workers.tensors[DOWN].tolist() == sent[DOWN].tolist()
    assert workers.tensors[UP].tolist() == (1.5 * sent[UP]).tolist()
    assert workers.config["lora_alpha"] / workers.config["r"] == 1, "vLLM would scale it again"


def test_an_adapter_that_comes_again_takes_its_own_place_and_there_is_room_for_so_many(adapters, workers):
    for name in ("poet", "clerk", "poet"):
        adapters.check_room(name)
        adapters.load(LoraAdapter(name=name, scale=1.0), poet(), "it")
    assert workers.numbers == [("add_adapter", 1, "poet"), ("add_adapter", 2, "clerk"), ("add_adapter", 1, "poet")]
    with pytest.raises(ConfigError, match=r"holds 2 adapters and has 'poet', 'clerk': drop one before 'third' comes"):
        adapters.check_room("third")
    adapters.drop("poet")
    adapters.check_room("third")
    with pytest.raises(WeightSyncError, match="rank 5 is more than max_lora_rank = 4"):
        adapters.load(LoraAdapter(name="third", scale=1.0), poet(rank=5), "it")
    adapters.load(LoraAdapter(name="third", scale=1.0), poet(rank=4), "it")


def test_an_adapter_without_usable_weights_serves_when_it_has_come_again(adapters):
    adapters.load(LoraAdapter(name="poet", scale=1.0), poet(), "it")
    adapters.mark_unusable("poet", "the update failed half way")
    with pytest.raises(WeightSyncError, match="'poet' has no usable weights: the update failed half way; send it"):
        adapters.number("poet")
    adapters.load(LoraAdapter(name="poet", scale=1.0), poet(), "it")
    assert adapters.number("poet") == 1


class Held(dict):
    """What workers would hold; they are not here."""

    def expect(self, name, tensor):
        assert self[name].shape == tensor.shape

    def __call__(self, name):
        return self[name]


@pytest.mark.parametrize("left", [None, (0, 0), (3, 1)], ids=["nothing", "in the adapter", "in the padding"])
def test_a_proof_is_of_all_that_serves(left):
    """Rows beyond the adapter's rank are zero, or an adapter before it serves with it."""
    torch = pytest.importorskip("torch")
    sent = {DOWN: torch.ones(2, 4), UP: torch.ones(6, 2)}
    held = {DOWN: torch.zeros(4, 4), UP: torch.zeros(6, 4)}
    held[DOWN][:2], held[UP][:, :2] = 1.0, 3.0
    if left is not None:
        held[DOWN][left] = 7.0
    found = AdapterReadback(sent, {DOWN: sent[DOWN], UP: sent[UP] * 3}, Held(held), 4)
    assert torch.equal(found(UP), sent[UP])
    if left is None:
        assert torch.equal(found(DOWN), sent[DOWN])
    else:
        with pytest.raises(WeightSyncError, match=r"other numbers than were sent in .*lora_A"):
            found(DOWN)


@pytest.fixture
def peft_folder(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    save_file({DOWN: torch.ones(2, 4), UP: torch.ones(6, 2)}, str(tmp_path / "adapter_model.safetensors"))
    return tmp_path


@pytest.mark.parametrize(
    ("config", "scale"),
    [({"r": 4, "lora_alpha": 6}, 1.5), ({"r": 4, "lora_alpha": 6, "use_rslora": True}, 3.0)],
)
def test_the_scale_is_that_of_the_recipe(peft_folder, config, scale):
    (peft_folder / "adapter_config.json").write_text(json.dumps(config))
    adapter, stream = read_peft_adapter(peft_folder, "poet", 3)
    assert (adapter.name, adapter.scale, stream.version) == ("poet", scale, 3)
    held = dict(stream)
    assert stream.prove(held.__getitem__).num_tensors == 2
    with pytest.raises(WeightSyncError, match=r"other numbers than the folder's in .*lora_A"):
        stream.prove(lambda name: held[name] + (name == DOWN))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"r": 4, "lora_alpha": 6, "use_dora": True}, "has use_dora"),
        ({"r": 4, "lora_alpha": 6, "alpha_pattern": {"q_proj": 3}}, "has alpha_pattern"),
        ({"r": 4, "lora_alpha": 6, "bias": "all"}, "trains biases"),
        ({"r": 0, "lora_alpha": 6}, "must name r and lora_alpha, got 0 and 6"),
        ([], "r and lora_alpha, got None"),
    ],
)
def test_what_is_no_plain_lora_is_refused(peft_folder, config, words):
    (peft_folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=words):
        read_peft_adapter(peft_folder, "poet", 0)


def test_an_adapter_that_is_not_finite_is_refused(peft_folder):
    from safetensors.torch import load_file, save_file

    (peft_folder / "adapter_config.json").write_text('{"r": 1, "lora_alpha": 1}')
    path = str(peft_folder / "adapter_model.safetensors")
    tensors = load_file(path)
    tensors[UP][0, 0] = float("nan")
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"lora_B.* holds numbers that are not finite"):
        read_peft_adapter(peft_folder, "poet", 0)


def test_a_folder_without_an_adapter_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"adapter_config\.json cannot be read"):
        read_peft_adapter(tmp_path, "poet", 0)
    (tmp_path / "adapter_config.json").write_text('{"r": 1, "lora_alpha": 1}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors cannot be read"):
        read_peft_adapter(tmp_path, "poet", 0)


def test_placeholders_without_an_image_are_refused():
    request = GenerateRequest(request_id="r", prompt_ids=np.array([1, 9, 9, 2], np.int32))
    check_request(request, 10, 100)
    with pytest.raises(DataError, match=r"holds 2 placeholder tokens of images \(id 9\) and the request no image"):
        check_request(request, 10, 100, image_token_id=9)


def test_separators_between_an_images_tokens_are_not_placeholders():
    is_embed = lambda tokens: np.array([token == 9 for token in tokens])  # noqa: E731 - vLLM's own form
    assert _embedded(SimpleNamespace(full=[9, 5, 9], is_embed=is_embed)) == [9, 9]
    assert _embedded(SimpleNamespace(full=[9, 9], is_embed=None)) == [9, 9]


def test_a_model_folder_says_whether_it_takes_images(tmp_path):
    folder = tiny_model(tmp_path / "model")
    assert not ModelFolder(folder).has_vision
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vision_config": {}, "image_token_id": 7}))
    found = ModelFolder(folder)
    assert (found.has_vision, found.image_token_id) == (True, 7)

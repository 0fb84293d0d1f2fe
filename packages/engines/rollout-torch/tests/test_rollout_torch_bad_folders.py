"""Every way a model folder or setting can be wrong ends in one clear error before anything runs."""

import asyncio
import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from offbeat_core import ConfigError, ModelError, RolloutEngineConfig
from offbeat_rollout_torch import TorchRolloutEngine
from offbeat_rollout_torch._families import eos_ids_of, load_tokenizer
from offbeat_testing import tiny_model

BESIDE = ("model.layers.0.self_attn.rotary_emb.inv_freq", "mtp.norm.weight")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("good"))


@pytest.fixture
def folder(good, tmp_path):
    return shutil.copytree(good, tmp_path / "model")


def create(folder, **settings):
    async def main():
        engine = await TorchRolloutEngine.create(RolloutEngineConfig(model_path=str(folder), **settings))
        await engine.close()

    asyncio.run(main())


def edit(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def edit_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "gpt2"}, "supported: qwen3, qwen3_moe, qwen3_5, qwen3_5_text, qwen2"),
        ({"hidden_size": None}, "lacks the key 'hidden_size'"),
        ({"hidden_act": "gelu"}, "silu"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"quantization_config": {"bits": 4}}, "unquantised"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "supported: default, linear, llama3"),
        ({"intermediate_size": 64}, "must have shape"),
        ({"num_hidden_layers": 3}, "missing 'model.layers.2"),
        ({"num_hidden_layers": 1}, "has no tensor 'model.layers.1"),
    ],
)
def test_a_config_that_does_not_fit(folder, changes, text):
    edit(folder, **changes)
    with pytest.raises(ModelError, match=text):
        create(folder)


def test_files_missing_or_broken(folder):
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        create(folder)
    weights.unlink()
    with pytest.raises(ModelError, match=r"lacks model\.safetensors"):
        create(folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        create(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        create(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        create(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"needs config\.json"):
        create(folder)
    with pytest.raises(ModelError, match="no model folder"):
        create(folder / "nowhere")


def test_tensors_missing_or_unknown(folder):
    edit_tensors(folder, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(ModelError, match=r"missing 'model\.norm\.weight'"):
        create(folder)
    edit_tensors(folder, lambda tensors: tensors.update(value_head=next(iter(tensors.values())).clone()))
    with pytest.raises(ModelError, match="no tensor 'value_head'"):
        create(folder)


def test_a_shard_missing(tmp_path):
    folder = tiny_model(tmp_path / "m", max_shard_bytes=100_000)
    create(folder)
    sorted(folder.glob("*.safetensors"))[1].unlink()
    with pytest.raises(ModelError, match="lacks model-00002"):
        create(folder)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"options": {"kv_tokens": 1}}, "no option 'kv_tokens'; did you mean kv_cache_tokens"),
        ({"options": {"kv_cache_tokens": "many"}}, "must be"),
        ({"options": {"kv_cache_tokens": 10}}, "at least 64"),
        ({"options": {"max_prefill_tokens": 1}}, "a number >= 16"),
        ({"device": "cuda:77"}, "device 'cuda:77' is not here"),
        ({"device": "abacus"}, "device 'abacus' is not here"),
    ],
)
def test_settings_that_cannot_be(good, settings, text):
    with pytest.raises(ConfigError, match=text):
        create(good, **settings)


@pytest.mark.parametrize("eos", ["<|im_end|>", {"content": "<|im_end|>", "special": True}, None])
def test_a_folder_whose_configuration_names_no_end_has_that_of_its_tokenizer(folder, eos):
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            settings = json.loads((folder / name).read_text())
            settings.pop("eos_token_id", None)
            (folder / name).write_text(json.dumps(settings))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos} if eos else {}))
    tokenizer = load_tokenizer(folder)
    assert eos_ids_of(folder, tokenizer) == ({tokenizer.token_to_id("<|im_end|>")} if eos else set())


def test_what_folders_hold_beside_the_weights_is_passed_over(folder):
    edit_tensors(folder, lambda had: had.update({name: had["model.norm.weight"] + len(name) for name in BESIDE}))
    create(folder)

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import Gemma2Config, MambaConfig

from offbeat_core import ConfigError, ModelError, ShapeError, TrainEngineConfig, TrainSequence
from offbeat_engine_torch import TorchTrainEngine


def create(folder, **changes):
    return TorchTrainEngine.create(TrainEngineConfig(model_path=str(folder), **{"device": "cpu"} | changes))


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def copy(model_folder, tmp_path):
    return shutil.copytree(model_folder, tmp_path / "copy")


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(ModelError, match="is not a folder"):
        create(tmp_path / "nothing")


def cut_short(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def index_of_a_missing_shard(folder):
    index = {"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


BROKEN = {
    "no config": (lambda folder: (folder / "config.json").unlink(), r"has no config\.json"),
    "a broken config": (lambda folder: (folder / "config.json").write_text("{"), "cannot load"),
    "an unknown architecture": (lambda folder: edit_config(folder, model_type="no_such_family"), "no_such_family"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "safetensors"),
    "truncated weights": (cut_short, "cut short"),
    "a missing shard": (index_of_a_missing_shard, "00001-of-00002"),
    "too few weights": (
        lambda folder: edit_config(folder, num_hidden_layers=3, layer_types=["full_attention"] * 3),
        "lack 11 tensors",
    ),
    "a weight of another shape": (lambda folder: edit_config(folder, intermediate_size=96), ""),
}


@pytest.mark.parametrize(("damage", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_folder_is_refused(copy, damage, message):
    damage(copy)
    with pytest.raises(ModelError, match=message or str(copy)):
        create(copy)


@pytest.mark.parametrize("changes", [{"hidden_size": "wide"}, {"model_type": "reformer", "is_decoder": False}], ids=str)
def test_a_config_that_its_family_does_not_take(copy, changes):
    edit_config(copy, **changes)
    with pytest.raises(ModelError, match="cannot load") as raised:
        create(copy)
    assert "\n" not in str(raised.value)


def test_code_in_the_folder_is_not_run(copy):
    (copy / "modeling_evil.py").write_text("raise SystemExit('ran')\n")
    auto_map = {"AutoConfig": "modeling_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model"}
    edit_config(copy, model_type="evil", auto_map=auto_map)
    with pytest.raises(ModelError, match="trust_remote_code"):
        create(copy)


@pytest.mark.parametrize("settings", [Gemma2Config(), MambaConfig()], ids=["softcap", "no attention"])
def test_a_family_the_engine_would_get_wrong(copy, settings):
    settings.architectures = None
    (copy / "config.json").write_text(settings.to_json_string(use_diff=False))
    with pytest.raises(ModelError):
        create(copy)


SMALL = {"vocab_size": 300, **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)}
LAYERS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
OTHERS = {
    "ModernBertDecoder": (LAYERS, "computes other log-probabilities"),
    "Doge": (LAYERS, "makes its own attention mask"),
    "Mpt": ({"d_model": 32, "n_heads": 4, "n_layers": 2}, "does not run on packed sequences"),
    "Falcon": (LAYERS, "cannot be exchanged"),
}


def other_family(folder, family):
    """A random model of a family that the engine does not train."""
    config = getattr(transformers, f"{family}Config")(**SMALL, **OTHERS[family][0])
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn_like(tensor) * 0.3)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", OTHERS)
def test_a_family_that_computes_otherwise_is_refused_in_one_line(family, tmp_path):
    with pytest.raises(ModelError, match=OTHERS[family][1]) as raised:
        create(other_family(tmp_path, family))
    assert "\n" not in str(raised.value)


def spoil(folder, name):
    """Write NaN into one weight of a model folder."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights[name][..., 0] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"]
)
def test_weights_that_are_no_numbers_are_named_and_no_family_is_blamed(copy, name):
    spoil(copy, name)
    with pytest.raises(ModelError, match=f"1 of its weights holds NaN or infinity, first {name}") as raised:
        create(copy)
    assert "family" not in str(raised.value)


@pytest.mark.mesh(dp=2, compare=False)
def test_ranks_refuse_weights_that_are_no_numbers_together(mesh, model_folder, tmp_path):
    if mesh.rank == 0:
        shutil.copytree(model_folder, tmp_path / "spoiled")
        spoil(tmp_path / "spoiled", "model.norm.weight")
    mesh.group("dp").barrier()
    settings = TrainEngineConfig(model_path=str(tmp_path / "spoiled"), device="cpu")
    with pytest.raises(ModelError, match="the model computes NaN or infinity"):
        TorchTrainEngine.create(settings, mesh)


@pytest.mark.mesh(dp=2, compare=False)
def test_ranks_refuse_a_family_together(mesh, tmp_path):
    if mesh.rank == 0:
        other_family(tmp_path, "ModernBertDecoder")
    mesh.group("dp").barrier()
    settings = TrainEngineConfig(model_path=str(tmp_path), device="cpu")
    with pytest.raises(ModelError, match="ModernBertDecoderForCausalLM computes other log-probabilities"):
        TorchTrainEngine.create(settings, mesh)


def test_a_device_that_is_not_there(model_folder):
    with pytest.raises(ConfigError, match="this machine has"):
        create(model_folder, device="cuda:77")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"temprature": 1.0}, "did you mean temperature"),
        ({"temperature": 0.0}, "> 0"),
        ({"temperature": "hot"}, "float"),
        ({"share_prompts": 1}, "bool"),
        ({"head_dtype": "float8"}, "one of"),
    ],
)
def test_options_are_checked(model_folder, options, match):
    with pytest.raises(ConfigError, match=match):
        create(model_folder, options=options)


def test_token_ids_of_another_tokenizer(model_folder):
    sequence = TrainSequence(ids=np.array([1, 999], np.int32), loss_mask=np.array([False, True]))
    with pytest.raises(ModelError, match="999"):
        create(model_folder).logprobs([sequence])


def test_extras_that_differ_between_sequences(model_folder, make_groups, weighted_loss):
    sequences = make_groups()
    odd = TrainSequence(ids=sequences[0].ids, loss_mask=sequences[0].loss_mask)
    with pytest.raises(ShapeError, match="extras"):
        create(model_folder).forward_backward([*sequences, odd], weighted_loss)

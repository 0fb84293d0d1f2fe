"""What makes vLLM take FP8 blocks, and what of them can be read back; `tests/engine` has it on vLLM itself."""

from copy import copy
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from offbeat_core import ConfigError, ModelFolder, RolloutEngineConfig  # noqa: E402
from offbeat_rollout_vllm._fp8_blocks import block_arguments, with_scales  # noqa: E402
from offbeat_rollout_vllm._in_workers.weights import HeldWeights  # noqa: E402

FOLDER = ModelFolder.__new__(ModelFolder)
FOLDER.path = Path("model")
FOLDER.shapes = {
    "model.embed_tokens.weight": (512, 256),
    "model.layers.0.self_attn.o_proj.weight": (256, 320),
    "model.layers.0.mlp.gate.weight": (8, 256),
    "model.layers.0.input_layernorm.weight": (256,),
    "model.visual.pos_embed.weight": (256, 256),
}


def config(dtype="bfloat16"):
    return RolloutEngineConfig(model_path="model", dtype=dtype, weight_format="fp8")


def test_the_folder_is_taken_for_one_of_blocks_but_for_what_the_trainer_does_not_quantise():
    arguments = block_arguments(config(), {}, FOLDER)
    stored = arguments["hf_overrides"]["quantization_config"]
    assert (stored["quant_method"], stored["weight_block_size"]) == ("fp8", [128, 128])
    assert stored["modules_to_not_convert"] == [
        "model.embed_tokens",
        "model.layers.0.mlp.gate",
        "model.visual.pos_embed",
    ]
    assert arguments["load_format"] == "dummy"


def test_an_update_must_bring_every_scale():
    shapes = with_scales(FOLDER).shapes
    assert shapes["model.layers.0.self_attn.o_proj.weight_scale_inv"] == (2, 3)
    assert len(shapes) == len(FOLDER.shapes) + 1


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match=r"bfloat16 or float16, and rollout\.dtype is float32: set it to bfloat16"):
        block_arguments(config("float32"), {}, FOLDER)
    for name in ("quantization", "hf_overrides", "load_format"):
        with pytest.raises(ConfigError, match=f"option {name} .* rollout.weight_format = fp8 decides it"):
            block_arguments(config(), {name: "auto"}, FOLDER)
    mixture = copy(FOLDER)
    mixture.shapes = {**FOLDER.shapes, "model.layers.0.mlp.experts.0.up_proj.weight": (128, 256)}
    with pytest.raises(ConfigError, match=r"blocks of experts cannot be proved, and model has experts; leave it out"):
        block_arguments(config(), {}, mixture)


class Joined(torch.nn.Module):
    """Three matrices of 256, 128 and 128 rows, as vLLM's QKVParallelLinear of blocks on one rank."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(512, 320).to(torch.float8_e4m3fn), requires_grad=False)
        self.weight_scale_inv = torch.nn.Parameter(torch.arange(12.0).view(4, 3), requires_grad=False)
        self.weight_block_size, self.quant_method = [128, 128], SimpleNamespace(fp8_linear=None)
        self.input_size = self.input_size_per_partition = 320
        self.output_size = self.output_size_per_partition = 512
        self.output_sizes, self.tp_rank, self.tp_size = [256, 128, 128], 0, 1
        self.num_heads, self.num_kv_heads, self.head_size, self.num_kv_head_replicas = 2, 1, 128, 1


@pytest.fixture
def held():
    model = torch.nn.Module()
    model.qkv_proj = Joined()
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    return HeldWeights(model)


def test_scales_are_read_where_their_part_has_them(held):
    assert held.read("q_proj.weight_scale_inv").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert held.read("k_proj.weight_scale_inv").tolist() == [[6, 7, 8]]
    place = held.find("v_proj.weight_scale_inv")
    assert (place.first_row, place.shape, place.pieces) == (3, (1, 3), ((0, 1),))
    assert held.read("v_proj.weight").dtype == torch.float8_e4m3fn


def test_blocks_that_a_kernel_has_packed_are_not_read(held):
    layer = held.find("k_proj.weight").module
    layer.weight_scale_inv.data = layer.weight_scale_inv.data.T.contiguous()
    with pytest.raises(KeyError, match=r"packed its FP8 blocks.*linear_backend"):
        held.read("k_proj.weight")

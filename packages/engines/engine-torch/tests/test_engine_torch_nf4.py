"""A frozen base in NF4 under float32 adapters: numbers, products, what is kept, ranks, checkpoints, estimates."""

from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_engine_torch_lora_base import train
from test_engine_torch_ranks_memory import NUM_LAYERS, allocations, save
from transformers import AutoConfig, AutoModelForCausalLM

from offbeat_core import ConfigError, TrainEngineConfig, TrainEngineSettings, TrainLayout
from offbeat_engine_torch import TorchTrainEngine
from offbeat_engine_torch._frozen import pack_layers
from offbeat_engine_torch._layers.nf4 import NF4_BYTES, Nf4Weight, packed_weights
from offbeat_engine_torch._model import outline_model
from offbeat_placement import ModelShape, read_shape, train_memory
from offbeat_testing import tiny_model
from offbeat_training import TensorFolder

EPSILON = torch.finfo(torch.bfloat16).eps


def config(folder, base="nf4", **changes):
    options = {"lora_base_dtype": base, **changes.pop("options", {})}
    settings = {"device": "cpu", "dtype": "bfloat16", "learning_rate": 1e-2, "lora_rank": 4, "adam_eps": 1e-5}
    return TrainEngineConfig(model_path=str(folder), options=options, **settings | changes)


def create(folder, base="nf4", mesh=None, **changes):
    return TorchTrainEngine.create(config(folder, base, **changes), mesh)


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def folder(request, tmp_path_factory):
    """A model whose rows are whole blocks, but for those of the experts' second matrix."""
    return tiny_model(tmp_path_factory.mktemp("nf4") / request.param, request.param, hidden_size=64)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("nf4") / "dense", hidden_size=64)


def quantiles():
    """Levels of NF4 from the paper's definition. Source: bitsandbytes, `create_normal_map`."""
    offset = 0.9677083
    upper, lower = (torch.linspace(offset, 0.5, num, dtype=torch.float64)[:-1] for num in (9, 8))
    levels = torch.cat([torch.special.ndtri(upper), torch.zeros(1, dtype=torch.float64), -torch.special.ndtri(lower)])
    return (levels / levels.max()).sort().values


def dynamic_tree():
    """Numbers that 8 bits of a scale stand for. Source: arXiv:1511.04561; bitsandbytes, `create_dynamic_map`."""
    found = [0.0, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1, 2**decade + 1)
        for low, high in pairwise(edges):
            found += [sign * 10.0 ** (decade - 6) * (low + high) / 2 for sign in (1, -1)]
    assert len(found) == 256
    return torch.tensor(sorted(found), dtype=torch.float64)


def nearest(values, levels):
    return levels[(values[..., None] - levels).abs().argmin(-1)]


def reference(weight):
    """Numbers that NF4 holds of a weight, in float64, one block after the other."""
    blocks = weight.double().reshape(-1, 64)
    scales = blocks.abs().amax(1)
    codes = nearest(blocks / scales.clamp(min=1e-38)[:, None], quantiles())
    left, found = scales - scales.mean(), []
    for group in left.split(256):
        largest = group.abs().max()
        found.append(largest * nearest(group / largest, dynamic_tree()))
    return (codes * (torch.cat(found) + scales.mean())[:, None]).view(weight.shape)


@pytest.mark.parametrize("shape", [(96, 128), (3, 40, 192), (1, 64)], ids=str)
def test_numbers_are_those_of_the_definition(shape):
    """Compared with bitsandbytes 0.50 by hand: its codes of weights, and 65,496 of 65,536 of its codes of scales."""
    torch.manual_seed(0)
    weight = (0.02 * torch.randn(shape) * (0.5 + torch.rand(shape[:-1])[..., None])).bfloat16()
    weight[0, :64] = 0.0
    held = Nf4Weight(shape)
    packed = held.pack(weight)
    found, wanted = held.unpack(packed), reference(weight)
    off = (found.double() - wanted).abs() > EPSILON * wanted.abs()
    # A scale in the middle between two codes is rounded one way in float32 and the other way in float64.
    assert off.sum() <= 0.001 * off.numel()
    assert not found[0, :64].any()
    levels = found.view(-1, 64).unique(dim=0)
    assert all(len(block.unique()) <= 16 for block in levels)
    for start, stop in ((0, 1), (len(packed) // 2, len(packed))):
        assert torch.equal(held.unpack(packed[start:stop], start), found[start:stop]), "a part, as ranks hold it"


def test_bytes_of_a_weight_are_what_the_plan_counts():
    held = Nf4Weight((1024, 1024))
    packed = held.pack(torch.randn(1024, 1024))
    assert packed.nbytes + held._ranges_G.nbytes == NF4_BYTES * 2**20


def unpacked_folder(engine, folder, to):
    """Write the model that the engine holds, adapters left out."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(dict(engine.weights(part="base")), strict=False)
    model.save_pretrained(to)
    return to


@pytest.mark.parametrize("settings", [{}, {"activation_checkpointing": True}], ids=["kept", "recomputed"])
def test_training_is_that_on_the_unpacked_base_bit_for_bit(settings, folder, tmp_path, make_groups, weighted_loss):
    packed = create(folder, max_tokens_per_microbatch=48, **settings)
    names = {piece.name for piece in packed._policy.pieces if piece.packed}
    assert any(".experts." in name if "moe" in folder.name else ".mlp." in name for name in names)
    assert any(name.endswith("q_proj.weight") for name in names)
    assert not any("gate.weight" in name or "embed" in name or "norm" in name for name in names)
    plain = create(unpacked_folder(packed, folder, tmp_path), "bfloat16", max_tokens_per_microbatch=48, **settings)
    assert train(packed, make_groups, weighted_loss) == train(plain, make_groups, weighted_loss)
    ours, theirs = ({name: tensor.clone() for name, tensor in each.weights()} for each in (packed, plain))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items()), "merged in float32"
    asked = make_groups(seed=9)
    for reference in (False, True):
        pairs = zip(*(each.logprobs(asked, reference=reference) for each in (packed, plain)), strict=True)
        assert all(np.array_equal(*pair) for pair in pairs)


def kept_bytes(engine, sequences):
    """Bytes of different tensors that a forward pass keeps for its backward pass, parameters left out."""
    kept = {}
    ours = {each.untyped_storage().data_ptr() for each in engine._policy.model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ours:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no other gets its address
        return tensor

    batch = engine._policy.lay_out(sequences, engine._plan("a test", sequences, engine._policy)[0][0])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        engine._policy.ask(batch)
    return sum(num_bytes for num_bytes, _ in kept.values())


def test_no_unpacked_weight_is_kept_for_the_backward_pass(folder, tmp_path, make_groups):
    sequences = make_groups(num_prompts=1)
    packed = create(folder)
    plain = create(unpacked_folder(packed, folder, tmp_path), "bfloat16")
    one, other = kept_bytes(packed, sequences), kept_bytes(plain, sequences)
    assert one <= other


def test_fifty_steps_learn_what_a_bfloat16_base_learns(dense, make_groups):
    """Losses of the same batches in the same order, in nats a token.

    Measured: from 5.93 to 2.59 with a base in bfloat16, and to 2.68 with NF4, never off by more than 0.20.
    """

    def likelihood(tokens):
        return -tokens.logprobs_N.sum() / tokens.total_tokens, {}

    seeds = [step % 5 for step in range(50)]
    exact, found = (train(create(dense, base), make_groups, likelihood, seeds) for base in ("bfloat16", "nf4"))
    differences = [abs(one - other) for one, other in zip(exact, found, strict=True)]
    assert exact[-1] < 0.5 * exact[0], "there is something to lose"
    assert max(differences) < 0.3


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11 turns bytes to bfloat16: see check_nf4_over_ranks")
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"cp": 2}], ids=str, indirect=True)
def test_ranks_train_as_one_process_and_gather_bytes(mesh, folder, tmp_path, make_groups, weighted_loss):
    settings = {"max_tokens_per_microbatch": 48}
    one, many = create(folder, **settings), create(folder, mesh=mesh, **settings)
    base = {name: tensor.clone() for name, tensor in one.weights(part="base")}
    for name, tensor in many.weights(part="base"):
        assert torch.equal(tensor, base[name]), name
    gathered, packed = set(), [piece for piece in many._policy.pieces if piece.packed]
    assert all(2 * piece.local.numel() <= piece.packed.packed_shape[0] * piece.local[0].numel() + 1 for piece in packed)
    for module in many._policy.model.modules():
        if "nf4" in module.__dict__:
            module.register_forward_pre_hook(
                lambda module, _: gathered.update(getattr(module, name).dtype for name in module.nf4)
            )
    losses = [train(engine, make_groups, weighted_loss) for engine in (one, many)]
    np.testing.assert_allclose(losses[1], losses[0], atol=2 * EPSILON)
    assert gathered == {torch.uint8}
    shared = tmp_path.parent / "saved-in-nf4"
    many.save(shared)
    resumed = create(folder, mesh=mesh, **settings)
    resumed.load(shared)
    assert train(resumed, make_groups, weighted_loss, (2,)) == train(many, make_groups, weighted_loss, (2,))


def test_a_checkpoint_holds_the_sum_in_float32_and_resumes_exactly(folder, tmp_path, make_groups, weighted_loss):
    engine = create(folder)
    train(engine, make_groups, weighted_loss)
    engine.save(tmp_path)
    merged = {name: tensor.clone() for name, tensor in engine.weights()}
    with TensorFolder(tmp_path) as files:
        for name in files.names & merged.keys():
            assert torch.equal(files.read(name, ()), merged[name]), name
    resumed = create(folder)
    resumed.load(tmp_path)
    resumed.sleep(2)
    resumed.wake()
    assert train(resumed, make_groups, weighted_loss, (2, 3)) == train(engine, make_groups, weighted_loss, (2, 3))


@pytest.mark.nightly
def test_loading_holds_no_more_than_the_packed_model_and_a_tensor(tmp_path):
    """Beside the mapped file, which counts as the whole model. Measured of 27 million weights: 17 MB, 31 at most."""
    folder = save(tmp_path, vocab_size=320, hidden_size=512, num_hidden_layers=NUM_LAYERS)
    engines, num_bytes = [], sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    held = list(accumulate(allocations(lambda: engines.append(create(folder)))))
    weights = sum(piece.packed.shape[0] * piece.packed.shape[1] for piece in engines[0]._policy.pieces if piece.packed)
    assert held[-1] < 0.7 * weights
    assert max(held) - num_bytes < 1.5 * weights, "2 bytes a weight in bfloat16"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lora_rank": 0}, '"nf4" needs frozen weights'),
        ({"dtype": "float32"}, 'needs dtype = "bfloat16"'),
        ({"options": {"tensor_parallel": 2}}, "tensor_parallel = 2 cuts"),
    ],
)
def test_a_base_that_cannot_be_in_nf4_is_refused_by_the_plan(changes, reason, dense):
    with pytest.raises(ConfigError, match=reason):
        TorchTrainEngine.plan(config(dense, **changes), 2)


def test_a_torch_that_gathers_bytes_as_other_numbers_is_refused_by_the_plan(dense, monkeypatch):
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.11.0"))
    assert TorchTrainEngine.plan(config(dense)).dp == 1
    with pytest.raises(ConfigError, match=r"over 2 ranks needs torch 2\.13 or newer.*found 2\.11"):
        TorchTrainEngine.plan(config(dense), 2)


def test_the_plan_counts_the_weights_as_they_are_held(dense):
    settings = config(dense)
    layout, shape = TorchTrainEngine.plan(settings), read_shape(str(dense))
    parts = train_memory(settings, layout, shape, on_cpu=True).estimate(shape).parts
    pieces = TorchTrainEngine.create(settings)._policy.pieces
    held = sum(piece.local.nbytes for piece in pieces)
    assert parts["weights"] == pytest.approx(held, rel=0.02)  # norms are held in float32
    assert parts["unpacked"] == 2 * shape.block_parameters


def test_what_weighs_experts_is_not_packed(tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_experts": 4, "shared_expert_intermediate_size": 64}
    AutoConfig.for_model("qwen2_moe", **sizes).save_pretrained(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    model = outline_model(str(tmp_path))
    pack_layers(model)
    packed = {name.removeprefix("model.layers.0.mlp.") for name in packed_weights(model.whole) if ".mlp." in name}
    shared = {f"shared_expert.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert packed == shared | {"experts.gate_up_proj", "experts.down_proj"}


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3", {"hidden_size": 5120, "num_attention_heads": 64, "intermediate_size": 25_600}),
        (
            "qwen3_moe",
            {"hidden_size": 2048, "num_attention_heads": 32, "intermediate_size": 6144, "moe_intermediate_size": 768}
            | {"num_experts": 128, "num_experts_per_tok": 8},
        ),
    ],
)
def test_published_sizes_take_what_the_estimate_says(family, sizes, tmp_path):
    """Counted without memory: four layers of Qwen3-32B and 30B-A3B."""
    common = {"num_hidden_layers": 4, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}
    hf_config = AutoConfig.for_model(family, **common, **sizes, tie_word_embeddings=False)
    hf_config.save_pretrained(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    shape = ModelShape.from_config(hf_config.to_dict())
    layout = TrainLayout(zero_stage=3, frozen_weight_bytes=NF4_BYTES, vocabulary_bytes=2)
    estimate = train_memory(TrainEngineSettings(lora_rank=16, dtype="bfloat16"), layout, shape, on_cpu=False).estimate(
        shape
    )
    model = outline_model(str(tmp_path))
    pack_layers(model)
    packed = packed_weights(model.whole)
    found = sum(
        each.nbytes if each.dtype == torch.uint8 else 2 * each.numel() for each in model.whole.parameters()
    ) + sum(4 * torch.Size(each.shape).numel() / 2**14 for each in packed.values())
    adapters = 4 * 16 * shape.adapted_width
    assert estimate.parts["weights"] - adapters == pytest.approx(found, rel=0.001)

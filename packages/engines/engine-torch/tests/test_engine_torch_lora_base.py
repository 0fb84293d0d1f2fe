"""A frozen base in bfloat16 under float32 adapters: formats, products, merging, resuming, ranks, memory."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from offbeat_core import ConfigError, TrainEngineConfig
from offbeat_engine_torch import TorchTrainEngine
from offbeat_engine_torch._layout import TorchEngineOptions
from offbeat_placement import read_shape, train_memory
from offbeat_training import TensorFolder, lora_layers

EPSILON = torch.finfo(torch.bfloat16).eps
RANK, ALPHA = 4, 6.0


def config(folder, base="auto", **changes):
    options = {"lora_base_dtype": base, **changes.pop("options", {})}
    settings = {"device": "cpu", "dtype": "bfloat16", "learning_rate": 1e-2, "lora_rank": RANK, "lora_alpha": ALPHA}
    return TrainEngineConfig(model_path=str(folder), options=options, **settings | changes)


def create(folder, base="auto", mesh=None, **changes):
    return TorchTrainEngine.create(config(folder, base, **changes), mesh)


def train(engine, make_groups, loss, seeds=(0, 1)):
    losses = []
    for seed in seeds:
        losses.append(engine.forward_backward(make_groups(seed=seed), loss)["loss"].value)
        assert engine.step()["steps_refused"].value == 0
    return losses


def formats_of(engine):
    return {piece.name: piece.local.dtype for piece in engine._policy.pieces}


def held_in(engine, dtype):
    return {name for name, found in formats_of(engine).items() if found == dtype}


@pytest.fixture(scope="module")
def rounded_folder(model_folder, tmp_path_factory):
    """The model as most are published: its weights are in bfloat16."""
    folder = tmp_path_factory.mktemp("rounded")
    AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def test_layers_are_held_in_bfloat16_and_what_is_trained_in_float32(model_folder, make_groups, weighted_loss):
    """Embedding and head as the head multiplies."""
    in_float32 = held_in(create(model_folder, "float32"), torch.float32)
    adapters = {name for name in in_float32 if name.endswith((".lora_A", ".lora_B"))}
    matrices = {name for name in in_float32 - adapters if name.endswith("_proj.weight")}
    for head, vocabulary in {"auto": set(), "bfloat16": {"model.embed_tokens.weight"}}.items():
        engine = create(model_folder, options={"head_dtype": head})
        assert held_in(engine, torch.bfloat16) == matrices | vocabulary
        assert held_in(engine, torch.float32) == in_float32 - matrices - vocabulary
        train(engine, make_groups, weighted_loss)
        assert set(engine._optimizer.parameters) == adapters
        assert all(moment.dtype == torch.float32 for moment in engine._optimizer.moments())
    assert held_in(create(model_folder, dtype="float32"), torch.float32) == in_float32


class Copies(TorchDispatchMode):
    """Counts copies of some tensors in another format."""

    def __init__(self, watched):
        super().__init__()
        self.watched, self.count = {tensor.data_ptr() for tensor in watched}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default:
            self.count += args[0].data_ptr() in self.watched and args[0].ndim == 2
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("settings", [{}, {"activation_checkpointing": True}], ids=["kept", "recomputed"])
def test_no_copy_of_the_base_is_made_in_a_step(settings, model_folder, make_groups, weighted_loss):
    """Autocast would copy each matrix of a float32 base in each micro-batch."""
    counts = {}
    for base in ("bfloat16", "float32"):
        options = {"head_dtype": "bfloat16"}
        engine = create(model_folder, base, options=options, max_tokens_per_microbatch=16, **settings)
        layers = lora_layers(engine._policy.model.whole).values()
        with Copies([*(layer.lora_base.weight for layer in layers), engine._policy.model.head.weight]) as copies:
            train(engine, make_groups, weighted_loss, seeds=(0,))
            engine.logprobs(make_groups())
        counts[base] = copies.count
    assert counts["bfloat16"] == 0 < len(layers) < counts["float32"]


@pytest.mark.parametrize("head", ["auto", "bfloat16"])
def test_published_weights_train_as_with_a_float32_base_bit_for_bit(head, rounded_folder, make_groups, weighted_loss):
    asked, seen = make_groups(seed=9), []
    for base in ("bfloat16", "float32"):
        engine = create(rounded_folder, base, options={"head_dtype": head})
        losses = train(engine, make_groups, weighted_loss)
        adapters = {name: tensor.clone() for name, tensor in engine.weights(part="adapter")}
        seen.append((losses, adapters, engine.logprobs(asked), engine.logprobs(asked, reference=True)))
    base = TrainEngineConfig(
        model_path=str(rounded_folder), device="cpu", dtype="bfloat16", options={"head_dtype": head}
    )
    of_the_base = TorchTrainEngine.create(base).logprobs(asked)
    (one, adapters, now, first), (other, wanted, *others) = seen
    assert one == other
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in adapters.items())
    assert all(np.array_equal(*pair) for pair in zip(now + first, others[0] + others[1], strict=True))
    assert all(np.array_equal(*pair) for pair in zip(first, of_the_base, strict=True)), "adapters switched off"
    assert max(np.abs(a - b).max() for a, b in zip(now, first, strict=True)) > 1e-4


@pytest.mark.parametrize("head", ["auto", "bfloat16"])
def test_rounding_the_base_moves_logprobs_by_no_more_than_its_format(head, model_folder, make_groups):
    """A rounded weight is up to half an epsilon off, as is the product that it is a factor of."""
    exact, coarse = (create(model_folder, base, options={"head_dtype": head}) for base in ("float32", "bfloat16"))
    pairs = [np.concatenate(engine.logprobs(make_groups())) for engine in (exact, coarse)]
    errors, spread = np.abs(pairs[0] - pairs[1]), np.abs(pairs[0]).max()
    assert errors.max() < EPSILON * spread
    assert errors.mean() < EPSILON * spread / 4


def exact_merge(folder, engine):
    """Weights merged in float64 from the rounded base, and the bound of a float32 sum's error, by name."""
    layers, base = lora_layers(engine._policy.model.whole), {}
    rounded = held_in(engine, torch.bfloat16)
    with TensorFolder(folder) as files:
        for name in sorted(files.names & formats_of(engine).keys()):
            tensor = files.read(name, ())
            base[name] = tensor.to(torch.bfloat16 if name in rounded else torch.float32).double()
    bounds = dict.fromkeys(base, 0.0)
    for name, layer in layers.items():
        low, up = layer.lora_A.weight.detach().double(), layer.lora_B.weight.detach().double()
        added, sizes = layer.scale * (up @ low), layer.scale * (up.abs() @ low.abs()) + base[f"{name}.weight"].abs()
        bounds[f"{name}.weight"] = (RANK + 2) * torch.finfo(torch.float32).eps * sizes
        base[f"{name}.weight"] = base[f"{name}.weight"] + added
    return base, bounds


def test_merged_weights_are_those_of_float64_rounded_once(model_folder, tmp_path, make_groups, weighted_loss):
    engine = create(model_folder, options={"head_dtype": "bfloat16"})
    train(engine, make_groups, weighted_loss)
    engine.save_weights(tmp_path)
    wanted, bounds = exact_merge(model_folder, engine)
    merged = {name: tensor.clone() for name, tensor in engine.weights()}
    assert merged.keys() == wanted.keys()
    for name, tensor in merged.items():
        assert tensor.dtype == torch.float32
        assert bool(((tensor - wanted[name]).abs() <= bounds[name]).all()), name
    for name, tensor in engine.weights("bfloat16"):  # as engines receive them: the caller rounds what is wider
        once = EPSILON / 2 * wanted[name].abs() + 1.01 * bounds[name]
        assert bool(((tensor.bfloat16() - wanted[name]).abs() <= once).all()), name
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in merged.items())


def test_frozen_weights_are_handed_on_as_they_are_held(model_folder):
    """Without a copy where bfloat16 is wanted; in float32 where nothing is said."""
    engine = create(model_folder)
    held = {piece.name: piece.local for piece in engine._policy.pieces}
    name = next(name for name in held_in(engine, torch.bfloat16) if name.endswith("q_proj.weight"))
    assert dict(engine.weights("bfloat16", part="base"))[name].data_ptr() == held[name].data_ptr()
    found = dict(engine.weights(part="base"))
    assert all(tensor.dtype == torch.float32 for tensor in found.values())
    assert all(torch.equal(found[name], held[name].float()) for name in found)


@pytest.mark.parametrize("saved_as", ["bfloat16", "float32"])
def test_a_checkpoint_of_either_base_resumes_exactly(saved_as, rounded_folder, tmp_path, make_groups, weighted_loss):
    """Older checkpoints are of a float32 base. Adapters alone are read, so the base may be held otherwise."""
    engine = create(rounded_folder, saved_as)
    train(engine, make_groups, weighted_loss)
    engine.save(tmp_path)
    resumed = create(rounded_folder)
    resumed.load(tmp_path)
    assert train(resumed, make_groups, weighted_loss, (2, 3)) == train(engine, make_groups, weighted_loss, (2, 3))
    pairs = zip(resumed.logprobs(make_groups(seed=9)), engine.logprobs(make_groups(seed=9)), strict=True)
    assert all(np.array_equal(*pair) for pair in pairs)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"lora_rank": 0, "lora_alpha": 0.0}, "lora_rank = 0"), ({"dtype": "float32"}, 'needs dtype = "bfloat16"')],
)
def test_a_base_that_cannot_be_in_bfloat16_is_refused_by_the_plan(changes, reason, model_folder):
    for refuse in (TorchTrainEngine.plan, TorchTrainEngine.create):
        with pytest.raises(ConfigError, match=reason):
            refuse(config(model_folder, "bfloat16", **changes))
    for base in ("auto", "float32"):
        assert TorchTrainEngine.plan(config(model_folder, base, **changes)).frozen_weight_bytes == 0


@pytest.mark.parametrize("head", ["auto", "bfloat16"])
@pytest.mark.parametrize("base", ["auto", "float32"])
def test_the_plan_counts_the_weights_as_they_are_held(base, head, model_folder):
    settings = config(model_folder, base, options={"head_dtype": head})
    layout, shape = TorchTrainEngine.plan(settings), read_shape(str(model_folder))
    memory = train_memory(settings, layout, shape, on_cpu=True).estimate(shape)
    pieces = TorchTrainEngine.create(settings)._policy.pieces
    norms_bytes = sum(2 * piece.local.numel() for piece in pieces if piece.local.ndim == 1)  # count as matrices do
    wanted = sum(piece.local.nbytes for piece in pieces)
    assert wanted - norms_bytes <= memory.parts["weights"] <= wanted
    trained = sum(piece.local.numel() for piece in pieces if piece.is_adapter)
    assert memory.parts["gradients"] == 4 * trained
    assert memory.parts["optimizer"] == 8 * trained


@pytest.mark.mesh(dp=2, compare=False)
def test_what_the_family_keeps_in_float32_is_read_and_held_in_it(mesh, tmp_path, make_groups, weighted_loss):
    """A family whose files are converted, on a rank of two and in one process."""
    if mesh.rank == 0:
        write_experts(tmp_path / "model")
    mesh.group("dp").barrier()
    folder = tmp_path / "model"
    engines = [create(folder), create(folder, mesh=mesh)]
    with TensorFolder(folder) as files:
        biases = {name: files.read(name, ()) for name in files.names if name.endswith("e_score_correction_bias")}
    assert biases
    for engine in engines:
        held = {piece.name: piece.local for piece in engine._policy.pieces}
        assert all(torch.equal(held[name], bias) for name, bias in biases.items())
        assert {tensor.dtype for name, tensor in held.items() if ".experts." in name} == {torch.bfloat16}
    one, many = ({name: tensor.clone() for name, tensor in engine.weights(part="base")} for engine in engines)
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)
    found = [train(engine, make_groups, weighted_loss)[0] for engine in engines]
    assert abs(found[0] - found[1]) < EPSILON


def write_experts(folder):
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 16, "n_routed_experts": 8}
    sizes |= {"num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**sizes))
    for name, tensor in model.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            tensor.normal_(std=0.1)
    model.save_pretrained(folder)


@pytest.mark.parametrize(
    "mesh", [{"dp": 2}, pytest.param({"dp": 2, "tp": 2}, marks=pytest.mark.nightly), {"tp": 2}], ids=str, indirect=True
)
@pytest.mark.parametrize("head", ["auto", "bfloat16"])
def test_ranks_train_as_one_process_and_gather_two_bytes(
    head, mesh, model_folder, tmp_path, make_groups, weighted_loss
):
    """Adapters are gathered in the layers' format, as the base is held: one call gathers both."""
    settings = {"options": {"head_dtype": head}, "max_tokens_per_microbatch": 48, "adam_eps": 1e-5}
    one, many = create(model_folder, **settings), create(model_folder, mesh=mesh, **settings)
    assert formats_of(one) == formats_of(many)
    gathered = set()
    for layer in lora_layers(many._policy.model.whole).values():
        for part in (layer.lora_base, layer.lora_A, layer.lora_B):
            part.register_forward_pre_hook(lambda module, _: gathered.add(module.weight.dtype))
    losses = [train(engine, make_groups, weighted_loss) for engine in (one, many)]
    np.testing.assert_allclose(losses[1], losses[0], atol=EPSILON)
    assert gathered == ({torch.bfloat16} if mesh.axes["dp"] > 1 else {torch.bfloat16, torch.float32})
    base = dict(one.weights(part="base"))
    assert all(torch.equal(tensor, base[name]) for name, tensor in many.weights(part="base"))
    merged = {name: tensor.clone() for name, tensor in one.weights()}
    for name, tensor in many.weights():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, merged[name], rtol=3e-2, atol=3e-2)
    asked = make_groups(seed=9)
    firsts = zip(many.logprobs(asked, reference=True), one.logprobs(asked, reference=True), strict=True)
    for found, wanted in firsts:
        np.testing.assert_allclose(found, wanted, atol=EPSILON * np.abs(wanted).max())
    shared = tmp_path.parent / f"shared-{head}"
    many.save(shared)
    resumed = create(model_folder, mesh=mesh, **settings)
    resumed.load(shared)
    assert train(resumed, make_groups, weighted_loss, (2,)) == train(many, make_groups, weighted_loss, (2,))


def test_a_base_that_slept_is_the_same(model_folder, make_groups, weighted_loss):
    engine = create(model_folder)
    train(engine, make_groups, weighted_loss)
    before = engine.logprobs(make_groups())
    engine.sleep(2)
    engine.wake()
    assert all(np.array_equal(*pair) for pair in zip(engine.logprobs(make_groups()), before, strict=True))


SCRIPT = """
import sys, threading, torch
from offbeat_device import open_device
from offbeat_engine_torch._model import load_model, outline_model
from offbeat_engine_torch._frozen import base_in_bfloat16
torch.set_num_threads(1)
folder, rounds = sys.argv[1], sys.argv[2] == "bfloat16"
outline = outline_model(folder)
names = base_in_bfloat16(outline, rounds_vocabulary=True) if rounds else ()
device = open_device("cpu")
before = device.memory().allocated_bytes
device.reset_peak_memory()
model = load_model(folder, device=torch.device("cpu"), in_bfloat16=names)
held = sum(weight.nbytes for weight in model.parameters())
print(held, device.memory().peak_bytes - before)
"""


@pytest.mark.nightly
def test_loading_never_holds_the_base_in_float32(tmp_path):
    """Measured in processes of their own: 40 million weights, whose files of 80 MB count while they are mapped."""
    torch.manual_seed(0)
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 9, "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=4096, tie_word_embeddings=True, **shape))
    model.bfloat16().save_pretrained(tmp_path)
    found = {}
    for dtype in ("float32", "bfloat16"):
        command = [sys.executable, "-c", SCRIPT, str(tmp_path), dtype]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        found[dtype] = list(map(int, done.stdout.split()))
    (wide, most), (narrow, peak) = found["float32"], found["bfloat16"]
    assert narrow < 0.51 * wide
    assert peak < 1.2 * (narrow + narrow) < 0.9 * (narrow + wide) < most


def test_the_option_takes_the_formats_it_names():
    assert TorchEngineOptions.parse({}).lora_base_dtype == "auto"
    with pytest.raises(ConfigError, match="lora_base_dtype"):
        TorchEngineOptions.parse({"lora_base_dtype": "float16"})

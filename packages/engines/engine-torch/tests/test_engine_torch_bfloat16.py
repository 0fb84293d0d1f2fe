from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from offbeat_core import TrainEngineConfig
from offbeat_engine_torch import TorchTrainEngine
from offbeat_testing import tiny_model


def assert_near(exact, coarse, sequences):
    """Rounding moves these models by 0.003 nats on average, 0.014 at most; a layer left out by 0.4 on average."""
    errors = np.abs(np.concatenate(exact.logprobs(sequences)) - np.concatenate(coarse.logprobs(sequences)))
    assert errors.max() < 0.04
    assert errors.mean() < 0.006


def test_a_layer_left_out_is_no_rounding(model_folder, tmp_path, make_groups):
    short = AutoModelForCausalLM.from_pretrained(model_folder)
    for name, parameter in short.model.layers[-1].named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):  # what it adds to the residual stream is 0 then
            parameter.data.zero_()
    short.save_pretrained(tmp_path)
    settings = {"device": "cpu", "learning_rate": 1e-3}
    whole, shortened = (
        TorchTrainEngine.create(TrainEngineConfig(model_path=str(folder), **settings))
        for folder in (model_folder, tmp_path)
    )
    with pytest.raises(AssertionError):
        assert_near(whole, shortened, make_groups())


@pytest.mark.parametrize("head", ["float32", "bfloat16"])
def test_bfloat16_stays_near_float32_and_learns(model_folder, make_groups, head):
    settings = {"model_path": str(model_folder), "device": "cpu", "learning_rate": 1e-3}
    exact = TorchTrainEngine.create(TrainEngineConfig(**settings))
    coarse = TorchTrainEngine.create(TrainEngineConfig(**settings, dtype="bfloat16", options={"head_dtype": head}))
    sequences = make_groups()
    assert_near(exact, coarse, sequences)
    assert all(tensor.dtype.itemsize == 4 for _, tensor in coarse.weights())

    def nll(tokens):
        return -tokens.logprobs_N.sum() / tokens.total_tokens, {}

    losses = []
    for _ in range(6):
        losses.append(coarse.forward_backward(sequences, nll)["loss"].value)
        assert coarse.step()["steps_refused"].value == 0
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize(
    ("dtype", "wide_products", "head_dtype", "is_coarse"),
    [
        ("bfloat16", True, "auto", True),
        ("bfloat16", False, "auto", False),
        ("float32", True, "auto", False),
        ("bfloat16", True, "float32", False),
        ("bfloat16", False, "bfloat16", True),
    ],
)
def test_the_head_takes_factors_of_the_layers_format_where_its_sums_are_not_rounded(
    dtype, wide_products, head_dtype, is_coarse, model_folder, monkeypatch
):
    monkeypatch.setattr("offbeat_device._cpu.CpuDevice.wide_products", wide_products)
    settings = {"model_path": str(model_folder), "device": "cpu", "dtype": dtype}
    engine = TorchTrainEngine.create(TrainEngineConfig(**settings, options={"head_dtype": head_dtype}))
    assert engine._policy._head_is_coarse == is_coarse


class Conversions(TorchDispatchMode):
    """Counts copies of matrices of float32 in bfloat16, by shape."""

    def __init__(self):
        super().__init__()
        self.shapes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == torch.bfloat16:
            self.shapes[tuple(args[0].shape)] += 1
        return func(*args, **kwargs)


def test_each_weight_is_converted_once_for_all_micro_batches(model_folder, make_groups, weighted_loss):
    """And anew after each step: the loss moves."""
    settings = {"model_path": str(model_folder), "device": "cpu", "dtype": "bfloat16", "learning_rate": 1e-2}
    engine = TorchTrainEngine.create(TrainEngineConfig(**settings, max_tokens_per_microbatch=16))
    weights = [layer.weight for layer in engine._policy.model.backbone.modules() if isinstance(layer, torch.nn.Linear)]
    wanted, losses = Counter(tuple(weight.shape) for weight in weights), []
    for _ in range(2):
        with Conversions() as conversions:
            metrics = engine.forward_backward(make_groups(), weighted_loss)
        assert metrics["num_microbatches"].value > 2
        assert {shape: conversions.shapes[shape] for shape in wanted} == wanted
        losses.append(metrics["loss"].value)
        engine.step()
    assert losses[1] < losses[0]
    with Conversions() as conversions:
        engine.logprobs(make_groups())
    assert {shape: conversions.shapes[shape] for shape in wanted} == wanted


def test_gradients_of_bfloat16_are_near_those_of_float32(model_folder, make_groups, weighted_loss):
    """Of each weight, in one micro-batch and in many, within 3 % of its gradient's norm."""

    def gradients(**settings):
        engine = TorchTrainEngine.create(TrainEngineConfig(model_path=str(model_folder), device="cpu", **settings))
        engine.forward_backward(make_groups(), weighted_loss)
        return {name: parameter.grad for name, parameter in engine._optimizer.parameters.items()}

    exact = gradients()
    for budget_tokens in (32, 8192):
        for name, found in gradients(dtype="bfloat16", max_tokens_per_microbatch=budget_tokens).items():
            assert found.dtype == torch.float32
            assert (found - exact[name]).norm() < 0.03 * exact[name].norm(), name


def test_experts_compute_in_bfloat16(tmp_path, make_groups, monkeypatch):
    """Products of experts too, which autocast leaves in float32; their gradients and weights are float32."""
    formats = set()
    product = torch.nn.functional.grouped_mm

    def watched(one, other, **settings):
        formats.update((one.dtype, other.dtype))
        return product(one, other, **settings)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", watched)
    folder = tiny_model(tmp_path / "moe", "qwen3_moe", hidden_size=32)
    settings = {"model_path": str(folder), "device": "cpu", "learning_rate": 1e-2}
    exact = TorchTrainEngine.create(TrainEngineConfig(**settings))
    coarse = TorchTrainEngine.create(TrainEngineConfig(**settings, dtype="bfloat16"))
    assert formats == {torch.float32}
    formats.clear()
    sequences = make_groups()
    assert_near(exact, coarse, sequences)
    formats.clear()
    before = {name: tensor.clone() for name, tensor in coarse.weights()}
    coarse.forward_backward(sequences, lambda tokens: (-tokens.logprobs_N.sum() / tokens.total_tokens, {}))
    assert formats == {torch.bfloat16}
    coarse.step()
    moved = {name: tensor.dtype for name, tensor in coarse.weights() if not torch.equal(tensor, before[name])}
    assert moved["model.layers.0.mlp.experts.gate_up_proj"] == torch.float32


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "ernie4_5_moe", "minimax_m2", "qwen3_moe"])
def test_routers_choose_as_those_of_transformers_in_bfloat16(family, tmp_path, make_groups):
    """Compare on equal activations: in float32 where the family does, else in bfloat16; weights as they travel."""
    sizes = {"hidden_size": 32, "vocab_size": 300, "intermediate_size": 64, "moe_intermediate_size": 16, "head_dim": 8}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "initializer_range": 0.2}
    sizes |= {"num_experts": 8, "num_local_experts": 8, "moe_num_experts": 8, "n_routed_experts": 8, "moe_k": 2}
    sizes |= {"num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 16}
    sizes |= {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "pad_token_id": 0}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    for name, tensor in model.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            tensor.normal_(std=0.1)
    model.save_pretrained(tmp_path)
    settings = TrainEngineConfig(model_path=str(tmp_path), device="cpu", dtype="bfloat16")
    engine, seen = TorchTrainEngine.create(settings), []
    theirs = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).named_modules())
    routers = [(name, each) for name, each in engine._policy.model.whole.named_modules() if name.endswith(".mlp.gate")]
    for name, router in routers:
        router.register_forward_hook(lambda _, given, found, name=name: seen.append((name, given, found)))
    engine.logprobs(make_groups())
    assert {name for name, *_ in seen} == {name for name, _ in routers} != set()
    in_float32 = family in ("glm4_moe", "deepseek_v3", "ernie4_5_moe")
    for name, (hidden_TE, *more), found in seen:
        assert hidden_TE.dtype == torch.float32
        wanted = theirs[name](hidden_TE if in_float32 else hidden_TE.bfloat16(), *more)
        assert found[0].dtype == wanted[0].dtype == (torch.float32 if in_float32 else torch.bfloat16)
        assert all(torch.equal(mine, other) for mine, other in zip(found, wanted, strict=True))


@pytest.mark.mesh(dp=2, compare=False)
def test_ranks_gather_bfloat16_and_keep_no_copy_of_a_layer(mesh, tmp_path, make_groups):
    """The backward pass gathers anew what it needs of the weights; those of the optimizer are float32."""
    if mesh.rank == 0:
        tiny_model(tmp_path / "moe", "qwen3_moe", hidden_size=32)
    mesh.group("dp").barrier()
    settings = TrainEngineConfig(model_path=str(tmp_path / "moe"), device="cpu", dtype="bfloat16")
    engine = TorchTrainEngine.create(settings, mesh)
    kept = []

    def keep(tensor):
        if tensor.ndim == 3 and len(tensor) == 4:  # weights of four experts: no activation has such a shape
            kept.append(tensor)
        return tensor

    def loss(tokens):
        assert [tensor.dtype for tensor in kept] == [torch.bfloat16] * 4  # two in each of two layers
        assert not any(tensor.untyped_storage().nbytes() for tensor in kept)
        return -tokens.logprobs_N.sum() / tokens.total_tokens, {}

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        engine.forward_backward(make_groups(), loss)
    # Added up over ranks in float32: a sum that was rounded to bfloat16 on its way would stay as it is here.
    for piece in engine._policy.pieces:
        grad = piece.parameter.grad
        part = grad.to_local() if grad is not None else torch.zeros(1)
        assert not part.any() or not torch.equal(part.bfloat16().float(), part), piece.name
    assert engine.step()["grad_norm"].value > 0
    assert {tensor.dtype for _, tensor in engine.weights()} == {torch.float32}

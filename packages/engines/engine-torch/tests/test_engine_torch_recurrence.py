"""Layers with the gated delta rule: a packed sequence computes what transformers computes of it alone."""

import inspect
import itertools

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.models.qwen3_5 import modeling_qwen3_5

from offbeat_core import ConfigError, TrainEngineConfig, TrainSequence
from offbeat_engine_torch import TorchTrainEngine
from offbeat_engine_torch._layers import recurrence
from offbeat_engine_torch._layers.plan import AttentionPlan
from offbeat_engine_torch._layout import check_context_parallel
from offbeat_testing import reference_logprobs, reference_model
from offbeat_training import Segment

SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
}
FAMILIES = {
    "qwen3_5_text": transformers.Qwen3_5TextConfig(**SMALL),
    "qwen3_5_moe_text": transformers.Qwen3_5MoeTextConfig(**SMALL, **EXPERTS),
    "qwen3_next": transformers.Qwen3NextConfig(**SMALL, **EXPERTS),
    "olmo_hybrid": transformers.OlmoHybridConfig(**SMALL),
}
LONG = {"prompt": (20, 90), "completion": (60, 90)}
"""Lengths, in tokens, of which many do not fit into one chunk of 64 of the rule."""


def write(family, folder):
    """Write a random model whose norms, biases and decays are random too."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family])
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn_like(tensor) * 0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write("qwen3_5_text", tmp_path_factory.mktemp("recurrence") / "qwen3_5_text")


@pytest.fixture(scope="module", params=FAMILIES)
def family_folder(request, tmp_path_factory):
    return write(request.param, tmp_path_factory.mktemp("recurrence") / request.param)


def create(folder, mesh=None, **changes):
    settings = {"learning_rate": 1e-3, "adam_eps": 1e-5, "max_tokens_per_microbatch": 400, "device": "cpu"}
    return TorchTrainEngine.create(TrainEngineConfig(model_path=str(folder), **settings | changes), mesh)


def gradients(engine, sequences, loss):
    value = engine.forward_backward(sequences, loss)["loss"].value
    return value, {name: parameter.grad for name, parameter in engine._optimizer.parameters.items()}


def assert_same_gradients(found, wanted):
    """Equal up to the rounding of float32, 1.5e-4 of the largest number of a short vector where it was measured."""
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    assert found[1].keys() == wanted[1].keys()
    for name, grad in wanted[1].items():
        assert (found[1][name] - grad).abs().max() <= 5e-4 * grad.abs().max(), name


def test_the_plan_says_whether_kernels_compute_the_rule(folder, monkeypatch, tmp_path):
    """They are installed and the layers compute in bfloat16; the plan does not import them."""

    def is_fused(dtype):
        return TorchTrainEngine.plan(TrainEngineConfig(model_path=str(folder), device="cpu", dtype=dtype))

    assert not is_fused("bfloat16").fuses_recurrence
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path)
    assert is_fused("bfloat16").fuses_recurrence
    assert not is_fused("float32").fuses_recurrence


def gradients_alone(folder, sequences):
    """Loss and gradients by transformers, a sequence at a time."""
    model = reference_model(folder)
    total, loss = sum(int(each.loss_mask.sum()) for each in sequences), torch.zeros(())
    for each in sequences:
        ids, mask = torch.from_numpy(each.ids.astype(np.int64)), torch.from_numpy(each.loss_mask[1:])
        logp = torch.log_softmax(model(ids[None], use_cache=False).logits[0, :-1], -1)
        advantage = torch.from_numpy(each.extras["advantage"][1:])[mask]
        loss = loss - (logp.gather(1, ids[1:, None])[:, 0][mask] * advantage).sum() / total
    loss.backward()
    return float(loss.detach()), {name: each.grad for name, each in model.named_parameters()}


@pytest.mark.parametrize("share", [True, False], ids=["shared", "unshared"])
def test_packed_sequences_compute_what_transformers_computes_of_each(family_folder, make_groups, share):
    engine, sequences = create(family_folder, options={"share_prompts": share}), make_groups(**LONG)
    model = reference_model(family_folder)
    for each, found in zip(sequences, engine.logprobs(sequences), strict=True):
        wanted = reference_logprobs(model, each.ids) * each.loss_mask
        np.testing.assert_allclose(found, wanted, atol=1e-4)


@pytest.mark.parametrize("share", [True, False], ids=["shared", "unshared"])
def test_gradients_are_those_of_single_sequences(family_folder, make_groups, weighted_loss, share):
    engine, sequences = create(family_folder, options={"share_prompts": share}), make_groups(**LONG)
    assert_same_gradients(gradients(engine, sequences, weighted_loss), gradients_alone(family_folder, sequences))


def test_what_comes_before_a_sequence_in_its_pack_changes_nothing(folder):
    """Neither a state nor the window of the convolution is handed on."""
    rng, engine = np.random.default_rng(0), create(folder)

    def sequence(*parts):
        ids = np.concatenate(parts).astype(np.int32)
        return TrainSequence(ids=ids, loss_mask=np.arange(len(ids)) >= 1)

    last = sequence(rng.integers(3, 300, 30))
    found = [engine.logprobs([sequence(rng.integers(3, 300, 40)), last])[1] for _ in range(2)]
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)
    np.testing.assert_allclose(found[0], engine.logprobs([last])[0], atol=1e-6)


def test_layers_that_are_computed_again_have_the_same_gradients(folder, make_groups, weighted_loss):
    sequences = make_groups(**LONG)
    kept, again = (
        gradients(create(folder, activation_checkpointing=each), sequences, weighted_loss) for each in (False, True)
    )
    assert_same_gradients(again, kept)


def test_the_rule_is_in_float32_in_a_model_of_bfloat16(folder, make_groups):
    """As in transformers' model of bfloat16; autocast would round its products."""
    engine, sequences, seen = create(folder, dtype="bfloat16"), make_groups(), []

    class Formats(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.bmm.default and len(args[0]) > 4:  # products of chunks, by row and head
                seen.append(args[0].dtype)
            return func(*args, **(kwargs or {}))

    with Formats():
        found = engine.logprobs(sequences)
    assert set(seen) == {torch.float32}
    for near, exact in zip(found, create(folder).logprobs(sequences), strict=True):
        np.testing.assert_allclose(near, exact, atol=0.3)


@pytest.fixture
def as_on_an_accelerator(monkeypatch):
    """Put torch functions with the documented arguments of both packages' kernels in the kernels' place.

    Source: fla-core 0.6.0, fla/ops/gated_delta_rule/chunk.py; causal-conv1d, causal_conv1d_interface.py.
    """
    reference = inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)
    convolution = inspect.unwrap(modeling_qwen3_5.causal_conv1d_fn)
    calls = []

    def rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=False, cu_seqlens=None):
        assert len(q) == 1
        calls.append("rule")
        parts = [
            reference(*(each[:, begin:end] for each in (q, k, v, g, beta)), use_qk_l2norm_in_kernel=True)[0]
            for begin, end in itertools.pairwise(cu_seqlens.tolist())
        ]
        return torch.cat(parts, 1), None

    def convolve(x, weight, bias=None, seq_idx=None, activation=None):
        assert x.stride(1) == 1, "seq_idx is for channels last alone"
        assert seq_idx.dtype == torch.int32
        calls.append("convolution")
        lengths = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
        return torch.cat([convolution(each, weight, bias, activation) for each in x.split(lengths, 2)], 2)

    monkeypatch.setattr(recurrence, "_suits_kernels", lambda x: True)
    monkeypatch.setattr(recurrence, "fused_rule", lambda: rule)
    monkeypatch.setattr(recurrence, "fused_convolution", lambda: convolve)
    return calls


@pytest.mark.parametrize("share", [True, False], ids=["shared", "unshared"])
def test_kernels_for_accelerators_are_given_sequences_apart(
    folder, make_groups, weighted_loss, share, as_on_an_accelerator
):
    engine, sequences = create(folder, options={"share_prompts": share}), make_groups(**LONG)
    found = gradients(engine, sequences, weighted_loss)
    assert set(as_on_an_accelerator) == {"rule", "convolution"}
    assert_same_gradients(found, gradients_alone(folder, sequences))


def rule_in_float64(query_THD, key_THD, value_TVD, g_TV, beta_TV):
    """[T, V, D] of one sequence, token after token: arXiv:2412.06464, equation 10; H key heads, V value heads."""
    times = value_TVD.shape[1] // key_THD.shape[1]
    state_VDD, found = 0.0, []
    for query_HD, key_HD, *rest in zip(query_THD, key_THD, value_TVD, g_TV, beta_TV, strict=True):
        query_VD, key_VD = (each.double().repeat_interleave(times, 0) for each in (query_HD, key_HD))
        value_VD, g_V, beta_V = (each.double() for each in rest)
        state_VDD = g_V.exp()[:, None, None] * state_VDD
        missing_VD = value_VD - (state_VDD * key_VD[..., None]).sum(1)
        state_VDD = state_VDD + key_VD[..., None] * (beta_V[:, None] * missing_VD)[:, None]
        found.append((state_VDD * query_VD[..., None]).sum(1) / query_VD.shape[-1] ** 0.5)
    return torch.stack(found)


@pytest.mark.parametrize("kernels", [False, True])
def test_a_key_head_serves_a_run_of_value_heads(kernels, request):
    """transformers 5.24 gives the rule fewer key heads than value heads; 5.19 has repeated them before."""
    if kernels:
        request.getfixturevalue("as_on_an_accelerator")
    torch.manual_seed(0)
    query, key = torch.nn.functional.normalize(torch.randn(2, 75, 2, 8), dim=-1)
    given = (query, key, torch.randn(75, 4, 8), -torch.rand(75, 4), torch.rand(75, 4))
    plan = AttentionPlan((Segment(start=0, length=5), Segment(start=5, length=70)), torch.device("cpu"))
    rule = recurrence._packed_rule(inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule))
    found = rule(*(each[None] for each in given), plan=plan)[0][0]
    wanted = torch.cat([rule_in_float64(*(each[run] for each in given)) for run in (slice(5), slice(5, 75))])
    torch.testing.assert_close(found, wanted.float(), atol=1e-5, rtol=1e-4)


def test_adapters_are_on_all_linear_layers_and_merged(folder, make_groups, weighted_loss, tmp_path, caplog):
    engine, sequences = create(folder, lora_rank=4), make_groups()
    assert "fused experts" not in caplog.text  # a convolution has as many dimensions
    engine.forward_backward(sequences, weighted_loss)
    engine.step()
    engine.save(tmp_path / "saved")
    adapted = {name.rpartition(".lora_")[0] for name in load_file(tmp_path / "saved/adapter/adapter_model.safetensors")}
    for part in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"):
        assert any(name.endswith(f"layers.0.linear_attn.{part}") for name in adapted), part
    found = engine.logprobs(sequences)
    for each, wanted in zip(found, create(tmp_path / "saved").logprobs(sequences), strict=True):
        np.testing.assert_allclose(each, wanted, atol=1e-5)


def test_weights_and_checkpoints_have_the_names_of_the_files(family_folder, make_groups, weighted_loss, tmp_path):
    engine = create(family_folder)
    engine.forward_backward(make_groups(), weighted_loss)
    engine.step()
    engine.save(tmp_path / "saved")
    files = [{name: each.shape for name, each in _read(each).items()} for each in (family_folder, tmp_path / "saved")]
    assert files[0] == files[1]
    resumed = create(family_folder)
    resumed.load(tmp_path / "saved")
    for each in (engine, resumed):
        each.forward_backward(make_groups(seed=1), weighted_loss)
        each.step()
    for (name, found), (_, wanted) in zip(resumed.weights(), engine.weights(), strict=True):
        assert torch.equal(found, wanted), name


def _read(folder):
    return {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}


CHANGES = {
    "all": {},
    "lora": {"lora_rank": 4, "activation_checkpointing": True},
    "bfloat16": {"dtype": "bfloat16"},
    "lora in bfloat16": {"dtype": "bfloat16", "lora_rank": 4},
}


def assert_trains_as_one_process(folder, mesh, make_groups, weighted_loss, **changes):
    engines = [create(folder, each, **changes) for each in (None, mesh)]
    tolerance = 3e-2 if "dtype" in changes else 1e-5
    for seed in range(2):
        sequences = make_groups(seed=seed)
        reported = [each.forward_backward(sequences, weighted_loss)["loss"].value for each in engines]
        assert reported[1] == pytest.approx(reported[0], rel=tolerance, abs=tolerance)
        norms = [each.step()["grad_norm"].value for each in engines]
        assert norms[1] == pytest.approx(norms[0], rel=tolerance, abs=tolerance)
    for (name, found), (_, wanted) in zip(*(each.weights() for each in reversed(engines)), strict=True):
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"cp": 2}], ids=["dp2", "cp2"], indirect=True)
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_two_ranks_train_as_one_process(folder, mesh, make_groups, weighted_loss, changes):
    assert_trains_as_one_process(folder, mesh, make_groups, weighted_loss, **changes)


@pytest.mark.mesh(cp=2)
def test_ranks_share_the_tokens_of_every_family(family_folder, mesh, make_groups, weighted_loss):
    """Sequences begin and end in the middle of a rank's tokens; the pack does not divide either."""
    assert_trains_as_one_process(family_folder, mesh, make_groups, weighted_loss)


@pytest.mark.mesh(dp=2, cp=2)
@pytest.mark.nightly
def test_ranks_share_tokens_beside_data(folder, mesh, make_groups, weighted_loss):
    assert_trains_as_one_process(folder, mesh, make_groups, weighted_loss)


@pytest.mark.mesh(cp=2, compare=False)
def test_kernels_get_all_tokens_of_a_share_of_the_heads(folder, mesh, make_groups, weighted_loss, as_on_an_accelerator):
    assert_trains_as_one_process(folder, mesh, make_groups, weighted_loss)
    assert set(as_on_an_accelerator) == {"rule", "convolution"}


def test_heads_that_ranks_cannot_share_are_refused(folder):
    with pytest.raises(ConfigError, match=r"cp = 3.*linear_num_value_heads \(4\) must be a multiple of cp"):
        check_context_parallel(reference_model(folder).config, 3)


@pytest.mark.mesh(tp=2, compare=False)
def test_tensor_parallel_is_refused(folder, mesh):
    with pytest.raises(ConfigError, match=r"colwise_gather_output.*set tp to 1"):
        create(folder, mesh)


def test_compiled_layers_are_refused(folder, monkeypatch):
    monkeypatch.setattr("offbeat_device._cpu.CpuDevice.packed_attention", "varlen")
    with pytest.raises(ConfigError, match=r"compile_layers is on.*gated delta rule"):
        create(folder, dtype="bfloat16", options={"compile_layers": "on"})


def test_packages_that_are_missing_on_an_accelerator_are_named(folder):
    whole = create(folder)._policy.model.whole
    assert not recurrence.missing_kernels(whole, "bfloat16")
    whole.to("meta")
    assert not recurrence.missing_kernels(whole, "float32")
    assert recurrence.missing_kernels(whole, "bfloat16") == "flash-linear-attention and causal-conv1d"

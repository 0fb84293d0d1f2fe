"""Decoder layers compiled by torch.compile compute what the layers compute as they are written."""

import shutil
from functools import wraps

import numpy as np
import pytest
import torch
import varlen_on_cpu  # noqa: F401  adds the kernels
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.varlen import varlen_attn

from offbeat_core import ConfigError, TrainEngineConfig
from offbeat_engine_torch import TorchTrainEngine
from offbeat_testing import tiny_model
from offbeat_training import _logprobs


@pytest.fixture
def as_a_gpu(monkeypatch, tmp_path):
    """Attend to packs by one call, as on a GPU."""
    torch._dynamo.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setattr("offbeat_device._cpu.CpuDevice.packed_attention", "varlen")
    _logprobs._fused.cache_clear()
    yield
    _logprobs._fused.cache_clear()


def create(folder, compile_layers, **settings):
    options = {"compile_layers": compile_layers, **settings.pop("options", {})}
    settings = {"dtype": "bfloat16", "learning_rate": 1e-3, "device": "cpu", **settings}
    return TorchTrainEngine.create(TrainEngineConfig(model_path=str(folder), options=options, **settings))


@pytest.fixture
def count_graphs(monkeypatch):
    """Trace with torch's tracer and autograd, count graphs of layers, and run them without generating code."""
    counter, compile_ = CompileCounterWithBackend("aot_eager"), torch.compile

    def trace(function, *, options, **how):
        return compile_(function, backend=counter if function.__name__ == "forward" else "aot_eager", **how)

    monkeypatch.setattr(torch, "compile", trace)
    return counter


def train(engine, batches, loss):
    """Return losses, gradient norms and log-probabilities of steps over batches of different lengths."""
    seen = []
    for sequences in batches:
        seen.append(engine.forward_backward(sequences, loss)["loss"].value)
        seen.append(engine.step()["grad_norm"].value)
        seen.extend(np.concatenate(engine.logprobs(sequences)))
    return np.array(seen)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        pytest.param("qwen3", {}, marks=pytest.mark.nightly),
        pytest.param("mistral", {}, marks=pytest.mark.nightly),  # with a sliding window
        ("llama", {"activation_checkpointing": True}),
        ("qwen3", {"lora_rank": 4}),
    ],
    ids=str,
)
def test_one_graph_of_a_layer_serves_all_layers_and_lengths(
    family, settings, as_a_gpu, count_graphs, tmp_path, make_groups, weighted_loss
):
    folder = tiny_model(tmp_path / family, family, hidden_size=32, num_layers=3)
    batches = [make_groups(seed=seed, prompt=(2, 14 + 9 * seed)) for seed in range(5)]
    batches += [[batch[0]] for batch in batches]  # without a prompt that is shared
    found, first = train(create(folder, "on", **settings), batches, weighted_loss), count_graphs.frame_count
    wanted = train(create(folder, "off", **settings), batches, weighted_loss)
    assert np.abs(found - wanted).max() < 0.02 * max(1, np.abs(wanted).max())
    assert first == 4, "with and without gradients, with and without shared prompts"


@pytest.mark.nightly
@pytest.mark.mesh(dp=2, deadline_s=120)  # each rank traces the layer
def test_layers_that_are_gathered_from_ranks_are_compiled(
    mesh, as_a_gpu, count_graphs, tmp_path, make_groups, weighted_loss
):
    folder = tiny_model(tmp_path / "qwen3", "qwen3", hidden_size=32, num_layers=1)
    config = TrainEngineConfig(model_path=str(folder), dtype="bfloat16", device="cpu", options={"compile_layers": "on"})
    engine, plain, sequences = TorchTrainEngine.create(config, mesh), create(folder, "off"), make_groups()
    found, wanted = (each.forward_backward(sequences, weighted_loss)["loss"].value for each in (engine, plain))
    assert 0 < count_graphs.frame_count <= 4
    assert abs(found - wanted) < 0.03
    assert abs(engine.step()["grad_norm"].value / plain.step()["grad_norm"].value - 1) < 0.03


@pytest.mark.nightly
@pytest.mark.skipif(not shutil.which("c++"), reason="torch.compile needs a C++ compiler")
def test_generated_code_computes_what_the_layers_compute_in_few_kernels(
    as_a_gpu, model_folder, tmp_path, make_groups, weighted_loss, monkeypatch
):
    """As they are written, a layer of Qwen3 takes 53 kernels forward and 96 backward, beside its products."""
    most = 0

    def count(nodes):
        nonlocal most
        others = ("ExternKernelSchedulerNode", "NopKernelSchedulerNode")  # products and attention; nothing at all
        most = max(most, sum(type(node).__name__ not in others for node in nodes))
        return nodes

    monkeypatch.setattr("torch._inductor.config._post_fusion_custom_pass", count)
    batches = [make_groups(seed=seed, prompt=(2, 14 + 9 * seed)) for seed in range(3)]
    found = train(create(model_folder, "on"), batches, weighted_loss)
    wanted = train(create(model_folder, "off"), batches, weighted_loss)
    assert np.abs(found - wanted).max() < 0.02 * max(1, np.abs(wanted).max())
    assert 10 < most <= 20, "forward or backward, conversions of 7 weights or of their gradients included"


def test_layers_that_cannot_be_traced_run_as_they_are(as_a_gpu, count_graphs, model_folder, caplog, monkeypatch):
    @wraps(varlen_attn)
    def looks_at_values(*args, **kwargs):
        print(float(args[0].sum()))
        return varlen_attn(*args, **kwargs)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", looks_at_values)
    engine = create(model_folder, "auto")
    assert "the decoder layers run uncompiled, which is slower: Unsupported" in caplog.text
    assert all(piece.parameter.grad is None for piece in engine._policy.pieces)
    with pytest.raises(ConfigError, match="compile_layers is on, and the decoder layers do not compile: Unsupported"):
        create(model_folder, "on")


def test_passes_over_logits_that_do_not_compile_are_found_when_the_engine_is_made(
    as_a_gpu, model_folder, make_groups, weighted_loss, caplog, monkeypatch
):
    """And not in the first update."""

    def compile_layers_alone(function, **how):
        def fails(*args, **kwargs):
            raise RuntimeError("no kernel for it")

        return function if function.__name__ == "forward" else fails

    monkeypatch.setattr(torch, "compile", compile_layers_alone)
    found = train(create(model_folder, "auto"), [make_groups()], weighted_loss)
    assert "run uncompiled, which is slower: RuntimeError: no kernel for it" in caplog.text
    assert np.array_equal(found, train(create(model_folder, "off"), [make_groups()], weighted_loss))


def test_layers_that_compute_something_else_when_compiled_run_as_they_are(
    as_a_gpu, monkeypatch, model_folder, make_groups, weighted_loss, caplog
):
    def compile_wrongly(function, **how):
        return (lambda x, *args, **kwargs: 3 * x) if function.__name__ == "forward" else function

    monkeypatch.setattr(torch, "compile", compile_wrongly)
    found = train(create(model_folder, "auto"), [make_groups()], weighted_loss)
    assert "other log-probabilities" in caplog.text
    assert np.array_equal(found, train(create(model_folder, "off"), [make_groups()], weighted_loss))


@pytest.mark.parametrize(
    ("changes", "lacks", "reason"),
    [
        ({"dtype": "float32"}, "", "dtype = float32"),
        ({}, "triton is not installed", "triton is not installed"),
    ],
)
def test_what_forbids_compiled_layers_is_named_where_they_are_asked_for(
    changes, lacks, reason, as_a_gpu, model_folder, monkeypatch, caplog
):
    monkeypatch.setattr("offbeat_device._cpu.CpuDevice.compiler_lacks", lambda self: lacks)
    with pytest.raises(ConfigError, match=f"compile_layers is on, and decoder layers cannot be compiled: {reason}"):
        create(model_folder, "on", **changes)
    create(model_folder, "auto", **changes)
    assert ("which is slower" in caplog.text) == bool(lacks)


def test_processors_do_not_compile(model_folder):
    with pytest.raises(ConfigError, match="attends to packs by 'split'"):
        create(model_folder, "on")

"""Decoder layers compiled by torch.compile compute what the layers compute as they are written."""

import shutil
from dataclasses import replace
from functools import wraps

import numpy as np
import pytest
import torch
import varlen_on_cpu  # noqa: F401  adds the kernels
from gpt_oss_folders import write_model
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.varlen import varlen_attn

from offbeat_core import ConfigError, Routes, TrainEngineConfig
from offbeat_engine_torch import TorchTrainEngine
from offbeat_testing import tiny_model
from offbeat_training import _logprobs

TRACED_S = 110
"""Deadline of a test whose ranks trace layers, in seconds: it takes 10 to 30 on two cores, by what else runs."""


@pytest.fixture
def as_a_gpu(monkeypatch, tmp_path):
    """Attend to packs by one call, as on a GPU."""
    # torch starts threads for devices in its first backward pass. In a compiled one its builds for CUDA take 8 devices
    # for granted where there is none, and ranks that are forked later could not run backward passes.
    torch.ones(1, requires_grad=True).sum().backward()
    torch._dynamo.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setattr("offbeat_device._cpu.CpuDevice.packed_attention", "varlen")
    _logprobs._fused.cache_clear()
    yield
    _logprobs._fused.cache_clear()


def create(folder, compile_layers, mesh=None, **settings):
    options = {"compile_layers": compile_layers, **settings.pop("options", {})}
    settings = {"dtype": "bfloat16", "learning_rate": 1e-3, "device": "cpu", **settings}
    return TorchTrainEngine.create(TrainEngineConfig(model_path=str(folder), options=options, **settings), mesh)


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
def test_layers_with_sinks_and_experts_are_compiled_for_each_kind_of_window(
    as_a_gpu, count_graphs, tmp_path, make_groups, weighted_loss
):
    folder = write_model(tmp_path)
    batches = [make_groups(seed=seed, prompt=(2, 14 + 9 * seed)) for seed in range(3)]
    batches.append([batches[0][0]])  # without a prompt that is shared
    found, num_graphs = train(create(folder, "on"), batches, weighted_loss), count_graphs.frame_count
    wanted = train(create(folder, "off"), batches, weighted_loss)
    assert np.abs(found - wanted).max() < 0.02 * max(1, np.abs(wanted).max())
    assert num_graphs == 8, "twice what layers of one kind have"


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_layers_of_experts_share_their_graphs_however_many_there_are(
    family, as_a_gpu, count_graphs, tmp_path, make_groups, weighted_loss
):
    count_graphs.backend, num_kinds = "eager", 1 + (family == "gpt_oss")
    batches = [make_groups(seed=seed, prompt=(2, 14 + 9 * seed)) for seed in range(2)]
    batches.append([batches[0][0]])  # without a prompt that is shared
    for num_layers in (2, 4):
        folder = write_layers(tmp_path / str(num_layers), family, num_layers)
        torch._dynamo.reset()
        count_graphs.clear()
        engine = create(folder, "on")
        assert count_graphs.frame_count == 2 * num_kinds, "with and without gradients"
        train(engine, batches, weighted_loss)
        assert count_graphs.frame_count == 4 * num_kinds, "with and without shared prompts too"
        train(engine, [with_routes(batches[1], num_layers)], weighted_loss)
        assert count_graphs.frame_count == 6 * num_kinds, "and with routes"


def write_layers(folder, family, num_layers):
    """Write a model of experts whose windows, if it has any, are in every other layer."""
    if family == "gpt_oss":
        kinds = ["sliding_attention", "full_attention"] * (num_layers // 2)
        return write_model(folder, num_hidden_layers=num_layers, layer_types=kinds)
    return tiny_model(folder, family, hidden_size=32, num_layers=num_layers)


def with_routes(sequences, num_layers):
    """Give sequences two experts of four for each token and layer, at random."""
    rng = np.random.default_rng(0)
    drawn = [rng.permuted(np.tile(np.arange(4), (len(each.ids), num_layers, 1)), axis=-1) for each in sequences]
    return [replace(a, routes=(Routes.pack(b[..., :2]),)) for a, b in zip(sequences, drawn, strict=True)]


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_layers_whose_routers_follow_routes_are_compiled(as_a_gpu, count_graphs, tmp_path, make_groups, weighted_loss):
    folder = tiny_model(tmp_path / "moe", "qwen3_moe", hidden_size=32, num_layers=2)
    batches = [make_groups(seed=seed, prompt=(2, 14 + 9 * seed)) for seed in range(2)]
    batches[0] = with_routes(batches[0], num_layers=2)
    found, num_graphs = train(create(folder, "on"), batches, weighted_loss), count_graphs.frame_count
    wanted = train(create(folder, "off"), batches, weighted_loss)
    assert np.abs(found - wanted).max() < 0.02 * max(1, np.abs(wanted).max())
    assert num_graphs <= 12, "with and without gradients, routes and shared prompts"


@pytest.mark.nightly
@pytest.mark.mesh(dp=2, deadline_s=TRACED_S)
def test_layers_that_are_gathered_from_ranks_are_compiled(
    mesh, as_a_gpu, count_graphs, tmp_path, make_groups, weighted_loss
):
    folder = tiny_model(tmp_path / "qwen3", "qwen3", hidden_size=32, num_layers=1)
    engine, plain, sequences = create(folder, "on", mesh), create(folder, "off"), make_groups()
    found, wanted = (each.forward_backward(sequences, weighted_loss)["loss"].value for each in (engine, plain))
    assert 0 < count_graphs.frame_count <= 4
    assert abs(found - wanted) < 0.03
    assert abs(engine.step()["grad_norm"].value / plain.step()["grad_norm"].value - 1) < 0.03


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"activation_checkpointing": True}, marks=pytest.mark.mesh(tp=2, deadline_s=TRACED_S)),
        pytest.param({"lora_rank": 4}, marks=[pytest.mark.mesh(tp=2, deadline_s=TRACED_S), pytest.mark.nightly]),
        pytest.param({}, marks=[pytest.mark.mesh(dp=2, tp=2, deadline_s=TRACED_S), pytest.mark.nightly]),
        pytest.param({}, marks=[pytest.mark.mesh(cp=2, deadline_s=TRACED_S), pytest.mark.nightly]),
    ],
    ids=["tp-checkpointing", "tp-lora", "dp-tp", "cp"],
)
def test_one_graph_of_a_layer_that_ranks_share_serves_all_layers_and_lengths(
    settings, mesh, as_a_gpu, count_graphs, tmp_path, make_groups, weighted_loss
):
    folder = tiny_model(tmp_path / "qwen3", "qwen3", hidden_size=32, num_layers=2)
    batches = [make_groups(seed=seed, prompt=(2, 14 + 9 * seed)) for seed in range(3)]
    batches.append([batches[0][0]])  # without a prompt that is shared
    found, num_graphs = train(create(folder, "on", mesh, **settings), batches, weighted_loss), count_graphs.frame_count
    wanted = train(create(folder, "off", mesh, **settings), batches, weighted_loss)
    one = train(create(folder, "off", **settings), batches, weighted_loss)
    assert np.abs(found - wanted).max() < 0.02 * max(1, np.abs(wanted).max())
    assert np.abs(found - one).max() < 0.02 * max(1, np.abs(one).max())
    assert num_graphs == 4, "with and without gradients, with and without shared prompts"


@wraps(varlen_attn)
def looks_at_values(*args, **kwargs):
    print(float(args[0].sum()))
    return varlen_attn(*args, **kwargs)


def fail_in_tracer(monkeypatch, counter):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", looks_at_values)


def fail_in_backward_pass(monkeypatch, counter):
    """Compile forward passes alone."""

    def fails(graph, inputs):
        raise RuntimeError("no backward pass")

    counter.backend = aot_autograd(fw_compiler=lambda graph, inputs: graph, bw_compiler=fails)


@pytest.mark.mesh(tp=2, deadline_s=TRACED_S)
@pytest.mark.parametrize("fail", [fail_in_tracer, fail_in_backward_pass])
def test_layers_that_one_rank_cannot_compile_run_as_they_are_on_all(
    fail, mesh, as_a_gpu, count_graphs, tmp_path, make_groups, weighted_loss, caplog, monkeypatch
):
    """No rank waits for a sum that this one does not come to."""
    folder = tiny_model(tmp_path / "qwen3", "qwen3", hidden_size=32, num_layers=2)
    if mesh.rank == 1:
        fail(monkeypatch, count_graphs)
    found = create(folder, "auto", mesh, activation_checkpointing=True)
    wanted = create(folder, "off", mesh, activation_checkpointing=True)
    assert count_graphs.frame_count > 0 or mesh.rank == 1, "the other rank compiles"
    assert ("run uncompiled, which is slower: " in caplog.text) == (mesh.rank == 0)
    assert np.array_equal(*(train(each, [make_groups()], weighted_loss) for each in (found, wanted)))


@pytest.mark.mesh(tp=2)
def test_no_rank_compiles_where_one_has_no_compiler(mesh, as_a_gpu, count_graphs, model_folder, caplog, monkeypatch):
    if mesh.rank == 1:
        monkeypatch.setattr("offbeat_device._cpu.CpuDevice.compiler_lacks", lambda self: "triton is not installed")
    create(model_folder, "auto", mesh)
    assert ("which is slower: triton is not installed" in caplog.text) == (mesh.rank == 0)
    assert not count_graphs.frame_count


NEEDS_COMPILER = pytest.mark.skipif(not shutil.which("c++"), reason="torch.compile needs a C++ compiler")


@pytest.fixture
def num_kernels():
    """Numbers of kernels of each graph that code is generated for, beside products and attention."""
    numbers = []

    def count(nodes):
        others = ("ExternKernelSchedulerNode", "NopKernelSchedulerNode")  # products, attention, sums; nothing at all
        numbers.append(sum(type(node).__name__ not in others for node in nodes))
        return nodes

    with torch._inductor.config.patch(_post_fusion_custom_pass=count):  # monkeypatch would delete it at the end
        yield numbers


@pytest.mark.nightly
@NEEDS_COMPILER
def test_generated_code_computes_what_the_layers_compute_in_few_kernels(
    as_a_gpu, num_kernels, model_folder, make_groups, weighted_loss
):
    """As they are written, a layer of Qwen3 takes 53 kernels forward and 96 backward, beside its products."""
    batches = [make_groups(seed=seed, prompt=(2, 14 + 9 * seed)) for seed in range(3)]
    found = train(create(model_folder, "on"), batches, weighted_loss)
    wanted = train(create(model_folder, "off"), batches, weighted_loss)
    assert np.abs(found - wanted).max() < 0.02 * max(1, np.abs(wanted).max())
    assert 10 < max(num_kernels) <= 20, "forward or backward, conversions of 7 weights or of their gradients included"


@pytest.mark.nightly
@NEEDS_COMPILER
@pytest.mark.mesh(tp=2, deadline_s=TRACED_S)
def test_generated_code_of_layers_that_ranks_share_has_as_few_kernels(
    mesh, as_a_gpu, num_kernels, tmp_path, make_groups, weighted_loss
):
    folder = tiny_model(tmp_path / "qwen3", "qwen3", hidden_size=32, num_layers=1)
    found, wanted = (train(create(folder, each, mesh), [make_groups()], weighted_loss) for each in ("on", "off"))
    assert np.abs(found - wanted).max() < 0.02 * max(1, np.abs(wanted).max())
    assert 10 < max(num_kernels) <= 20


def test_layers_that_cannot_be_traced_run_as_they_are(as_a_gpu, count_graphs, model_folder, caplog, monkeypatch):
    fail_in_tracer(monkeypatch, count_graphs)
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

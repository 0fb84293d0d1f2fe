"""Compiled steps compute what the steps compute as they are written, in few kernels and few graphs."""

import asyncio
import re
import shutil
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from offbeat_core import ConfigError, GenerateRequest, SamplingParams
from offbeat_device import open_device
from offbeat_rollout_torch import _engine
from offbeat_rollout_torch._decoder import DecoderWeights
from offbeat_rollout_torch._families import Architecture, read_architecture, rotations
from offbeat_rollout_torch._loading import load_weights
from offbeat_rollout_torch._sampling import row_numbers, seed_states
from offbeat_rollout_torch._static_rows import compiled
from offbeat_rollout_torch._static_rows.cache import StaticCache
from offbeat_rollout_torch._static_rows.compiled import CompiledStep, choose_step
from offbeat_rollout_torch._static_rows.decoder import PlainStep, StaticDecoder, StepInputs, StepShape
from offbeat_rollout_torch._static_rows.length_attention import SPLITS, attend_by_length, attend_segments
from offbeat_rollout_torch._static_rows.prefill import PASS_SEGMENTS, PassShape
from offbeat_testing import tiny_model

NEEDS_COMPILER = pytest.mark.skipif(not shutil.which("c++"), reason="torch.compile needs a C++ compiler")
NO_KERNEL = ("ExternKernelSchedulerNode", "NopKernelSchedulerNode")
"""Nodes of torch's scheduler that are operators of torch, or nothing at all."""


def qwen3(num_layers):
    """Qwen3-0.6B, of so many layers."""
    return Architecture(
        family="qwen3",
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=num_layers,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        norm_eps=1e-6,
        tied=True,
        qk_norm=True,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        rope={"rope_type": "default", "rope_theta": 1e6},
        max_positions=4096,
    )


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Nothing is compiled yet."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    torch._dynamo.reset()
    compiled._fast.cache_clear()
    yield
    compiled._fast.cache_clear()


@pytest.fixture
def count_graphs(fresh, monkeypatch):
    """Trace with torch's tracer, count graphs, and run them without generating code."""
    counter, compile_ = CompileCounterWithBackend("aot_eager"), torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, options, **how: compile_(f, backend=counter, **how))
    return counter


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("m"))


EVERY_KIND = pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen3", torch.bfloat16),
        *(
            pytest.param(family, dtype, marks=pytest.mark.nightly)
            for family in ("qwen3", "qwen2", "llama")
            for dtype in (torch.float32, torch.bfloat16)
        ),
    ],
    ids=str,
)


def load(folder, dtype):
    weights = DecoderWeights(read_architecture(folder), dtype, torch.device("cpu"))
    load_weights(weights, folder)
    return weights


class RepeatingDevice:
    """The CPU as a device that records work: it does it again. Nothing may be compiled meanwhile."""

    def __init__(self, counter=None):
        self._cpu, self._counter, self.recorded = open_device("cpu"), counter, []

    def __getattr__(self, name):
        return getattr(self._cpu, name)

    def work_graphs(self):
        return self

    def record(self, work):
        before = self._counter and self._counter.frame_count
        work()  # twice in all, as a step is before it is recorded; a recording would not do it
        assert before == (self._counter and self._counter.frame_count), "compiled while work is recorded"
        self.recorded.append(work.args[0])
        return work


def requests():
    kinds = ({}, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 2.0})
    for i in range(12):
        ids = np.random.default_rng(i).integers(3, 300, (1, 5, 120, 150)[i % 4]).astype(np.int32)
        params = SamplingParams(seed=7 * i, max_tokens=10 + 4 * i, ignore_eos=True, **kinds[i % 4])
        yield GenerateRequest(request_id=str(i), prompt_ids=ids, num_samples=1 + i % 3, params=params)


async def together(engine):
    return [one for group in await asyncio.gather(*map(engine.generate, requests())) for one in group]


@EVERY_KIND
def test_a_compiled_step_gives_the_logits_of_the_plain_one(family, dtype, tmp_path, count_graphs):
    """One graph of each part for one row and one for any other number, whatever the layers and places."""
    weights = load(tiny_model(tmp_path / "m", family), dtype)
    with torch.inference_mode():
        step = choose_step("on", weights, open_device("cpu"))
        assert isinstance(step, CompiledStep)
        first = count_graphs.frame_count
        for num_rows in (1, 2, 5, 9, 31):
            wanted, found = (compiled._try_steps(each, weights, num_rows) for each in (PlainStep(), step))
            tolerance = 1e-4 if dtype == torch.float32 else 0.1
            torch.testing.assert_close(found.log_softmax(-1), wanted.log_softmax(-1), atol=tolerance, rtol=0)
    assert first == count_graphs.frame_count <= 12


@pytest.mark.asyncio
async def test_samples_are_those_of_plain_steps_and_nothing_is_compiled_after_the_start(
    folder, run, count_graphs, monkeypatch
):
    device = RepeatingDevice(count_graphs)
    monkeypatch.setattr(_engine, "open_device", lambda name: device)
    plain = await run(
        folder, together, max_running=24, max_model_len=256, dtype="float32", options={"compile_steps": "off"}
    )
    assert count_graphs.frame_count == 0
    found = await run(folder, together, max_running=24, max_model_len=256, dtype="float32")
    # Three of prompts.
    assert 0 < count_graphs.frame_count <= 16 + 3, "auto compiles where the device records work"
    num_passes = sum(isinstance(shape, PassShape) for shape in device.recorded)
    assert 0 < num_passes <= len(PASS_SEGMENTS), "prompts of other lengths are recorded again"
    assert 3 < len(device.recorded) - num_passes <= 2 * 7, "steps of other lengths are recorded again"
    num_differing = 0
    for one, other in zip(found, plain, strict=True):
        differs = np.flatnonzero(one.ids != other.ids)
        num_differing += bool(differs.size)
        alike = slice(0, differs[0] if differs.size else None)
        np.testing.assert_allclose(one.logprobs[alike], other.logprobs[alike], atol=1e-4)
    assert num_differing <= 2, "more than draws within rounding of a border between two tokens"


def draw_both(num_rows, vocabulary):
    numbers = torch.Generator().manual_seed(num_rows)
    logits = torch.randn(num_rows, vocabulary, generator=numbers) * torch.linspace(0.5, 6, num_rows)[:, None]
    kinds = [SamplingParams(temperature=(0.0, 0.3, 0.7, 1.0, 1.7)[row % 5]) for row in range(num_rows)]
    params = torch.tensor([row_numbers(each, vocabulary) for each in kinds]).t()
    states = torch.tensor(seed_states(range(num_rows)))
    columns = torch.stack((states * 0, states * 0 + 5, torch.arange(num_rows), states))
    with torch.inference_mode():
        for step in (PlainStep(), CompiledStep()):
            yield step.draw(logits.clone(), params, columns, 100, is_cut=False)


@NEEDS_COMPILER
@pytest.mark.parametrize("vocabulary", [5000, pytest.param(151936, marks=pytest.mark.nightly)])
def test_generated_code_draws_the_same_tokens(vocabulary, fresh):
    for num_rows in (600, 64) if vocabulary == 5000 else (64, 1):
        (wanted, wanted_logprobs), (found, logprobs) = draw_both(num_rows, vocabulary)
        assert torch.equal(found, wanted)
        torch.testing.assert_close(logprobs, wanted_logprobs, atol=1e-5, rtol=0)


@pytest.mark.nightly
@pytest.mark.timeout(400)
@NEEDS_COMPILER
@EVERY_KIND
def test_generated_code_gives_the_logits_of_the_plain_step(family, dtype, tmp_path, fresh):
    weights = load(tiny_model(tmp_path / "m", family), dtype)
    with torch.inference_mode():
        step = choose_step("on", weights, open_device("cpu"))
        for num_rows in (1, 2, 5, 31):
            wanted, found = (compiled._try_steps(each, weights, num_rows) for each in (PlainStep(), step))
            tolerance = 1e-4 if dtype == torch.float32 else 0.1
            torch.testing.assert_close(found.log_softmax(-1), wanted.log_softmax(-1), atol=tolerance, rtol=0)


class ScheduledError(Exception):
    """Raised before code is generated."""


@pytest.fixture
def count_kernels(fresh):
    """Count the kernels of a function as torch's scheduler for GPUs joins them; it needs none before it writes code."""

    def schedule(nodes):
        found.extend(type(node).__name__ for node in nodes if type(node).__name__ not in NO_KERNEL)
        raise ScheduledError

    def count(function, *args, **kwargs):
        found.clear()
        with pytest.raises(Exception, match="ScheduledError"):
            compiled._fast(function)(*args, **kwargs)
        assert found
        return len(found)

    found: list[str] = []
    with torch._inductor.config.patch(_post_fusion_custom_pass=schedule, cpu_backend="triton"):
        yield count


@pytest.mark.parametrize("num_rows", [1, 5])
def test_a_compiled_layer_is_five_kernels_beside_products_and_attention(num_rows, count_kernels):
    a, fixed = qwen3(1), compiled._fixed
    half = {"dtype": torch.bfloat16}
    x, norm = fixed(torch.ones(num_rows, a.hidden_size, **half)), fixed(torch.ones(a.hidden_size, **half), 0)
    qkv = fixed(torch.ones(num_rows, (a.num_heads + 2 * a.num_kv_heads) * a.head_dim, **half))
    qk_norm = fixed(torch.ones(a.num_heads + a.num_kv_heads, a.head_dim, **half), 0, 1)
    kv = fixed(torch.zeros(2, 7, a.num_kv_heads, 96, a.head_dim, **half), 0, 2, 4)
    turns, places = torch.ones(num_rows, 2, a.head_dim), torch.arange(num_rows)
    both = fixed(torch.ones(num_rows, 2 * a.intermediate_size, **half))
    with torch.inference_mode():
        norms = count_kernels(compiled.add_norm, x, x.clone(), norm, a.norm_eps, torch.bfloat16)
        heads = count_kernels(compiled.store_heads, qkv, qk_norm, turns, kv, places, None, a.norm_eps, True)
        of_prompts = count_kernels(compiled.store_heads, qkv, qk_norm, turns, kv, places, places, a.norm_eps, True)
        activation = count_kernels(compiled.swiglu, both)
    assert 2 * norms + heads + activation <= 5
    assert of_prompts == heads


@pytest.mark.parametrize("num_rows", [1, 5])
def test_compiled_draws_are_twelve_kernels(num_rows, count_kernels):
    logits = compiled._fixed(torch.ones(num_rows, qwen3(1).vocab_size))
    columns = torch.ones(4, num_rows, dtype=torch.int64)
    with torch.inference_mode():
        drawing = count_kernels(compiled.draw_next, logits, torch.ones(6, num_rows), columns, 4000, is_cut=False)
    assert drawing <= 12


class CountedOperators(TorchDispatchMode):
    """Count operators that make or write a tensor, and compiled parts as one each; views of memory are none."""

    supports_higher_order_operators = True
    VIEWS = re.compile(
        r"aten\.(view|_unsafe_view|t|transpose|permute|unsqueeze|expand|slice|select|split|detach|alias|as_strided|"
        r"unbind|empty|empty_like|new_empty|narrow|unflatten|view_as_complex|_reshape_alias|squeeze|chunk)\.|prim\."
    )
    EITHER = re.compile(r"aten\.(reshape|contiguous|to|_to_copy|flatten)\.")

    def __init__(self):
        super().__init__()
        self.counts, self._in_part = Counter(), False

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out, name = operator(*args, **(kwargs or {})), str(operator)
        is_view = self.VIEWS.match(name) or (
            self.EITHER.match(name) and out.untyped_storage()._cdata == args[0].untyped_storage()._cdata
        )
        if not self._in_part and not is_view:
            self.counts[name] += 1
        return out

    def as_one(self, part):
        def call(*args, **kwargs):
            self.counts[part.__name__] += 1
            self._in_part = True
            try:
                return part(*args, **kwargs)
            finally:
                self._in_part = False

        return call


def count_operators(step, num_layers, work_of, monkeypatch):
    """Return the operators of work of Qwen3-0.6B on tensors without memory, which refuse to be read."""
    a, device, operators = qwen3(num_layers), open_device("cpu"), CountedOperators()
    monkeypatch.setattr(compiled, "_fast", operators.as_one)
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        weights = DecoderWeights(a, torch.bfloat16, device.torch_device, pack=False)
        cache = StaticCache(a, 64, 512, 64 * 512, weights.final_norm)
        cache.add(10)
        cache.allocate()
        decoder = StaticDecoder(cache, device, 512, step, records=False)
        inputs = StepInputs(weights, rotations(a, 512), cache.block)
        with operators:
            work_of(decoder)(inputs)
    return operators.counts


@pytest.mark.parametrize("num_rows", [1, 64])
@pytest.mark.parametrize(
    ("step", "of_layer", "outside", "of_cut"),
    [(PlainStep(), 16, 85, 45), (CompiledStep(), 9, 6, 100), (CompiledStep(SPLITS), 9, 6, 100)],
)
def test_a_step_waits_for_nothing_and_has_few_operators(step, of_layer, outside, of_cut, num_rows, monkeypatch):
    """Products, attention, and compiled parts, of which each is the kernels that are counted above."""
    for is_cut in (False, True):
        shape = StepShape(num_rows, 256, is_cut)
        half, whole = (
            count_operators(step, layers, lambda decoder, shape=shape: partial(decoder._work, shape), monkeypatch)
            for layers in (14, 28)
        )
        assert (whole.total() - half.total()) / 14 <= of_layer, whole - half
        assert 2 * half.total() - whole.total() <= outside + of_cut * is_cut, half


@pytest.mark.parametrize("num_segments", PASS_SEGMENTS[::4])
@pytest.mark.parametrize(
    ("step", "of_layer", "outside"), [(PlainStep(), 16 + 3, 24), (CompiledStep(SPLITS, prefills=True), 9, -6)]
)
def test_a_pass_waits_for_nothing_and_has_few_operators(step, of_layer, outside, num_segments, monkeypatch):
    """As many of a layer as a decoding step, and compiled fewer of the last; with a mask three copies more of each."""
    half, whole = (
        count_operators(step, layers, lambda decoder: partial(decoder._pass, PassShape(num_segments, 256)), monkeypatch)
        for layers in (14, 28)
    )
    assert (whole.total() - half.total()) / 14 <= of_layer, whole - half
    assert 2 * half.total() - whole.total() <= outside, half


def test_steps_that_cannot_be_traced_run_as_they_are(count_graphs, folder, caplog, monkeypatch):
    def looks_at_values(gate_up_BF):
        print(float(gate_up_BF.sum()))
        return gate_up_BF.chunk(2, -1)[0]

    monkeypatch.setattr(compiled, "swiglu", looks_at_values)
    weights, device = load(folder, torch.float32), RepeatingDevice()
    assert type(choose_step("auto", weights, device)) is PlainStep
    assert "decoding steps run uncompiled, which is slower: Unsupported" in caplog.text
    with pytest.raises(ConfigError, match="compile_steps is on, and decoding steps cannot be compiled: Unsupported"):
        choose_step("on", weights, device)


@pytest.mark.parametrize(
    ("part", "wrong", "reason"),
    [
        ("swiglu", lambda both: 3 * both.chunk(2, -1)[0], "other log-probabilities"),
        (
            "draw_next",
            lambda logits, params, columns, last_place, is_cut: (columns, logits[:, 0]),
            "drawn tokens have other log-probabilities",
        ),
    ],
)
def test_steps_that_compute_something_else_run_as_they_are(part, wrong, reason, folder, caplog, monkeypatch):
    monkeypatch.setattr(compiled, "_fast", lambda function: wrong if function.__name__ == part else function)
    weights, device = load(folder, torch.float32), RepeatingDevice()
    assert type(choose_step("auto", weights, device)) is PlainStep
    assert reason in caplog.text
    with pytest.raises(ConfigError, match=reason):
        choose_step("on", weights, device)


def test_attention_that_computes_something_else_is_masked(folder, caplog, monkeypatch):
    def wrong(queries, *others):
        return queries

    monkeypatch.setattr(compiled, "_fast", lambda function: wrong if function is attend_by_length else function)
    step = choose_step("on", load(folder, torch.float32), RepeatingDevice())
    assert isinstance(step, CompiledStep)
    assert not step.by_length
    assert "decoding steps attend with a mask, which is slower: other log-probabilities" in caplog.text


def test_prompts_that_are_computed_otherwise_run_as_they_are(folder, caplog, monkeypatch):
    """While decoding steps are compiled all the same."""

    def wrong(queries, *others):
        return 0 * queries

    monkeypatch.setattr(compiled, "_fast", lambda function: wrong if function is attend_segments else function)
    step = choose_step("on", load(folder, torch.float32), RepeatingDevice())
    assert isinstance(step, CompiledStep)
    assert step.by_length
    assert not step.prefills_by_length
    assert "prompts run uncompiled, which is slower: other log-probabilities" in caplog.text


def test_steps_run_while_another_thread_compiles(monkeypatch):
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)  # torch's, of the whole process
    tensor = torch.ones(2, 3)
    assert compiled._fixed(tensor) is tensor


def test_what_forbids_compiled_steps_is_named(folder, caplog, monkeypatch):
    weights, device = load(folder, torch.float32), RepeatingDevice()
    assert type(choose_step("auto", weights, open_device("cpu"))) is PlainStep, "a processor records nothing"
    assert not caplog.text
    monkeypatch.setattr(device, "compiler_lacks", lambda: "triton is not installed", raising=False)
    assert type(choose_step("auto", weights, device)) is PlainStep
    assert "which is slower: triton is not installed" in caplog.text
    with pytest.raises(ConfigError, match="cannot be compiled: triton is not installed; use auto"):
        choose_step("on", weights, device)


@pytest.mark.asyncio
async def test_steps_of_growing_rows_are_not_compiled(folder, run):
    with pytest.raises(ConfigError, match="compile_steps is on, and rows are not static"):
        await run(folder, together, options={"compile_steps": "on"})

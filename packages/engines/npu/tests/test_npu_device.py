"""The device seam end to end on a stand-in device: what names another device, or mixes two, fails here.

Each test runs in forked processes of its own, so that this one never knows the device.
"""

import asyncio
import json
from dataclasses import replace

import npu_standin
import numpy as np
import pytest
import torch
import torch.distributed as dist
from npu_pictures import IMAGES, pictured

from offbeat_core import (
    GenerateRequest,
    RolloutEngineConfig,
    SamplingParams,
    TracePlan,
    TrainEngineConfig,
    TrainSequence,
    available_devices,
)
from offbeat_device import StepTracer, open_device
from offbeat_engine_torch import TorchTrainEngine
from offbeat_mesh import Mesh, join_world
from offbeat_rollout_torch import TorchRolloutEngine
from offbeat_testing import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("npu") / "model", "qwen3", tied=True, hidden_size=32)


def sequences(seed):
    """Pairs of completions of one prompt each, with an advantage per token."""
    draw, made = np.random.default_rng(seed), []
    for _ in range(4):
        prompt = draw.integers(3, 300, 5)
        for length in (4, 7):
            ids = np.concatenate([prompt, draw.integers(3, 300, length)]).astype(np.int32)
            extras = {"advantage": draw.normal(size=len(ids)).astype(np.float32)}
            made.append(TrainSequence(ids=ids, loss_mask=np.arange(len(ids)) >= 5, extras=extras))
    return made


def weighted(tokens):
    return -(tokens.logprobs_N * tokens.extras["advantage"]).sum() / tokens.total_tokens, {}


ALONE = pytest.mark.ranks(1, join=False, deadline_s=90)


def config(model, device, **changes):
    return TrainEngineConfig(
        model_path=str(model), device=device, learning_rate=1e-3, adam_eps=1e-5, max_tokens_per_microbatch=48, **changes
    )


def trained(engine):
    """Losses and norms of two updates, the weights after them, and log-probabilities."""
    reported = []
    for seed in range(2):
        reported += [engine.forward_backward(sequences(seed), weighted)["loss"].value, engine.step()["grad_norm"].value]
    weights = {name: tensor.cpu().clone() for name, tensor in engine.weights()}
    return reported, weights, engine.logprobs(sequences(5))


def assert_same(ours, theirs):
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5, atol=1e-6)
    for name, tensor in theirs[1].items():
        torch.testing.assert_close(ours[1][name], tensor, rtol=1e-5, atol=1e-6, msg=name)
    for found, wanted in zip(ours[2], theirs[2], strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-5, rtol=0)


@ALONE
def test_the_stand_in_refuses_to_mix_devices(standin):
    """Without this, nothing below would show anything."""
    npu_standin.install(standin)
    ours, of_the_cpu = torch.ones(3, device="npu"), torch.ones(3)
    for mix in (lambda: ours + of_the_cpu, lambda: torch.cat((ours, of_the_cpu)), lambda: ours[of_the_cpu.long()]):
        with pytest.raises(RuntimeError, match="device"):
            mix()


@ALONE
def test_memory_random_state_and_count(standin):
    npu_standin.install(standin)
    assert available_devices()["npu"] == 2
    device = open_device("npu:1")
    assert device.torch_device == torch.device("npu", 1)
    before = device.memory()
    device.reset_peak_memory()
    held = torch.empty(1 << 20, dtype=torch.uint8, device=device.torch_device)
    torch.empty(1 << 20, dtype=torch.uint8, device=device.torch_device)
    assert device.memory().allocated_bytes == before.allocated_bytes + len(held)
    assert device.memory().peak_bytes == before.allocated_bytes + 2 * len(held)
    state, cpu_state = device.rng_state(), torch.get_rng_state()
    first = torch.randn(4, device=device.torch_device)
    device.set_rng_state(state)
    assert torch.equal(first.cpu(), torch.randn(4, device=device.torch_device).cpu())
    assert torch.equal(cpu_state, torch.get_rng_state()), "the CPU's generator was used"
    device.synchronize()


@ALONE
def test_an_update_is_traced_through_the_seam(standin, model, tmp_path):
    npu_standin.install(standin)
    engine = TorchTrainEngine.create(config(model, "npu"))
    plan = TracePlan(role="trainer-0", folder=str(tmp_path), first=1, last=2, max_bytes=1 << 26)
    traced = StepTracer(open_device("npu"), plan)
    for number in range(3):
        with traced.step(number):
            engine.forward_backward(sequences(number), weighted)
            engine.step()
    assert [path.name for path in tmp_path.iterdir()] == ["trainer-0-1.json"]
    names = {event.get("name") for event in json.loads((tmp_path / "trainer-0-1.json").read_text())["traceEvents"]}
    assert {"update 1", "aten::mm"} <= names


@ALONE
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lora_rank": 4},
        {"activation_checkpointing": True},
        {"dtype": "bfloat16"},
        {"lora_rank": 4, "dtype": "bfloat16"},
    ],
    ids=["plain", "lora", "checkpointing", "bfloat16", "lora-bfloat16"],
)
def test_training_gives_what_the_cpu_gives(standin, model, changes):
    npu_standin.install(standin)
    import torch_npu

    ours = TorchTrainEngine.create(config(model, "npu", **changes))
    rough = bool(changes.get("dtype"))
    found = trained(ours)
    assert set(torch_npu.calls) == {"npu_rms_norm", "npu_rotary_mul", "npu_swiglu"}, "the model computes without them"
    wanted = trained(TorchTrainEngine.create(config(model, "cpu", **changes)))
    if rough:  # the CPU attends in float32 by a kernel of its own
        np.testing.assert_allclose(found[0], wanted[0], rtol=0.05, atol=0.05)
    else:
        assert_same(found, wanted)


@ALONE
def test_training_with_images_gives_what_the_cpu_gives(standin, tmp_path):
    """Not Qwen2.5-VL, whose windows transformers indexes by tensors of the CPU: this one refuses them."""
    npu_standin.install(standin)
    ids, num_prompt = pictured(tmp_path / "sees", "qwen3_vl")
    advantage = np.random.default_rng(1).normal(size=len(ids)).astype(np.float32)
    looks = TrainSequence(
        ids=ids, loss_mask=np.arange(len(ids)) >= num_prompt, extras={"advantage": advantage}, images=IMAGES
    )
    reported = []
    for device in ("npu", "cpu"):
        engine = TorchTrainEngine.create(replace(config(tmp_path / "sees", device), max_tokens_per_microbatch=128))
        batch = [looks, *sequences(0)]
        loss, norm = engine.forward_backward(batch, weighted)["loss"].value, engine.step()["grad_norm"].value
        reported.append(
            ([loss, norm], {name: each.cpu().clone() for name, each in engine.weights()}, engine.logprobs(batch))
        )
    assert_same(*reported)


@ALONE
def test_a_checkpoint_goes_on_and_random_state_with_it(standin, model, tmp_path):
    npu_standin.install(standin)
    engine = TorchTrainEngine.create(config(model, "npu"))
    engine.forward_backward(sequences(0), weighted)
    engine.step()
    engine.save(tmp_path / "saved")
    again = TorchTrainEngine.create(config(model, "npu"))
    again.load(tmp_path / "saved")
    for each in (engine, again):
        each.forward_backward(sequences(1), weighted)
        each.step()
    for (name, one), (_, other) in zip(engine.weights(), again.weights(), strict=True):
        assert torch.equal(one.cpu(), other.cpu()), name


@pytest.mark.ranks(2, join=False, deadline_s=90)
@pytest.mark.parametrize("axes", [{"dp": 2}, {"tp": 2}], ids=["dp", "tp"])
def test_two_ranks_over_hccl_train_as_one_process(standin, model, axes, rank):
    npu_standin.install(standin)
    join_world(device="npu", deadline_s=60)
    engine = TorchTrainEngine.create(config(model, "npu"), Mesh(**axes))
    assert dist.get_backend_config() == "cpu:gloo,npu:hccl"
    assert torch.npu.current_device() == rank
    assert_same(trained(engine), trained(TorchTrainEngine.create(config(model, "cpu"))))


def rollout_config(model, device, **changes):
    return RolloutEngineConfig(model_path=str(model), device=device, max_model_len=128, **changes)


async def sampled(settings):
    """Completions of two prompts, and where their keys and values went."""
    async with asyncio.timeout(60):
        engine = await TorchRolloutEngine.create(settings)
        draw = np.random.default_rng(0)
        requests = [
            GenerateRequest(
                request_id=str(length),
                prompt_ids=draw.integers(3, 300, length).astype(np.int32),
                num_samples=2,
                params=SamplingParams(seed=1, max_tokens=20, ignore_eos=True),
            )
            for length in (5, 70)
        ]
        found = [one for group in await asyncio.gather(*map(engine.generate, requests)) for one in group]
        await engine.sleep(2)
        await engine.close()
        return found


@ALONE
@pytest.mark.parametrize(("name", "static_rows"), [("npu:1", None), ("auto", None), ("npu:1", True)])
def test_completions_are_those_of_the_cpu(standin, model, name, static_rows):
    npu_standin.install(standin)
    options = {"static_rows": static_rows}
    found = asyncio.run(sampled(rollout_config(model, name, options=options)))
    held = [torch.npu.max_memory_allocated(index) > 0 for index in (0, 1)]
    assert held == [name == "auto", name == "npu:1"], "it computed elsewhere"
    for one, other in zip(found, asyncio.run(sampled(rollout_config(model, "cpu"))), strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


@ALONE
def test_the_cache_gets_a_share_of_the_devices_memory(standin, model):
    npu_standin.install(standin)
    plenty = 1 << 20  # more samples than anything has room for
    there, here = (TorchRolloutEngine(rollout_config(model, name, max_running=plenty)) for name in ("npu", "cpu"))
    shape = there._architecture
    token_bytes = (
        2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * getattr(torch, there._config.dtype).itemsize
    )
    assert 0 < there._budget_tokens * token_bytes <= npu_standin.TOTAL_BYTES // 4
    assert here._budget_tokens > there._budget_tokens

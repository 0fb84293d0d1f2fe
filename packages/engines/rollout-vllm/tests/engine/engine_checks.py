"""Parts that tests on the real engine share: requests, an engine for one test, syncs, random LoRA adapters."""

import asyncio
from contextlib import asynccontextmanager, contextmanager

import numpy as np

from offbeat_core import GenerateRequest, RolloutEngineConfig, SamplingParams
from offbeat_rollout_vllm import VllmRolloutEngine
from offbeat_testing import logprob_errors
from offbeat_weightsync import (
    BucketPlan,
    GroupSender,
    SharedMemorySender,
    describe_tensors,
    new_address,
    new_socket_path,
)

DEADLINE_S = 300.0
SHORT = np.asarray([10, 44, 81, 7, 200, 31], np.int32)
LONG = (np.arange(300, dtype=np.int32) * 7919) % 250 + 20  # more than two blocks of 128 tokens of vLLM's prefix cache
PREFIX = "base_model.model."
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def request(request_id="r", prompt=SHORT, adapter="", *, num_samples=1, **params):
    params = SamplingParams(**{"max_tokens": 16, "ignore_eos": True, "seed": 5, **params})
    return GenerateRequest(
        request_id=request_id, prompt_ids=prompt, num_samples=num_samples, params=params, adapter=adapter
    )


def config_of(folder, **settings):
    settings = {"device": "cpu", "max_model_len": 512, "max_running": 16, **settings}
    return RolloutEngineConfig(model_path=str(folder), **settings)


@asynccontextmanager
async def started(config):
    async with asyncio.timeout(DEADLINE_S):
        engine = await VllmRolloutEngine.create(config)
        try:
            yield engine
        finally:
            await engine.close()


def run(config, *checks, given=()):
    """Start one engine and run checks on it, one after the other, with what they are given."""

    async def main():
        async with started(config) as engine:
            for check in checks:
                await check(engine, *given)

    asyncio.run(main())


async def until_sampled(engine, num_tokens):
    """Wait until so many more tokens are there."""
    before = (await engine.health()).num_tokens
    while (await engine.health()).num_tokens < before + num_tokens:
        await asyncio.sleep(0.001)


async def until_running(engine, num_samples):
    while (await engine.health()).num_running < num_samples:
        await asyncio.sleep(0.001)


async def error_of(engine, model, one=None):
    """How far a sample's log-probabilities are from those of transformers, nats."""
    one = one or request()
    (completion,) = await engine.generate(one)
    return logprob_errors(model, one.prompt_ids, completion).max()


@contextmanager
def sending(model, bucket_bytes=1 << 14):
    """A sender of the model's weights to workers: several buckets, and tensors that are longer than one."""
    plan = BucketPlan.build(describe_tensors(model.named_parameters()), bucket_bytes)
    with GroupSender(new_address("127.0.0.1"), plan) as sender:
        sender._checksum = "words"
        yield sender


@contextmanager
def sending_beside(model, bucket_bytes=1 << 14):
    """A sender of the same to workers of this machine: as a trainer rank sends to the workers on its device."""
    plan = BucketPlan.build(describe_tensors(model.named_parameters()), bucket_bytes)
    with SharedMemorySender(new_socket_path(), plan) as sender:
        sender._checksum = "words"
        yield sender


async def sync(engine, sender, named, version, deadline_s=60.0):
    """Let the workers of an engine take one version; what it gave the trainer and the engine: proofs, or errors."""
    send = asyncio.to_thread(sender.send, named, version, 1, deadline_s=deadline_s)
    receive = engine.receive_weights("nccl", [sender.address], version, deadline_s, name="rollout-0")
    return await asyncio.gather(send, receive, return_exceptions=True)


async def check_served(engine, model, version):
    for completion in await engine.generate(request(f"v{version}", num_samples=2)):
        assert [segment.version for segment in completion.segments] == [version]
        assert logprob_errors(model, SHORT, completion).max() < 1e-3


def draw_adapter(model, *, rank=4, seed=0, spread=0.25, layers=ALL):
    """PEFT name -> matrix, float32, for every layer of `model` that ends in one of `layers`."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    adapter = {}
    for name, weight in model.named_parameters():
        layer = name.removesuffix(".weight")
        if layer.endswith(layers):
            for part, shape in (("A", (rank, weight.shape[1])), ("B", (weight.shape[0], rank))):
                adapter[f"{PREFIX}{layer}.lora_{part}.weight"] = spread * torch.randn(shape, generator=draw)
    return adapter


@contextmanager
def merged(model, adapter, scale):
    """The model with the adapter in its weights; as it was, afterwards."""
    import torch

    weights = dict(model.named_parameters())
    before = {}
    with torch.no_grad():
        for name, down in adapter.items():
            if ".lora_A." in name:
                target = name.removeprefix(PREFIX).replace(".lora_A", "")
                before[target] = weights[target].clone()
                weights[target] += scale * (adapter[name.replace("lora_A", "lora_B")] @ down)
    try:
        yield model
    finally:
        with torch.no_grad():
            for target, weight in before.items():
                weights[target].copy_(weight)

"""Prompts with images, updates of a whole vision-language model, and turns with images, in this process.

`test_vllm_conformance` has images in the other form.
"""

import asyncio

import numpy as np
import pytest
from engine_checks import DEADLINE_S, config_of, started
from image_checks import Trainer, check_numbers_of_images, check_refusals, request

from offbeat_core import OffbeatError
from offbeat_testing import FakeWeightStream, changed_weights, tiny_vision_model

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(DEADLINE_S)]  # a first start on a cold machine takes a minute


async def run(folder, *checks):
    """Start one engine and run checks on it, one after the other."""
    trainer = Trainer(folder)
    async with started(config_of(folder, max_running=8)) as engine:
        assert engine.capabilities.multimodal
        for check in checks:
            await check(engine, trainer)
    with pytest.raises(OffbeatError, match="closed"):
        await engine.generate(request(*trainer.prompt(1)))


async def check_updates(engine, trainer):
    """All weights, the vision tower's too, while a sample with an image is in flight; then what was cached is gone."""
    one = request(*trainer.prompt(1))
    long = request(*trainer.prompt(1), "long", num_samples=6, max_tokens=300)
    await engine.generate(one)
    task = asyncio.create_task(engine.generate(long))
    while (await engine.health()).num_running < 6:
        await asyncio.sleep(0.001)
    stream = FakeWeightStream(changed_weights(trainer.model), 4)
    assert await engine.update_weights(stream, 4) == stream.expected()
    compared = 0
    for completion in await task:
        assert [segment.version for segment in completion.segments] == [0, 4]
        split = completion.segments[0].num_tokens
        if trainer.whole(completion) > split:
            assert trainer.error(long, completion, start=split) < 1e-4
            compared += 1
    assert compared
    (completion,) = await engine.generate(one)
    assert completion.oldest_version == 4
    assert trainer.error(one, completion) < 1e-4


async def check_two_turns(engine, trainer):
    """The second prompt is the first, what was sampled, and what was read since, a second image in it."""
    prompt, images = trainer.prompt(1)
    group = await engine.generate(request(prompt, images, "turn 1", num_samples=6))
    first = next(one for one in group if trainer.whole(one) == len(one.ids))
    assert trainer.error(request(prompt, images), first) < 1e-4
    await engine.update_weights(FakeWeightStream(changed_weights(trainer.model, seed=7), 7), 7)
    assert trainer.error(request(prompt, images), first) > 1e-2, "the policy is another"
    read, more = trainer.prompt(1, first=1)
    second = request(np.concatenate([prompt, first.ids, read]), (*images, *more), "turn 2")
    (last,) = await engine.generate(second)
    assert [segment.version for segment in last.segments] == [7]
    assert trainer.error(second, last) < 1e-4


@pytest.mark.nightly
async def test_qwen3_vl(tmp_path):
    folder = tiny_vision_model(tmp_path / "model", "qwen3_vl")
    await run(folder, check_numbers_of_images, check_refusals, check_updates, check_two_turns)


@pytest.mark.nightly
async def test_qwen2_5_vl(tmp_path):
    """Windows in its vision tower, an untied head, and other names on disk than in the trainer."""
    folder = tiny_vision_model(tmp_path / "model", "qwen2_5_vl", tied=False)
    await run(folder, check_numbers_of_images, check_updates, check_two_turns)

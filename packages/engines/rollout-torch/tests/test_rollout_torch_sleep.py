"""Memory that sleep gives back, measured as the resident memory of this process."""

from pathlib import Path

import numpy as np
import pytest

from offbeat_core import GenerateRequest, OffbeatError, SamplingParams
from offbeat_testing import FakeWeightStream, changed_weights, logprob_errors, reference_model, tiny_model

NUM_SAMPLES, PROMPT_TOKENS = 32, 120
"""Of one group, with a prompt so short that each of its samples has a copy."""
STATUS = Path("/proc/self/status")
pytestmark = pytest.mark.skipif(not STATUS.exists(), reason="resident memory is read from /proc")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With 50 MiB of weights and over 1 MiB of keys and values a sequence, so that they can be seen in a process."""
    path = tmp_path_factory.mktemp("sleep") / "model"
    return tiny_model(path, hidden_size=512, num_layers=5, spread=0.03, config={"head_dim": 128})


def resident_bytes():
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith("VmRSS:"))
    return 1024 * int(line.split()[1])


def cache_bytes(architecture):
    a = architecture
    return NUM_SAMPLES * PROMPT_TOKENS * 2 * a.num_layers * a.num_kv_heads * a.head_dim * 4


def request(name="r"):
    prompt = (np.arange(PROMPT_TOKENS, dtype=np.int32) * 7919) % 250 + 20
    params = SamplingParams(max_tokens=4, ignore_eos=True, seed=5)
    return GenerateRequest(request_id=name, prompt_ids=prompt, num_samples=NUM_SAMPLES, params=params)


async def sample(engine):
    return await engine.generate(request())


def assert_logprobs(model, completion):
    assert logprob_errors(model, request().prompt_ids, completion).max() < 1e-4


@pytest.mark.asyncio
@pytest.mark.parametrize("options", [{}, {"static_rows": True, "pack_weights": False}], ids=["growing", "static"])
async def test_both_levels_give_memory_back_at_every_turn(folder, open_engine, options):
    """A colocated run sleeps after each batch: the third time gives as much as the first. Static memory stays where it
    is."""
    model = reference_model(folder)
    weight_bytes = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())

    async with open_engine(folder, max_running=NUM_SAMPLES, options=options) as engine:
        cached = cache_bytes(engine._architecture)
        for version in (1, 2, 3):
            await sample(engine)
            awake = resident_bytes()
            await engine.pause("wait")
            await engine.sleep(1)
            assert awake - resident_bytes() > 0.8 * cached
            await engine.sleep(2)
            asleep = resident_bytes()
            assert awake - asleep > 0.8 * (cached + weight_bytes)
            with pytest.raises(OffbeatError, match="wake"):
                await engine.update_weights(FakeWeightStream([], version), version)
            await engine.wake(("weights",))
            weights = changed_weights(model, seed=version)
            await engine.update_weights(FakeWeightStream(weights, version), version)
            del weights
            await engine.wake(("kv_cache",))
            await engine.resume()
            (completion, *_) = await sample(engine)
            assert completion.oldest_version == version
            assert_logprobs(model, completion)

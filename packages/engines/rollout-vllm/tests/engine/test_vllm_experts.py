"""Mixtures of experts: updates compared with transformers on the new weights, and stacks that are not what was sent."""

import numpy as np
import pytest
import torch
from engine_checks import DEADLINE_S, config_of, request, run

from offbeat_core import WeightSyncError
from offbeat_testing import FakeWeightStream, changed_weights, reference_logprobs, reference_model, tiny_model
from offbeat_weightsync import InProcessStream

pytestmark = pytest.mark.timeout(DEADLINE_S)  # a first start on a cold machine takes a minute
REQUEST = request(num_samples=2, max_tokens=24)


def by_expert(named):
    """Under the names of the folder, which a Megatron trainer sends too; transformers holds stacks in memory."""
    for name, tensor in named:
        layer, is_stack, which = name.partition(".experts.")
        if not is_stack:
            yield name, tensor
            continue
        for expert, matrix in enumerate(tensor):
            parts = which.removesuffix("_proj").split("_")
            for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                yield f"{layer}.experts.{expert}.{part}_proj.weight", rows.clone()


async def check_served(engine, model, version):
    for completion in await engine.generate(REQUEST):
        assert {segment.version for segment in completion.segments} == {version}
        whole = np.concatenate([REQUEST.prompt_ids, completion.ids])
        expected = reference_logprobs(model, whole)[len(REQUEST.prompt_ids) :]
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-3, rtol=0)


async def check_updates(engine, model):
    """Before any update, and after two of each way to name experts."""
    await check_served(engine, model, 0)
    for version in (1, 2, 3):
        named = changed_weights(model, seed=version)
        stream = FakeWeightStream(named if version == 2 else list(by_expert(named)), version)
        assert await engine.update_weights(stream, version) == stream.expected()
        await check_served(engine, model, version)


async def check_expert_that_is_not_updated(engine, model):
    """One expert of one layer keeps its old weights: only the proof detects it."""
    side = engine._form._engine.model_executor.driver_worker.worker.offbeat_side
    stack = side._model.model.layers[1].mlp.experts.routed_experts.w2_weight
    kept, finish = stack.data[3].clone(), side.finish

    def spoil():
        finish()
        stack.data[3] = kept

    side.finish = spoil
    with pytest.raises(WeightSyncError, match="checksum"):
        await engine.update_weights(proving(changed_weights(model, seed=4), 4), 4)
    with pytest.raises(WeightSyncError, match="no usable weights"):
        await engine.generate(REQUEST)
    del side.finish


async def check_stacks_that_vllm_does_not_pack_again(engine, model):
    """What vLLM does by itself, without the step that `WorkerSide.begin` takes first."""
    with pytest.MonkeyPatch.context() as without:
        without.setattr("offbeat_rollout_vllm._in_workers.extension.forget_kernels", lambda model: None)
        with pytest.raises(WeightSyncError, match="checksum"):
            await engine.update_weights(proving(changed_weights(model, seed=5), 5), 5)
    await engine.update_weights(proving(changed_weights(model, seed=6), 6), 6)
    await check_served(engine, model, 6)


def proving(named, version):
    """A stream that compares what is read back with what was sent."""
    return InProcessStream(list(by_expert(named)), version)


def check_engine(folder, *checks, **settings):
    run(config_of(folder, max_running=8, **settings), *checks, given=(reference_model(folder),))


def test_experts_are_updated_and_proved_and_one_that_is_not_is_seen(tmp_path):
    checks = check_updates, check_expert_that_is_not_updated, check_stacks_that_vllm_does_not_pack_again
    check_engine(tiny_model(tmp_path / "model", "qwen3_moe"), *checks)


BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


async def check_biases_of_routers(engine, model):
    """They come and are held in float32, all else comes in bfloat16; one that was rounded on the way is seen."""
    weights = engine._form._engine.model_executor.driver_worker.worker.offbeat_side._held
    buffers = {name: tensor for name, tensor in model.named_buffers() if name == BIAS}
    for version in (1, 2):
        buffers[BIAS].add_(torch.randn(buffers[BIAS].shape) * 0.1)
        named = [*by_expert(changed_weights(model, seed=version)), *buffers.items()]
        await engine.update_weights(InProcessStream(named, version, dtype="bfloat16", keep=buffers), version)
        assert torch.equal(weights.read(BIAS), buffers[BIAS])
    await engine.generate(REQUEST)
    load = weights._model.load_weights

    def load_rounded(tensors):
        return load((name, tensor.bfloat16() if name == BIAS else tensor) for name, tensor in tensors)

    with pytest.MonkeyPatch.context() as rounding:
        rounding.setattr(weights._model, "load_weights", load_rounded)
        with pytest.raises(WeightSyncError, match="checksum"):
            await engine.update_weights(InProcessStream(named, 3, dtype="bfloat16", keep=buffers), 3)


def test_biases_of_routers_are_held_and_proved_in_float32(tmp_path):
    check_engine(tiny_model(tmp_path / "model", "glm4_moe", tied=False), check_biases_of_routers, dtype="bfloat16")


async def check_notice(engine, model):
    (notice,) = engine.notices
    assert notice.startswith("vllm option enable_expert_parallel = True is left out")


@pytest.mark.nightly
def test_two_ranks_share_each_expert(tmp_path):
    """Slices of 16 rows, which vLLM pads to 32. Whole experts on each rank are for a GPU: vLLM's worker would die."""
    folder = tiny_model(tmp_path / "model", "qwen3_moe")
    options = {"enable_expert_parallel": True}
    check_engine(folder, check_notice, check_updates, tensor_parallel=2, options=options)

"""FP8 blocks from the trainer: as values where vLLM has no kernel for blocks, and as the blocks themselves.

vLLM's kernels for blocks want a GPU, or AMX. All else of its FP8 (config, layers, scales, dummy load, reload) is Python
and runs here, with a kernel that multiplies by what the blocks stand for put in the place of those.
"""

import numpy as np
import pytest
import torch
from engine_checks import DEADLINE_S, config_of, request, started

import offbeat_rollout_vllm._setup
from offbeat_core import TensorSpec, WeightSyncError
from offbeat_testing import changed_weights, logprob_errors, reference_model, tiny_model
from offbeat_weightsync import (
    DequantizedStream,
    InProcessStream,
    dequantize_blocks,
    is_fp8_weight,
    quantize_tensors,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(DEADLINE_S)]  # a first start on a cold machine takes a minute
REQUEST = request(prompt=np.arange(5, 25, dtype=np.int32), num_samples=2, max_tokens=24, seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Matrices of several blocks, some of which vLLM joins."""
    wide = {"head_dim": 64, "intermediate_size": 384}
    return tiny_model(tmp_path_factory.mktemp("fp8") / "model", hidden_size=256, config=wide)


def settings(folder, **changes):
    return config_of(folder, **{"max_model_len": 128, "max_running": 8, "weight_format": "fp8", **changes})


def distance(model, named, completions):
    """Between reported log-probabilities and those of a model with these weights, nats."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(dict(named), strict=False)
    found = [logprob_errors(model, REQUEST.prompt_ids, each).max() for each in completions]
    model.load_state_dict(before)
    return float(max(found))


def is_block(name, tensor):
    return is_fp8_weight(TensorSpec(name, "float32", tuple(tensor.shape)))


def blocks(named, version, dtype="float32"):
    """As the trainer sends them: what is no block in the engine's format."""
    own = [(name, tensor if is_block(name, tensor) else tensor.to(getattr(torch, dtype))) for name, tensor in named]
    return InProcessStream(list(quantize_tensors(own)), version)


async def check_precision(engine, folder, bound, dtype):
    """Before any update it serves the folder's weights, rounded; then what was sent."""
    assert engine.capabilities.fp8_weights
    model = reference_model(folder)
    named = [(name, tensor.detach().clone()) for name, tensor in model.named_parameters()]
    for version in (0, 1):
        if version:
            named = [(name, tensor.detach().clone()) for name, tensor in changed_weights(model)]
            stream = blocks(named, version, dtype)
            assert (await engine.update_weights(stream, version)).num_tensors == len(stream.plan.specs)
        completions = await engine.generate(REQUEST)
        assert {each.oldest_version for each in completions} == {version}
        assert distance(model, DequantizedStream(blocks(named, version)), completions) < bound
        assert distance(model, named, completions) > 1.5 * bound, "nothing was rounded"


async def test_where_there_is_no_kernel_the_values_are_served_and_the_blocks_proved(folder):
    async with started(settings(folder)) as engine:
        await check_precision(engine, folder, 1e-3, "float32")


def register_plain_kernel(monkeypatch):
    """Make vLLM choose a kernel for blocks that needs no device, and this package take the build for one of a GPU."""
    import vllm.model_executor.kernels.linear as kernels
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
    from vllm.platforms import current_platform

    class Plain(Fp8BlockScaledMMLinearKernel):
        apply_input_quant = False

        @classmethod
        def is_supported(cls, compute_capability=None):
            return True, None

        def apply_block_scaled_mm(self, A, B, As, Bs):
            return (A.float() @ dequantize_blocks(B, Bs).T).to(A.dtype)

    monkeypatch.setitem(kernels._POSSIBLE_FP8_BLOCK_KERNELS, current_platform._enum, [Plain])
    monkeypatch.setattr(
        offbeat_rollout_vllm._setup, "holds_blocks", lambda config, *, is_cpu: config.weight_format == "fp8"
    )


@pytest.mark.nightly
async def test_vllm_takes_holds_and_shows_the_very_blocks(folder, monkeypatch):
    register_plain_kernel(monkeypatch)

    async with started(settings(folder, dtype="bfloat16")) as engine:
        worker = engine._form._engine.model_executor.driver_worker.worker
        layer = worker.model_runner.get_model().model.layers[0]
        for joined in (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj):
            assert joined.weight.dtype == torch.float8_e4m3fn
            assert joined.weight_scale_inv.shape == tuple(-(-size // 128) for size in joined.weight.shape)
        await check_precision(engine, folder, 0.1, "bfloat16")
        await check_that_a_wrong_scale_is_seen(engine, worker.offbeat_side, layer.self_attn.qkv_proj)


async def check_that_a_wrong_scale_is_seen(engine, side, layer):
    named = list(reference_model(engine._folder.path).named_parameters())
    finish = side.finish

    def spoil():
        finish()
        layer.weight_scale_inv.data[2, 1] *= 2  # of k_proj

    side.finish = spoil
    with pytest.raises(WeightSyncError, match="checksum"):
        await engine.update_weights(blocks(named, 2, "bfloat16"), 2)
    with pytest.raises(WeightSyncError, match="no usable weights"):
        await engine.generate(REQUEST)
    del side.finish
    await engine.update_weights(blocks(named, 3, "bfloat16"), 3)
    assert (await engine.generate(REQUEST))[0].oldest_version == 3

"""On a real NPU: fused operators against their references, memory and random state, and a step of training."""

import numpy as np
import pytest
import torch

from offbeat_core import TrainEngineConfig, TrainSequence
from offbeat_device import open_device
from offbeat_engine_torch import TorchTrainEngine
from offbeat_npu import REFERENCE, Operators, dense_batch, packed_batch
from offbeat_npu._runtime import load_operators
from offbeat_testing import tiny_model

CLOSE = {"rtol": 1e-2, "atol": 1e-2}  # bfloat16


@pytest.fixture(scope="module")
def device():
    return open_device("npu")


@pytest.fixture
def operators(device):
    return Operators.of(load_operators())


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "tensors", "rest"),
    [
        ("npu_rms_norm", (drawn(4, 8, 64), drawn(64)), (1e-6,)),
        ("npu_swiglu", (drawn(4, 8, 128),), ()),
        ("npu_rotary_mul", (drawn(2, 4, 8, 64), drawn(2, 1, 8, 64).tanh(), drawn(2, 1, 8, 64).tanh()), ()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_operator_computes_its_reference(device, operators, name, tensors, rest):
    found = getattr(operators, name)(*(each.to(device.torch_device) for each in tensors), *rest)
    wanted = getattr(REFERENCE, name)(*tensors, *rest)
    one, other = (each[0] if isinstance(each, tuple) else each for each in (found, wanted))
    torch.testing.assert_close(one.cpu(), other, **CLOSE)


def test_attention_on_packs_and_on_padded_batches(device, operators):
    sequences, heads, keys, size = [[1] * 5, [2] * 9], 8, 2, 64
    pack, batch = packed_batch(sequences, pad_id=0), dense_batch(sequences, pad_id=0, multiple_of=16)
    packed = [drawn(len(pack.ids_T), count, size) for count in (heads, keys, keys)]
    padded = [drawn(2, count, batch.ids_BS.shape[1], size) for count in (heads, keys, keys)]
    for tensors, layout, options in (
        (packed, "TND", {"atten_mask": pack.hidden, "actual_seq_qlen": pack.ends, "actual_seq_kvlen": pack.ends}),
        (padded, "BNSD", {"atten_mask": batch.hidden_B1SS}),
    ):
        options |= {"scale": size**-0.5, "sparse_mode": (pack if layout == "TND" else batch).sparse_mode}
        wanted = REFERENCE.npu_fusion_attention(*tensors, heads, layout, **options)[0]
        options["atten_mask"] = options["atten_mask"].to(device.torch_device)
        there = (each.to(device.torch_device) for each in tensors)
        found = operators.npu_fusion_attention(*there, heads, layout, **options)[0]
        torch.testing.assert_close(found.cpu(), wanted, **CLOSE)


def test_memory_and_random_state(device):
    before = device.memory().allocated_bytes
    held = torch.empty(1 << 22, dtype=torch.uint8, device=device.torch_device)
    assert device.memory().allocated_bytes >= before + len(held)
    state = device.rng_state()
    first = torch.randn(4, device=device.torch_device)
    device.set_rng_state(state)
    assert torch.equal(first.cpu(), torch.randn(4, device=device.torch_device).cpu())


def test_a_step_of_training_is_that_of_the_cpu(tmp_path):
    model = tiny_model(tmp_path / "model", "qwen3", hidden_size=32)
    ids = np.arange(3, 15, dtype=np.int32)
    sequence = TrainSequence(ids=ids, loss_mask=ids > 6)
    reported = []
    for name in ("npu", "cpu"):
        engine = TorchTrainEngine.create(TrainEngineConfig(model_path=str(model), device=name, learning_rate=1e-3))
        loss = engine.forward_backward([sequence], lambda tokens: (-tokens.logprobs_N.mean(), {}))["loss"].value
        reported.append((loss, engine.step()["grad_norm"].value))
    np.testing.assert_allclose(reported[0], reported[1], rtol=1e-2)

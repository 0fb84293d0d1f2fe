"""The Megatron engine on the stand-in device: every micro-batch is attended under the mask that the device makes."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import mindspeed_standin
import npu_standin
import numpy as np
import pytest
import torch
from megatron_layouts import make_model
from megatron_yardstick import make_sequences
from pictured_sequences import Pictures

from offbeat_core import ShapeError, TrainEngineConfig
from offbeat_engine_megatron import MegatronTrainEngine
from offbeat_mesh import Mesh, join_world
from offbeat_npu import NpuDevice
from offbeat_npu._attention import PackAttention, RowAttention
from offbeat_testing import tiny_vision_model

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
COUNTS = (0, 1, 3, 0)
"""Images of each prompt."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    vision = {"tied": True, "vision": {"deepstack_visual_indexes": [0, 1]}}
    text = {"num_key_value_heads": 2, "num_hidden_layers": 4}
    return {
        "text": make_model(place / "text", "qwen3"),
        "images": tiny_vision_model(place / "images", "qwen3_vl", text=text, **vision),
    }


def batch_of(kind, folder):
    return make_sequences(0) if kind == "text" else Pictures(folder).groups(COUNTS, samples=1)


def policy_loss(tokens):
    loss = -(tokens.logprobs_N * tokens.extras["advantage"]).sum() - 0.1 * tokens.entropy_N.sum()
    return loss / tokens.total_tokens, {}


def config(folder, device, **changes):
    settings = {"learning_rate": 1e-3, "adam_eps": 1e-5, "max_tokens_per_microbatch": 100}
    return TrainEngineConfig(model_path=str(folder), device=device, **settings | changes)


def trained(engine, sequences):
    """Loss, gradient norm and log-probabilities, before and after an update."""
    before = engine.logprobs(sequences)
    loss = engine.forward_backward(sequences, policy_loss)["loss"].value
    norm = engine.step()["grad_norm"].value
    return [loss, norm], [*before, *engine.logprobs(sequences)]


@pytest.fixture(scope="module")
def wanted(folders):
    """Return what one rank on the CPU finds, in a process of its own: this one forks, so it computes no gradients."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as process:
        return {kind: process.submit(on_the_cpu, kind, folder).result(timeout=100) for kind, folder in folders.items()}


def on_the_cpu(kind, folder):
    torch.set_num_threads(1)
    engine = MegatronTrainEngine.create(config(folder, "cpu"))
    found = trained(engine, batch_of(kind, folder))
    engine.close()
    return found


def on_the_device(library, monkeypatch):
    """Make this process's device; the list of what it shapes."""
    npu_standin.install(library)
    mindspeed_standin.install()
    shaped, shape = [], NpuDevice.masked_attention

    def noted(device, tokens):
        shaped.append((tokens, shape(device, tokens)))
        return shaped[-1][1]

    monkeypatch.setattr(NpuDevice, "masked_attention", noted)
    return shaped


def compare(found, wanted):
    np.testing.assert_allclose(found[0], wanted[0], **CLOSE)
    for ours, theirs in zip(found[1], wanted[1], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.ranks(1, join=False, deadline_s=120)
@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "recompute"])
@pytest.mark.parametrize("kind", ["text", "images"])
def test_training_under_the_device_s_masks_gives_what_the_cpu_gives(
    standin, folders, wanted, monkeypatch, kind, recompute
):
    folder, sequences = folders[kind], batch_of(kind, folders[kind])
    shaped = on_the_device(standin, monkeypatch)
    import torch_npu

    engine = MegatronTrainEngine.create(config(folder, "npu", activation_checkpointing=recompute))
    found = trained(engine, sequences)
    assert "the device's kernel under its mask" in str(engine._plan.kernels(engine._device))
    assert {type(each) for _, each in shaped} == {PackAttention if kind == "text" else RowAttention}
    for tokens, attention in shaped:
        ids, lengths = attention.batch.ids_T if kind == "text" else attention.batch.ids_BS, tokens.lengths
        rows = ids.split(list(lengths)) if kind == "text" else [row[:n] for row, n in zip(ids, lengths, strict=True)]
        assert torch.cat(list(rows)).tolist() == tokens.ids_T.tolist(), "padded ids and mask are of one micro-batch"
        assert attention.mask.device.type == "npu"
    num_layers = engine._plan.shape.num_layers
    assert torch_npu.calls["npu_fusion_attention"] >= num_layers * len(shaped), "the model attended without it"
    compare(found, wanted[kind])


@pytest.mark.ranks(2, join=False, deadline_s=150, compare=False)  # stages of a pipeline hold other layers
@pytest.mark.parametrize(
    ("kind", "axes"), [("text", {"cp": 2}), ("images", {"cp": 2}), ("images", {"tp": 2}), ("text", {"pp": 2})]
)
def test_ranks_that_share_a_micro_batch_attend_each_under_its_own_mask(
    standin, folders, wanted, monkeypatch, kind, axes, rank
):
    folder, sequences = folders[kind], batch_of(kind, folders[kind])
    shaped = on_the_device(standin, monkeypatch)
    join_world(device="npu", deadline_s=60)
    engine = MegatronTrainEngine.create(config(folder, "npu"), Mesh(**axes))
    found = trained(engine, sequences)
    assert shaped
    assert all(sum(b - a for ranges in each.queries for a, b in ranges) < sum(each.lengths) for each, _ in shaped) == (
        "cp" in axes
    )
    compare(found, wanted[kind])


@pytest.mark.ranks(1, join=False, deadline_s=120)
def test_a_layer_that_loses_the_mask_is_refused(standin, folders, monkeypatch):
    """So an engine that asks the device and does not hand its mask on does not train on."""
    shaped = on_the_device(standin, monkeypatch)
    engine = MegatronTrainEngine.create(config(folders["text"], "npu"))
    decoder = engine._policy.parts[0].decoder
    forward = decoder.forward
    monkeypatch.setattr(decoder, "forward", lambda *args, **how: forward(*args, **how | {"attention_mask": None}))
    with pytest.raises(ShapeError, match=r"needs the mask \[2048, 2048\] that was made with the ids"):
        engine.logprobs(make_sequences(0))
    assert shaped


@pytest.mark.ranks(1, join=False, deadline_s=120)
def test_runs_asked_for_need_no_mask(standin, folders, wanted, monkeypatch):
    shaped = on_the_device(standin, monkeypatch)
    engine = MegatronTrainEngine.create(config(folders["text"], "npu", options={"attention": "runs"}))
    found = trained(engine, make_sequences(0))
    assert shaped == []
    compare(found, wanted["text"])

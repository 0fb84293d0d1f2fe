"""A loss reads nothing of the device: its metrics stay there until an engine reads those of all micro-batches."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from offbeat_core import DeferredMetrics, LossTokens
from offbeat_objectives import AlgorithmConfig, PreferenceConfig, PreferenceLoss, ValueLoss, build_loss, sft_loss

POLICY = {"advantages": 0.5, "rollout_logprobs": -2.0, "lagged": 1.0, "ref_logprobs": -1.5}
CASES = {
    "corrected in the loss": (AlgorithmConfig(correction="token_tis", correction_form="decoupled"), True, POLICY),
    "with a rejection": (AlgorithmConfig(correction="geometric_rs", correction_form="decoupled"), True, POLICY),
    "recomputed": (AlgorithmConfig(correction_form="decoupled"), False, {**POLICY, "old_logprobs": -1.9, "keep": 1.0}),
    "bypass": (AlgorithmConfig(correction_form="bypass"), False, POLICY),
}
LOSSES = {
    **{name: (build_loss(config, single_step=single), extras) for name, (config, single, extras) in CASES.items()},
    "sft": (sft_loss, {}),
    "critic": (ValueLoss(0.2), {"values": 0.1, "returns": 0.4}),
    "kto": (PreferenceLoss(PreferenceConfig(loss="kto")), {"sign": 1.0, "reference": -2.0, "baseline": 0.1}),
}


class NoReads(TorchDispatchMode):
    """Refuses what waits on an accelerator: reads of one number, and sizes that depend on values."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        by_mask = name == "index" and any(each is not None and each.dtype == torch.bool for each in args[1])
        waits = by_mask or name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero")
        assert not waits, f"the host reads what a loss has computed: {name}"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("loss", "extras"), LOSSES.values(), ids=LOSSES)
def test_a_loss_does_not_wait_for_the_device(loss, extras, monkeypatch):
    tokens = LossTokens(
        logprobs_N=torch.linspace(-3.0, -1.0, 6).requires_grad_(),
        entropy_N=torch.ones(6),
        sequence_N=torch.tensor([0, 0, 1, 1, 1, 1]),
        num_sequences=2,
        extras={name: torch.full((6,), value) for name, value in extras.items()},
        total_tokens=6,
        total_sequences=2,
    )
    with monkeypatch.context() as patch, NoReads():
        patch.setattr(torch.Tensor, "cpu", lambda _: pytest.fail("a copy to the host"))
        patch.setattr(torch.Tensor, "tolist", lambda _: pytest.fail("a copy to the host"))
        value, metrics = loss(tokens)
        value.backward()
    assert isinstance(metrics, DeferredMetrics)
    assert "loss/total" in metrics or "critic/loss" in metrics
    assert all(type(metric.value) is float and type(metric.weight) in (int, float) for metric in metrics.values())

import numpy as np
import pytest

from offbeat_engine_torch import TorchTrainEngine
from offbeat_types import TrainEngineConfig


@pytest.mark.parametrize("head", ["float32", "bfloat16"])
def test_bfloat16_stays_near_float32_and_learns(model_folder, make_groups, head):
    settings = {"model_path": str(model_folder), "device": "cpu", "learning_rate": 1e-3}
    exact = TorchTrainEngine.create(TrainEngineConfig(**settings))
    coarse = TorchTrainEngine.create(TrainEngineConfig(**settings, dtype="bfloat16", options={"head_dtype": head}))
    sequences = make_groups()
    for one, other in zip(exact.logprobs(sequences), coarse.logprobs(sequences), strict=True):
        np.testing.assert_allclose(one, other, atol=0.2)
    assert all(tensor.dtype.itemsize == 4 for _, tensor in coarse.weights())

    def nll(tokens):
        return -tokens.logprobs_N.sum() / tokens.total_tokens, {}

    losses = []
    for _ in range(6):
        losses.append(coarse.forward_backward(sequences, nll)["loss"].value)
        assert coarse.step()["steps_refused"].value == 0
    assert losses[-1] < losses[0] - 0.1

"""A trainer that lends its device between updates: memory is given back, and nothing is lost."""

from pathlib import Path

import numpy as np
import pytest
import torch

from offbeat_core import ConfigError, OffbeatError, SleepingTrainEngine, TrainEngineConfig
from offbeat_device import open_device
from offbeat_engine_torch import TorchTrainEngine
from offbeat_testing import tiny_model


def config(folder, **changes):
    settings = {"learning_rate": 1e-3, "device": "cpu", "max_tokens_per_microbatch": 64}
    return TrainEngineConfig(model_path=str(folder), **settings | changes)


def train(engine, make_groups, loss, *, seeds=(0, 1, 2), between=lambda: None):
    """Losses, norms, the weights afterwards, and what the first policy says."""
    reported = []
    for seed in seeds:
        reported.append(engine.forward_backward(make_groups(seed=seed), loss)["loss"].value)
        reported.append(engine.step()["grad_norm"].value)
        engine.logprobs(make_groups(seed=9), reference=True)
        between()
    weights = {name: tensor.clone() for name, tensor in engine.weights()}
    return reported, weights, np.concatenate(engine.logprobs(make_groups(seed=9), reference=True))


def assert_equal(one, other):
    assert one[0] == other[0]
    assert all(torch.equal(one[1][name], tensor) for name, tensor in other[1].items())
    assert np.array_equal(one[2], other[2])


@pytest.mark.parametrize("changes", [{}, {"lora_rank": 4}], ids=["whole", "lora"])
def test_sleeping_between_updates_changes_no_bit(model_folder, make_groups, weighted_loss, changes, tmp_path):
    undisturbed = train(TorchTrainEngine.create(config(model_folder, **changes)), make_groups, weighted_loss)
    engine = TorchTrainEngine.create(config(model_folder, **changes))

    def between():
        engine.sleep(1)
        asleep = [tensor.clone() for _, tensor in engine.weights()]
        engine.sleep(2)
        engine.sleep(2)
        engine.wake(("weights",))
        assert all(torch.equal(one, other[1]) for one, other in zip(asleep, engine.weights(), strict=True))
        engine.sleep(2)
        engine.wake()
        engine.save(tmp_path)  # shows weights and moments to numpy, so that their memory must be moved next time

    assert_equal(train(engine, make_groups, weighted_loss, between=between), undisturbed)
    assert isinstance(engine, SleepingTrainEngine)


def test_each_level_gives_its_memory_back(tmp_path, make_groups, weighted_loss):
    folder = tiny_model(tmp_path / "larger", "qwen3", hidden_size=512)
    engine, device = TorchTrainEngine.create(config(folder)), open_device("cpu")
    weights_bytes = sum(tensor.nbytes for _, tensor in engine.weights())
    engine.forward_backward(make_groups(), weighted_loss)
    engine.step()
    resident = [device.memory().allocated_bytes]
    for act in (lambda: engine.sleep(1), lambda: engine.sleep(2), lambda: engine.wake()):
        act()
        resident.append(device.memory().allocated_bytes)
    awake, without_moments, without_weights, again = resident
    assert awake - without_moments > 1.8 * weights_bytes, "two moments of each weight"
    assert without_moments - without_weights > 0.8 * weights_bytes
    assert again - without_weights > 2.5 * weights_bytes


def test_what_is_away_is_not_used(model_folder, make_groups, weighted_loss, tmp_path):
    engine = TorchTrainEngine.create(config(model_folder))
    engine.sleep(1)
    engine.save_weights(tmp_path)
    for use in (
        lambda: engine.forward_backward(make_groups(), weighted_loss),
        lambda: engine.logprobs(make_groups()),
        engine.step,
        lambda: engine.save(tmp_path),
        lambda: engine.load(tmp_path),
    ):
        with pytest.raises(OffbeatError, match=r"sleeps without its optimizer; call wake\(\)"):
            use()
    engine.sleep(2)
    with pytest.raises(OffbeatError, match=r"weights: the training engine sleeps without its weights"):
        engine.weights()
    engine.wake(("optimizer",))
    with pytest.raises(OffbeatError, match="sleeps without its weights"):
        engine.step()


def test_gradients_without_a_step_and_unknown_words_are_refused(model_folder, make_groups, weighted_loss):
    engine = TorchTrainEngine.create(config(model_folder))
    engine.forward_backward(make_groups(), weighted_loss)
    with pytest.raises(OffbeatError, match=r"gradients that no step has used; call step\(\) first"):
        engine.sleep(1)
    engine.step()
    with pytest.raises(ConfigError, match=r"sleep level must be one of \(1, 2\), got 3"):
        engine.sleep(3)
    with pytest.raises(ConfigError, match="wake knows the tags weights and optimizer, got moments"):
        engine.wake(("moments",))


@pytest.mark.mesh(dp=2, tp=2, compare=False)
def test_ranks_that_sleep_train_as_those_that_do_not(model_folder, make_groups, weighted_loss, mesh, tmp_path_factory):
    undisturbed = train(TorchTrainEngine.create(config(model_folder), mesh), make_groups, weighted_loss)
    engine = TorchTrainEngine.create(config(model_folder), mesh)
    folder = Path(mesh.group("dp", "tp").broadcast_data(str(tmp_path_factory.mktemp("saved"))))

    def between():
        engine.save(folder)  # moments too
        engine.sleep(2)
        engine.wake(("weights",))
        list(engine.weights())
        engine.sleep(2)
        engine.wake()

    assert_equal(train(engine, make_groups, weighted_loss, between=between), undisturbed)

"""A score head: what transformers' classifier computes, learned on one rank and on several, kept by checkpoints."""

import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from offbeat_core import ModelError, TrainEngineConfig, TrainSequence
from offbeat_engine_torch import TorchTrainEngine
from offbeat_engine_torch._model import read_config
from offbeat_testing import tiny_model, tiny_vision_model


def config(folder, **changes):
    settings = {"learning_rate": 1e-3, "adam_eps": 1e-5, "max_tokens_per_microbatch": 48, "device": "cpu"}
    return TrainEngineConfig(model_path=str(folder), head="score", **settings | changes)


def scored(seed, number=6):
    """Sequences of random ids, each with one loss token after its end, in groups of two."""
    rng = np.random.default_rng(seed)
    made = []
    for at in range(number):
        ids = np.append(rng.integers(3, 250, rng.integers(2, 20)), 0).astype(np.int32)
        side = np.full(len(ids), (-1.0) ** at, np.float32)
        mask = np.arange(len(ids)) == len(ids) - 1
        made.append(TrainSequence(ids=ids, loss_mask=mask, extras={"side": side}, group=at // 2))
    return made


def bradley_terry(tokens):
    side, scores = tokens.extras["side"], tokens.logprobs_N
    margins = scores[side > 0] - scores[side < 0]
    return -torch.nn.functional.logsigmoid(margins).sum() * 2 / tokens.total_sequences, {}


def transformers_scores(folder, sequences):
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    model.config.pad_token_id = None
    with torch.no_grad():
        return [float(model(torch.tensor(each.ids[None, :-1], dtype=torch.int64)).logits) for each in sequences]


def engine_scores(engine, sequences):
    return [float(found[-1]) for found in engine.logprobs(sequences)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("scores") / "model", hidden_size=32)


def three_steps(engine):
    losses = []
    for seed in range(3):
        losses.append(engine.forward_backward(scored(seed), bradley_terry)["loss"].value)
        losses.append(engine.step()["grad_norm"].value)
    return losses, {name: tensor.clone() for name, tensor in engine.weights()}, engine_scores(engine, scored(9))


@pytest.fixture(scope="module")
def of_one_process(model):
    return three_steps(TorchTrainEngine.create(config(model)))


def test_what_is_saved_is_a_classifier_that_scores_alike(model, tmp_path):
    engine = TorchTrainEngine.create(config(model, learning_rate=1e-2))
    for seed in range(3):
        engine.forward_backward(scored(seed), bradley_terry)
        engine.step()
    engine.save_weights(tmp_path / "saved")
    wanted = transformers_scores(tmp_path / "saved", scored(9))
    np.testing.assert_allclose(engine_scores(engine, scored(9)), wanted, atol=1e-5)
    assert np.std(wanted) > 1e-3, "nothing to compare"
    again = TorchTrainEngine.create(config(tmp_path / "saved"))
    np.testing.assert_allclose(engine_scores(again, scored(9)), wanted, atol=1e-5)


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}], ids=["dp", "tp"], indirect=True)
def test_two_ranks_learn_scores_as_one_process(model, of_one_process, mesh):
    losses, weights, scores = three_steps(TorchTrainEngine.create(config(model), mesh))
    np.testing.assert_allclose(losses, of_one_process[0], rtol=1e-5, atol=1e-5)
    assert list(weights) == list(of_one_process[1])
    for name, tensor in of_one_process[1].items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-5, msg=name)
    np.testing.assert_allclose(scores, of_one_process[2], atol=2e-5)


def test_with_adapters_the_head_learns_too_and_a_checkpoint_holds_both(model, tmp_path):
    engine = TorchTrainEngine.create(config(model, lora_rank=4, learning_rate=1e-2))
    before = {name: tensor.clone() for name, tensor in engine.weights(part="base")}
    engine.forward_backward(scored(0), bradley_terry)
    engine.step()
    engine.save(tmp_path / "saved")
    after = dict(engine.weights(part="base"))
    assert [name for name in before if not torch.equal(before[name], after[name])] == ["score.weight"]
    engine.forward_backward(scored(1), bradley_terry)
    engine.step()
    other = TorchTrainEngine.create(config(model, lora_rank=4, learning_rate=1e-2))
    other.load(tmp_path / "saved")
    other.forward_backward(scored(1), bradley_terry)
    other.step()
    assert engine_scores(other, scored(9)) == engine_scores(engine, scored(9))


def test_a_model_with_images_gets_no_score_head(tmp_path):
    with pytest.raises(ModelError, match="models of text alone"):
        TorchTrainEngine.plan(config(tiny_vision_model(tmp_path / "model", "qwen3_vl")))


def test_a_new_score_head_is_that_of_the_seed(model):
    heads = [dict(TorchTrainEngine.create(config(model, seed=seed)).weights())["score.weight"] for seed in (1, 1, 2)]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


@pytest.mark.parametrize(("padding", "is_named"), [("<|endoftext|>", True), ("<|im_end|>", False)])
def test_a_classifier_pads_by_a_token_that_ends_no_answer(model, tmp_path, padding, is_named):
    folder = shutil.copytree(model, tmp_path / "model")
    for name, changes in (("config.json", {"pad_token_id": None}), ("tokenizer_config.json", {"pad_token": padding})):
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))
    assert (read_config(str(folder), scores=True).pad_token_id is not None) == is_named

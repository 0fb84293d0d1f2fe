"""Packed training with images against plain transformers: log-probabilities, gradients of the tower, refusals."""

import dataclasses

import numpy as np
import pytest
import torch
from pictured_sequences import SIZES, TOWERS, Pictures, Yardstick, draw_image

from offbeat_core import ConfigError, DataError, ModelError, TrainEngineConfig
from offbeat_engine_torch import TorchTrainEngine
from offbeat_testing import tiny_vision_model
from offbeat_training import plan_packs

FAMILIES = [
    *(("qwen3_vl", True), ("qwen3_vl", False), ("qwen2_5_vl", True), ("qwen2_5_vl", False)),
    *(("gemma3", True), ("gemma4", True), ("gemma4", False)),
]
COUNTS = (0, 1, 3, 1)
# Fewer tokens than an image has: what its tokens see of it is cut on one side alone.
WINDOW = {"gemma3": {"sliding_window": 9}, "gemma4": {"sliding_window": 9, "final_logit_softcapping": 2.0}}


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda param: f"{param[0]}-{'tied' if param[1] else 'untied'}")
def folder(request, tmp_path_factory):
    family, tied = request.param
    return tiny_vision_model(tmp_path_factory.mktemp("vision") / family, family, tied=tied, text=WINDOW.get(family))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return tiny_vision_model(tmp_path_factory.mktemp("vision") / "model", tied=False)


def engine_of(folder, *, double=False, **changes):
    settings = {"max_tokens_per_microbatch": 160, "device": "cpu"}
    engine = TorchTrainEngine.create(TrainEngineConfig(model_path=str(folder), **settings | changes))
    if double:
        engine._policy.model.whole.double()
    return engine


def assert_gradients(engine, sequences, loss, wanted, absent=()):
    """Equal up to the float32 rounding of norms and rotary angles; `absent` names what is not trained."""
    value = engine.forward_backward(sequences, loss)["loss"].value
    found = {name: each.grad for name, each in engine._optimizer.parameters.items()}
    assert value == pytest.approx(wanted[0], abs=1e-7)
    assert found.keys() == {name for name in wanted[1] if not name.startswith(absent)}
    # Gemma 4 rounds to float32 in more places, and the scores of its attention are not scaled down.
    share = 1e-5 if any("embed_vision" in name for name in wanted[1]) else 2e-6
    for name in found:
        # What is added to all keys without positions changes nothing: its gradient is 0 but for rounding.
        rounding = 1e-9 if name.startswith(TOWERS) and name.endswith("k_proj.bias") else 0.0
        assert (found[name] - wanted[1][name]).abs().max() <= share * wanted[1][name].abs().max() + rounding, name


@pytest.mark.parametrize("num_images", [0, 1, 3])
def test_logprobs_are_those_of_transformers(folder, num_images):
    sequences = Pictures(folder).groups([num_images, num_images], seed=num_images)
    yardstick = Yardstick(folder)
    with torch.no_grad():
        wanted = [yardstick.logprobs(each).numpy() for each in sequences]
    for budget in (64, 4096):
        found = engine_of(folder, max_tokens_per_microbatch=budget).logprobs(sequences)
        for each, got, want in zip(sequences, found, wanted, strict=True):
            np.testing.assert_allclose(got[each.loss_mask], want[each.loss_mask[1:]], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "gemma3", "gemma4"])
def test_logprobs_on_padded_rows_are_those_of_transformers(tmp_path, family):
    folder = tiny_vision_model(tmp_path / family, family)
    sequences = Pictures(folder).groups(COUNTS)
    engine = engine_of(folder)
    engine._policy.kernel = "rows"  # what accelerators without flash attention take
    yardstick = Yardstick(folder)
    with torch.no_grad():
        wanted = [yardstick.logprobs(each).numpy() for each in sequences]
    for each, got, want in zip(sequences, engine.logprobs(sequences), wanted, strict=True):
        np.testing.assert_allclose(got[each.loss_mask], want[each.loss_mask[1:]], atol=1e-4, rtol=0)


@pytest.mark.parametrize("share", [True, False], ids=["shared", "unshared"])
def test_gradients_reach_the_tower(folder, share, weighted_loss):
    sequences = Pictures(folder).groups(COUNTS)
    wanted = Yardstick(folder, torch.float64).gradients(sequences)
    assert any(name.startswith(TOWERS) and grad.abs().max() > 1e-6 for name, grad in wanted[1].items())
    engine = engine_of(folder, double=True, options={"share_prompts": share})
    assert_gradients(engine, sequences, weighted_loss, wanted)


def test_a_frozen_tower_stays_and_the_rest_learns_the_same(folder, weighted_loss):
    sequences = Pictures(folder).groups(COUNTS)
    frozen = {"train_vision": False}
    wanted = Yardstick(folder, torch.float64).gradients(sequences)
    assert_gradients(engine_of(folder, double=True, options=frozen), sequences, weighted_loss, wanted, absent=TOWERS)
    engine = engine_of(folder, options=frozen, learning_rate=1e-2)
    engine.forward_backward(sequences, weighted_loss)
    before = {name: tensor.clone() for name, tensor in engine.weights()}
    engine.step()
    moved = {name for name, tensor in engine.weights() if not torch.equal(tensor, before[name])}
    # Scales of Gemma 4's layers are no parameters.
    assert moved == {name for name in before if not (name.startswith(TOWERS) or name.endswith(".layer_scalar"))}


def test_activation_checkpointing_changes_no_gradient(qwen3, weighted_loss):
    sequences = Pictures(qwen3).groups(COUNTS)
    engine = engine_of(qwen3, double=True, activation_checkpointing=True)
    assert_gradients(engine, sequences, weighted_loss, Yardstick(qwen3, torch.float64).gradients(sequences))


@pytest.mark.parametrize("train_vision", [True, False])
def test_adapters_are_put_where_training_is_wanted(qwen3, weighted_loss, train_vision):
    engine = engine_of(qwen3, lora_rank=2, options={"train_vision": train_vision}, learning_rate=1e-2)
    names = engine._optimizer.parameters.keys()
    assert all(name.endswith((".lora_A", ".lora_B")) for name in names)
    assert any("visual" in name for name in names) == train_vision
    sequences = Pictures(qwen3).groups((1,))
    first = engine.logprobs(sequences)
    engine.forward_backward(sequences, weighted_loss)
    engine.step()
    np.testing.assert_array_equal(engine.logprobs(sequences, reference=True)[0], first[0])
    assert not np.array_equal(engine.logprobs(sequences)[0], first[0])


def test_prompts_of_one_text_and_other_images_are_not_shared(qwen3):
    pictures = Pictures(qwen3)
    prompt = pictures.prompt([draw_image(SIZES[0], 1)], np.random.default_rng(0))
    looks = [draw_image(SIZES[0], seed) for seed in (1, 2, 1)]
    sequences = [pictures.sequence([look], [5, place], prompt=prompt) for place, look in enumerate(looks)]
    [pack] = plan_packs(sequences, budget=10**6, share_prompts=True)
    assert sorted(family.members for family in pack) == [(0, 2), (1,)]
    yardstick = Yardstick(qwen3)
    with torch.no_grad():
        for each, found in zip(sequences, engine_of(qwen3).logprobs(sequences), strict=True):
            want = yardstick.logprobs(each).numpy()
            np.testing.assert_allclose(found[each.loss_mask], want[each.loss_mask[1:]], atol=1e-4, rtol=0)


def test_images_of_later_turns_are_seen(folder):
    """A conversation: picture, answer, another picture, answer; and one picture after the last answer."""
    pictures = Pictures(folder)
    looks = [draw_image(size, place) for place, size in enumerate(SIZES)]
    turns = [pictures.sequence([look], place) for place, look in enumerate(looks)]
    ids = np.concatenate([turns[0].ids, turns[1].ids, turns[2].ids]).astype(np.int32)
    mask = np.concatenate([turns[0].loss_mask, turns[1].loss_mask, np.zeros(len(turns[2].ids), bool)])
    sequence = dataclasses.replace(turns[0], ids=ids, loss_mask=mask, extras={}, images=tuple(looks))
    with torch.no_grad():
        want = Yardstick(folder).logprobs(sequence).numpy()
    found = engine_of(folder, max_tokens_per_microbatch=1024).logprobs([sequence, sequence])
    for each in found:
        np.testing.assert_allclose(each[mask], want[mask[1:]], atol=1e-4, rtol=0)


def test_a_placeholder_that_was_sampled_is_a_token_like_any_other(qwen3):
    """A random model samples one now and then. transformers' row 310 is given its embedding, to say the same."""
    pictures = Pictures(qwen3)
    sequence = pictures.sequence([draw_image(SIZES[2], 0)], 1)
    place = int(np.flatnonzero(sequence.loss_mask)[1])
    sampled, stand_in = sequence.ids.copy(), sequence.ids.copy()
    sampled[place], stand_in[place] = pictures.image_id, 310
    yardstick = Yardstick(qwen3)
    with torch.no_grad():
        for rows in (yardstick.model.get_input_embeddings().weight, yardstick.model.lm_head.weight):
            rows[310] = rows[pictures.image_id]
        # The head has two equal rows now; logarithms of both engines are compared where neither is the target.
        want = yardstick.logprobs(dataclasses.replace(sequence, ids=stand_in)).numpy()
    engine = engine_of(qwen3)
    with torch.no_grad():
        engine._policy.model.head.weight[310] = engine._policy.model.head.weight[pictures.image_id]
    [found] = engine.logprobs([dataclasses.replace(sequence, ids=sampled)])
    np.testing.assert_allclose(found[sequence.loss_mask], want[sequence.loss_mask[1:]], atol=1e-4, rtol=0)


def test_weights_and_checkpoints_hold_the_tower_and_its_processor(qwen3, tmp_path, weighted_loss):
    sequences = Pictures(qwen3).groups((1, 0))
    engine = engine_of(qwen3, learning_rate=1e-2)
    engine.forward_backward(sequences, weighted_loss)
    engine.step()
    engine.save(tmp_path / "saved")
    with torch.no_grad():
        yardstick = Yardstick(tmp_path / "saved")
        want = yardstick.logprobs(sequences[0]).numpy()
    mask = sequences[0].loss_mask
    np.testing.assert_allclose(engine.logprobs(sequences)[0][mask], want[mask[1:]], atol=1e-4, rtol=0)
    assert {name for name, _ in engine.weights()} == {name for name, _ in yardstick.model.named_parameters()}
    other = engine_of(qwen3, learning_rate=1e-2)
    other.load(tmp_path / "saved")
    for each in (engine, other):
        each.forward_backward(sequences, weighted_loss)
        each.step()
    for (name, one), (_, two) in zip(engine.weights(), other.weights(), strict=True):
        assert torch.equal(one, two), name


def test_what_does_not_fit_is_refused(qwen3, model_folder):
    pictures = Pictures(qwen3)
    sequence = pictures.sequence([draw_image(SIZES[0], 0)], 0)
    engine = engine_of(qwen3)
    for images in ((), sequence.images * 2, (draw_image((64, 64), 0),)):
        with pytest.raises(DataError, match="placeholder tokens"):
            engine.logprobs([dataclasses.replace(sequence, images=images)])
    with pytest.raises(DataError, match=r"must be \[H, W, 3\] uint8"):
        dataclasses.replace(sequence, images=(np.zeros((8, 8, 3), np.float32),))
    with pytest.raises(DataError, match="the model takes none"):
        engine_of(model_folder).logprobs([dataclasses.replace(sequence, ids=sequence.ids % 300)])
    with pytest.raises(ConfigError, match="train_vision"):
        engine_of(qwen3, options={"train_vision": "no"})


def test_a_folder_without_an_image_processor_is_named(tmp_path):
    folder = tiny_vision_model(tmp_path / "model")
    sequence = Pictures(folder).sequence([draw_image(SIZES[0], 0)], 0)
    for name in ("preprocessor_config.json", "processor_config.json"):
        (folder / name).unlink(missing_ok=True)
    engine = engine_of(folder)
    assert np.isfinite(engine.logprobs([Pictures.sequence(_Words(), [], 1)])[0]).all()  # text needs none
    with pytest.raises(ModelError, match=r"preprocessor_config\.json"):
        engine.logprobs([sequence])


class _Words:
    """Draws a prompt of words for a folder that has no processor."""

    def prompt(self, images, rng):
        return rng.integers(3, 300, 5).astype(np.int32)

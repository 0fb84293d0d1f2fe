"""gpt-oss: sinks, windows, experts with biases and a clamped gate. A packed sequence is computed as it is alone."""

import numpy as np
import pytest
import torch
from gpt_oss_folders import write_model
from transformers import AutoModelForCausalLM

from offbeat_core import ConfigError, TrainEngineConfig
from offbeat_engine_torch import TorchTrainEngine
from offbeat_testing import reference_logprobs, reference_model


def config(folder, **changes):
    return TrainEngineConfig(**{"model_path": str(folder), "device": "cpu", "learning_rate": 1e-2, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("gpt_oss"))


def assert_agree(engine, folder, sequences):
    model = reference_model(folder)
    for sequence, found in zip(sequences, engine.logprobs(sequences), strict=True):
        np.testing.assert_allclose(found, reference_logprobs(model, sequence.ids) * sequence.loss_mask, atol=1e-4)


def reference_gradients(folder, sequences):
    """Gradients of the policy gradient's loss that transformers computes of one sequence after another."""
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **how).eval()
    total = sum(int(each.loss_mask.sum()) for each in sequences)
    for each in sequences:
        ids, mask = torch.from_numpy(each.ids.astype(np.int64)), torch.from_numpy(each.loss_mask[1:])
        logp = torch.log_softmax(model(ids[None], use_cache=False).logits[0, :-1], -1).gather(1, ids[1:, None])[:, 0]
        (-(logp * torch.from_numpy(each.extras["advantage"][1:]).double())[mask].sum() / total).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("settings", [{}, {"activation_checkpointing": True}], ids=str)
@pytest.mark.parametrize("kernel", ["split", "rows"])
def test_gradients_are_those_of_single_sequences(kernel, settings, folder, make_groups, weighted_loss):
    """Compare all gradients, in packs with shared prompts: float32 beside transformers' float64."""
    engine, sequences = TorchTrainEngine.create(config(folder, **settings)), make_groups(prompt=(2, 20))
    assert_agree(engine, folder, sequences)
    engine._policy.kernel = kernel
    engine.forward_backward(sequences, weighted_loss)
    wanted = reference_gradients(folder, sequences)
    found = {name: each.grad for name, each in engine._optimizer.parameters.items()}
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert grad.abs().max() > 0, name
        assert (found[name] - grad).abs().max() <= 1e-4 * grad.abs().max(), name


def test_bfloat16_is_no_further_from_float32_than_transformers_in_bfloat16(folder, make_groups):
    sequences = make_groups(prompt=(10, 30))
    coarse = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    exact, theirs = (
        np.concatenate([reference_logprobs(model, each.ids) * each.loss_mask for each in sequences])
        for model in (reference_model(folder), coarse)
    )
    ours = np.concatenate(TorchTrainEngine.create(config(folder, dtype="bfloat16")).logprobs(sequences))
    assert 0 < np.abs(ours - exact).mean() <= np.abs(theirs - exact).mean()


def test_a_trained_model_is_saved_as_transformers_loads_it(folder, tmp_path, make_groups, weighted_loss):
    engine, sequences = TorchTrainEngine.create(config(folder)), make_groups()
    engine.forward_backward(sequences, weighted_loss)
    engine.step()
    engine.save(tmp_path / "saved")
    assert_agree(engine, tmp_path / "saved", sequences)
    resumed = TorchTrainEngine.create(config(folder))
    resumed.load(tmp_path / "saved")
    assert_agree(resumed, tmp_path / "saved", sequences)


def test_adapters_train_attention_and_leave_sinks_and_experts(folder, tmp_path, make_groups, weighted_loss):
    engine, sequences = TorchTrainEngine.create(config(folder, lora_rank=4)), make_groups()
    before = {name: tensor.clone() for name, tensor in engine.weights()}
    for _ in range(2):
        engine.forward_backward(sequences, weighted_loss)
        engine.step()
    changed = {name for name, tensor in engine.weights() if not torch.equal(tensor, before[name])}
    linear = [f"{side}_proj" for side in "qkvo"]
    assert changed == {f"model.layers.{n}.self_attn.{each}.weight" for n in range(2) for each in linear}
    engine.save(tmp_path / "saved")
    assert_agree(engine, tmp_path / "saved", sequences)


@pytest.mark.mesh(dp=2)
@pytest.mark.parametrize("settings", [{}, {"lora_rank": 4}], ids=str)
def test_ranks_train_as_one_process_does(settings, mesh, folder, tmp_path, make_groups, weighted_loss):
    settings = {"adam_eps": 1e-5, "max_tokens_per_microbatch": 48, **settings}
    engines = [TorchTrainEngine.create(config(folder, **settings), each) for each in (mesh, None)]
    for seed in range(2):
        sequences = make_groups(seed=seed)
        losses = [each.forward_backward(sequences, weighted_loss)["loss"].value for each in engines]
        norms = [each.step()["grad_norm"].value for each in engines]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5, abs=1e-6)
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    many, one = ({name: tensor.clone() for name, tensor in each.weights()} for each in engines)
    assert list(many) == list(one)
    for name, tensor in one.items():
        torch.testing.assert_close(many[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.mesh(tp=2)
def test_tensor_parallelism_is_refused_by_name(mesh, folder):
    with pytest.raises(ConfigError, match="columns and rows: GptOssForCausalLM has none; set tp to 1"):
        TorchTrainEngine.create(config(folder), mesh)

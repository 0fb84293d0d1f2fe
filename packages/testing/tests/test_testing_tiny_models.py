import json

import numpy as np
import pytest

from offbeat_testing import changed_weights, reference_logprobs, reference_model, tiny_model


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_tiny_model_loads_with_plain_transformers(tmp_path, family, tied):
    from transformers import AutoTokenizer

    folder = tiny_model(tmp_path / "m", family, tied=tied)
    model = reference_model(folder)
    assert ("lm_head.weight" in dict(model.named_parameters())) is not tied
    logprobs = reference_logprobs(model, np.asarray([5, 6, 7, 8], np.int32))
    assert logprobs[0] == 0
    assert (logprobs[1:] < 0).all()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "the sum of two numbers, naïve 数"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    ).endswith("<|im_start|>assistant\n")
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [tokenizer.eos_token_id]


def test_biases_and_norms_are_not_at_their_defaults(tmp_path):
    model = reference_model(tiny_model(tmp_path / "m", "qwen2"))
    vectors = [tensor for tensor in model.parameters() if tensor.ndim == 1]
    assert any("bias" in name for name, _ in model.named_parameters())
    assert all(tensor.std() > 0 for tensor in vectors)


def test_shards_and_seeds(tmp_path):
    sharded = tiny_model(tmp_path / "a", max_shard_bytes=100_000)
    assert len(list(sharded.glob("*.safetensors"))) > 1
    same, other = tiny_model(tmp_path / "b"), tiny_model(tmp_path / "c", seed=1)
    one, two, three = (dict(reference_model(folder).named_parameters()) for folder in (sharded, same, other))
    assert all((one[name] == two[name]).all() for name in one)
    assert not all((one[name] == three[name]).all() for name in one)


def test_changed_weights_change_the_model_they_come_from(tmp_path):
    model = reference_model(tiny_model(tmp_path / "m"))
    ids = np.arange(5, 15, dtype=np.int32)
    before = reference_logprobs(model, ids)
    weights = dict(changed_weights(model))
    assert np.abs(reference_logprobs(model, ids) - before).max() > 1e-3
    assert weights.keys() == dict(model.named_parameters()).keys()

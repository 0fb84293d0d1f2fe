"""Exact numerics of the trainer: bits that do not depend on packs, gradients of the same function, and refusals."""

from typing import Any

import numpy as np
import pytest
import torch

from offbeat_core import ConfigError, Metric, TrainEngineConfig, TrainSequence
from offbeat_engine_torch import TorchTrainEngine
from offbeat_testing import tiny_model

LENGTHS = (3, 20, 70, 140)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_model(tmp_path_factory.mktemp("m"), "qwen3", hidden_size=192)


def engine(folder: Any, *, numerics: str = "exact", **settings: Any) -> TorchTrainEngine:
    options = {"numerics": numerics, **settings.pop("options", {})}
    return TorchTrainEngine.create(
        TrainEngineConfig(model_path=str(folder), device="cpu", num_threads=1, options=options, **settings)
    )


def sequences() -> list[TrainSequence]:
    """Groups of two that share a prompt of so many tokens."""
    draw, found = np.random.default_rng(0), []
    for group, length in enumerate(LENGTHS):
        prompt = draw.integers(3, 300, length)
        for more in (1, 33):
            ids = np.concatenate([prompt, draw.integers(3, 300, more)])
            found.append(TrainSequence(ids=ids, loss_mask=np.arange(len(ids)) >= length, group=group))
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probabilities_do_not_depend_on_the_pack(folder: Any, dtype: str) -> None:
    one = engine(folder, dtype=dtype)
    packed = one.logprobs(sequences())
    alone = [found for each in sequences() for found in one.logprobs([each])]
    native = engine(folder, dtype=dtype, numerics="native").logprobs(sequences())
    for found, by_itself, other in zip(packed, alone, native, strict=True):
        np.testing.assert_array_equal(found, by_itself)
        np.testing.assert_allclose(found, other, atol={"float32": 1e-4, "bfloat16": 0.1}[dtype])


@pytest.mark.parametrize("settings", [{}, {"activation_checkpointing": True}, {"lora_rank": 4}], ids=str)
def test_gradients_are_those_of_native_numerics(folder: Any, settings: dict[str, Any]) -> None:
    found = []
    for numerics in ("exact", "native"):
        one, seen = engine(folder, numerics=numerics, **settings), list[float]()
        for number, piece in enumerate(one._policy.pieces):
            if piece.is_adapter:  # a new one adds zeros, and one of its sides has no gradient
                torch.nn.init.normal_(piece.local, std=0.05, generator=torch.Generator().manual_seed(number))
        asked = one.logprobs(sequences())

        def loss(tokens: Any, seen: list[float] = seen) -> Any:
            seen.extend(tokens.logprobs_N.tolist())
            return -tokens.logprobs_N.mean(), {"n": Metric(value=1.0)}

        one.forward_backward(sequences(), loss)
        if numerics == "exact":
            wanted = np.concatenate([x[each.loss_mask] for x, each in zip(asked, sequences(), strict=True)])
            assert set(seen) == set(wanted.tolist()), "a pass with gradients finds the same bits"
        grads = {piece.name: piece.parameter.grad for piece in one._policy.pieces}
        found.append({name: grad for name, grad in grads.items() if grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[1].items():
        assert (found[0][name] - gradient).abs().max() <= 2e-3 * gradient.abs().max(), name


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"options": {"compile_layers": "on"}}, "compile_layers"),
        ({"options": {"head_dtype": "bfloat16"}}, "head_dtype"),
        ({"options": {"lora_base_dtype": "nf4"}, "lora_rank": 4, "dtype": "bfloat16"}, "lora_base_dtype"),
        ({"head": "score"}, "score"),
    ],
)
def test_what_computes_otherwise_is_refused(folder: Any, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f'numerics = "exact".*{named}'):
        engine(folder, **settings)


def test_ranks_that_share_layers_or_round_adapters_are_refused(folder: Any, tmp_path: Any) -> None:
    def plan(num_ranks: int, **settings: Any) -> None:
        options = {"numerics": "exact", **settings.pop("options", {})}
        path = str(settings.pop("path", folder))
        TorchTrainEngine.plan(TrainEngineConfig(model_path=path, device="cpu", options=options, **settings), num_ranks)

    plan(2)
    plan(2, lora_rank=4)
    for name in ("tensor_parallel", "context_parallel"):
        with pytest.raises(ConfigError, match=name):
            plan(2, options={name: 2})
    with pytest.raises(ConfigError, match="round adapters"):
        plan(2, lora_rank=4, dtype="bfloat16")
    with pytest.raises(ConfigError, match="this model is of qwen3_moe"):
        plan(1, path=tiny_model(tmp_path, "qwen3_moe"))


def test_weights_of_a_bfloat16_sampler_are_what_the_trainer_computes_with(folder: Any) -> None:
    """Rounding every weight beforehand changes no bit."""
    one = engine(folder, dtype="bfloat16")
    before = one.logprobs(sequences())
    with torch.no_grad():
        for piece in one._policy.pieces:
            piece.local.copy_(piece.local.bfloat16())
    for found, wanted in zip(one.logprobs(sequences()), before, strict=True):
        np.testing.assert_array_equal(found, wanted)

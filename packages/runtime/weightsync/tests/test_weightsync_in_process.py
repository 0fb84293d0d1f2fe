"""The in-process stream hands tensors over, and its proof is of what the engine holds."""

import pytest
import torch
from weightsync_peers import Weights, are_equal

from offbeat_core import WeightStream, WeightSyncError
from offbeat_weightsync import InProcessStream


def test_the_engine_gets_every_tensor_and_proves_it(weights: Weights) -> None:
    stream: WeightStream = InProcessStream(weights.items(), 3, bucket_bytes=256)
    held = {name: tensor.clone() for name, tensor in stream}
    assert are_equal(held, weights)
    proof = stream.prove(held.__getitem__)
    assert (proof.version, proof.num_tensors) == (3, len(weights))
    assert len(proof.checksums) > 10
    assert all(len(checksum) == 16 for checksum in proof.checksums)


def test_the_proof_depends_on_every_byte_and_on_its_bucket_only(weights: Weights) -> None:
    def checksums(changed: str) -> tuple[str, ...]:
        tensors = {name: tensor.clone() for name, tensor in weights.items()}
        if changed:
            tensors[changed].view(-1).view(torch.uint8)[0] ^= 1
        return InProcessStream(tensors.items(), 1, bucket_bytes=64).prove(tensors.__getitem__).checksums

    for name in ("embed", "wide", "norm", "scale", "steps", "flags"):
        differing = sum(a != b for a, b in zip(checksums(""), checksums(name), strict=True))
        assert differing == 1, name


def test_floats_are_handed_out_in_the_dtype_asked_for(weights: Weights) -> None:
    stream = InProcessStream(weights.items(), 1, dtype="bfloat16", keep={"scale"})
    held = {name: tensor.clone() for name, tensor in stream}
    assert held["embed"].dtype == torch.bfloat16
    assert held["steps"].dtype == torch.int64
    assert torch.equal(held["wide"], weights["wide"].bfloat16())
    assert held["scale"].dtype == torch.float64
    stream.prove(held.__getitem__)
    held["scale"] = held["scale"].bfloat16()
    with pytest.raises(WeightSyncError, match="scale: planned as float64, the engine has bfloat16"):
        stream.prove(held.__getitem__)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda held: held.pop("norm"), "norm: was sent, but the engine holds no tensor of that name"),
        (lambda held: held.update(norm=held["norm"].float()), "norm: planned as bfloat16, the engine has float32"),
        (lambda held: held.update(wide=held["wide"].t()), r"wide: planned with shape \(1000, 3\), the engine has"),
        (lambda held: held["flags"].logical_not_(), "the engine holds other bytes than were sent, in bucket 0 of 1"),
    ],
)
def test_an_engine_that_holds_something_else_cannot_prove_it(weights: Weights, spoil, words: str) -> None:  # type: ignore[no-untyped-def]
    stream = InProcessStream(weights.items(), 1)
    held = {name: tensor.clone() for name, tensor in stream}
    spoil(held)
    with pytest.raises(WeightSyncError, match=words):
        stream.prove(held.__getitem__)


def test_a_name_that_comes_twice_is_refused() -> None:
    with pytest.raises(WeightSyncError, match="a: the name comes twice"):
        InProcessStream([("a", torch.ones(2)), ("a", torch.ones(2))], 1)

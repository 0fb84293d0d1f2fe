"""Weights arrive whole and proved, or every side says what went wrong and the next sync works: by each transport."""

import time

import pytest
from weightsync_peers import Sync, Weights, give, in_thread, plan_of, receive_all

from offbeat_core import WeightSyncError
from offbeat_weightsync import _receiver, new_address, open_sender


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("flip wide", "the engine holds other bytes than were sent, in bucket 3 of 5"),
        ("flip head", "the engine holds other bytes than were sent, in bucket 4 of 5"),
        ("lose norm", "norm: was sent, but the engine holds no tensor of that name"),
        ("reshape wide", "wide: planned with shape (1000, 3), the engine has (3000,)"),
        ("widen norm", "norm: planned as bfloat16, the engine has float64"),
        ("forget", "rollout-0 took the weights of version 1 but did not confirm them"),
        ("refuse wide", "ValueError: no room for wide"),
        ("refuse head", "ValueError: no room for head"),
    ],
)
def test_an_engine_that_does_not_hold_what_was_sent_fails_all_sides(sync: Sync, fault: str, words: str) -> None:
    trainer, bad, good = sync(fault)
    assert trainer.startswith(f"WeightSyncError: rollout-0 gave up: {words}")
    assert bad.removeprefix("WeightSyncError: ") == trainer.removeprefix("WeightSyncError: rollout-0 gave up: ")
    assert good == f"WeightSyncError: trainer-0 gave up: {trainer.removeprefix('WeightSyncError: ')}"


def test_a_false_proof_is_found(sync: Sync) -> None:
    trainer, *engines = sync("lie")
    found = "rollout-0 holds other bytes than were sent, in bucket 0 of 5"
    assert trainer.startswith(f"WeightSyncError: {found}")
    assert all(said.startswith(f"WeightSyncError: trainer-0 gave up: {found}") for said in engines)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("lost", "WeightSyncError: head: planned, but the trainer's tensors ended before it"),
        ("extra", "WeightSyncError: extra: names and order must be those of the plan"),
        ("again", "WeightSyncError: wide: it was sent already: the name comes twice"),
        ("twice", "WeightSyncError: embed: came where wide was planned; it was sent already: the name comes twice"),
        ("swap", "WeightSyncError: wide: came where embed was planned; names and order must be those of the plan"),
        ("shape", "WeightSyncError: wide: planned with shape (1000, 3), the trainer has (3, 1000)"),
        ("raise", "RuntimeError: the merge of LoRA failed"),
    ],
)
def test_tensors_that_differ_from_the_plan_fail_all_sides(sync: Sync, fault: str, words: str) -> None:
    trainer, *engines = sync(fault)
    assert trainer == words
    for said in engines:
        assert said == f"WeightSyncError: trainer-0 gave up: {words.removeprefix('WeightSyncError: ')}"


@pytest.mark.parametrize("fault", ["die at embed", "die at wide", "die at head"])
def test_an_engine_that_dies_is_named_at_once_on_all_sides(sync: Sync, fault: str) -> None:
    begin = time.monotonic()
    trainer, dead, other = sync(fault)
    assert time.monotonic() - begin < 15  # within seconds: the deadline is 30
    assert dead == ""
    assert trainer.startswith("WeightSyncError: rollout-0 hung up or died"), trainer
    assert other.startswith("WeightSyncError: trainer-0 gave up: rollout-0 hung up or died"), other


@pytest.mark.parametrize("host", ["", "127.0.0.1"], ids=["shared-memory", "tcp"])
def test_a_trainer_refuses_an_engine_whose_plan_differs(
    weights: Weights, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """Such as one of another release, which lays tensors out otherwise and does not compare digests itself."""
    ready = _receiver.Ready
    monkeypatch.setattr(_receiver, "Ready", lambda digest: ready("00ff"))
    plan = plan_of(weights)
    sender = open_sender(new_address(host), plan, deadline_s=30)
    with in_thread(lambda: receive_all(sender.address)) as said:
        with pytest.raises(WeightSyncError, match=f"the plans differ: {plan.digest} here, 00ff at"):
            sender.send(give(weights), 1, 1)
        sender.close()
    assert f"the plans differ: {plan.digest} here, 00ff at" in str(said[0])

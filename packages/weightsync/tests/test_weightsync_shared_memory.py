"""Shared memory alone: where a sender listens."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from weightsync_peers import in_thread, receive_all

from offbeat_types import WeightSyncError
from offbeat_weightsync import BucketPlan, SharedMemorySender, _addresses, _sender, describe_tensors, receive
from offbeat_weightsync._addresses import kernel_address


def make_sender(address: str, weights: dict[str, Tensor]) -> SharedMemorySender:
    return SharedMemorySender(address, BucketPlan.build(describe_tensors(weights.items()), 4096), deadline_s=30)


def test_an_engine_without_a_sender_says_so(address: str) -> None:
    with (
        pytest.raises(WeightSyncError, match=f"no sender listens at {address}: Connection refused"),
        receive(address, 1, 30),
    ):
        pass


def test_a_socket_may_be_a_file_which_goes_with_the_sender(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    path = os.path.relpath(tmp_path / "weights")
    with make_sender(path, weights) as sender:
        with pytest.raises(WeightSyncError, match=r"cannot listen for receivers at .*weights: Address already in use"):
            make_sender(path, weights)
        thread, found = in_thread(lambda: receive_all(path))
        sender.send(weights.items(), 1, 1)
        thread.join()
    held: Any = found[0]
    assert all(torch.equal(held[name], weights[name]) for name in weights)
    assert not Path(path).exists()


def test_who_connects_and_says_nothing_does_not_stop_a_sync(
    address: str, weights: dict[str, Tensor], start_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sender, "_GREETING_S", 2.0)
    with make_sender(address, weights) as sender, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.connect(kernel_address(address))  # as an engine does that is stopped in the middle
        engine = start_engine(address)
        sender.send(weights.items(), 1, 1)
        assert engine.next_text().startswith("holds 8 tensors")


def test_an_engine_takes_no_weights_from_another_users_process(
    address: str, weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_addresses.os, "getuid", lambda: os.geteuid() + 1)  # as if the sender's were another
    with (
        make_sender(address, weights),
        pytest.raises(WeightSyncError, match=f"who listens at {address} is another user's process"),
        receive(address, 1, 5),
    ):
        pass


def test_a_socket_path_that_is_too_long_is_refused(weights: dict[str, Tensor]) -> None:
    with pytest.raises(WeightSyncError, match="a socket path has at most 100 bytes; use new_socket_path"):
        make_sender("/tmp/" + "x" * 100, weights)


def test_an_engine_that_writes_into_the_stream_spoils_nobody_elses_weights(
    address: str, weights: dict[str, Tensor], start_engine: Any
) -> None:
    with make_sender(address, weights) as sender:
        good, bad = (
            start_engine(sender.address, name="rollout-0"),
            start_engine(sender.address, "scribble", name="rollout-1"),
        )
        with pytest.raises(WeightSyncError, match=r"^rollout-1 gave up: the engine holds other bytes"):
            sender.send(weights.items(), 1, 2)
        assert good.next_text().startswith("WeightSyncError: trainer-0 gave up: rollout-1 gave up")
        assert bad.next_text().startswith("WeightSyncError: the engine holds other bytes")

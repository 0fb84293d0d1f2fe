"""Where a sender listens, and which clients are admitted."""

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from weightsync_peers import Weights, are_equal, give, in_thread, plan_of, receive_all, receiving

from offbeat_core import DeadlineError, WeightSyncError
from offbeat_weightsync import SharedMemorySender, TcpSender, _addresses, _sender, new_address, open_sender
from offbeat_weightsync._addresses import TcpAddress, kernel_address
from offbeat_weightsync._connection import Connection, Deadline, Join


@pytest.fixture
def sender(weights: Weights) -> Iterator[TcpSender]:
    with TcpSender(new_address("127.0.0.1"), plan_of(weights), deadline_s=20) as sender:
        yield sender


@pytest.fixture
def place(sender: TcpSender) -> TcpAddress:
    place = TcpAddress.parse(sender.address)
    assert place is not None
    return place


def test_an_address_has_host_port_and_a_token_that_errors_do_not_show() -> None:
    text = new_address("127.0.0.1", 7000)
    address = TcpAddress.parse(text)
    assert address is not None
    assert (address.host, address.port, len(address.token)) == ("127.0.0.1", 7000, 32)
    assert address.with_token() == text
    assert str(address) == "tcp://127.0.0.1:7000"
    assert new_address("127.0.0.1") != new_address("127.0.0.1")
    assert str(TcpAddress("::1", 7, "secret")) == "tcp://[::1]:7"
    assert TcpAddress.parse(TcpAddress("::1", 7, "secret").with_token()) == TcpAddress("::1", 7, "secret")
    assert TcpAddress.parse(new_address()) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*"])
def test_an_address_names_a_host_that_receivers_can_reach(host: str) -> None:
    with pytest.raises(WeightSyncError, match="receivers must know where to connect: give this machine's own address"):
        new_address(host)


@pytest.mark.parametrize("text", ["tcp://127.0.0.1:7", "tcp://secret@127.0.0.1", "tcp://secret@:7", "tcp://secret@h:x"])
def test_an_address_that_lacks_a_part_is_refused_without_showing_its_token(text: str, weights: Weights) -> None:
    with pytest.raises(WeightSyncError, match=r"an address over TCP reads tcp://TOKEN@HOST:PORT") as caught:
        open_sender(text, plan_of(weights))
    assert "secret" not in str(caught.value)


def test_a_port_that_is_taken_is_named(sender: TcpSender) -> None:
    with pytest.raises(WeightSyncError, match=r"cannot listen .* at tcp://127.0.0.1:\d+: Address already in use"):
        TcpSender(sender.address, sender.plan)


def test_a_socket_may_be_a_file_which_goes_with_the_sender(tmp_path: Path, weights: Weights) -> None:
    path = os.path.relpath(tmp_path / "weights")
    with SharedMemorySender(path, plan_of(weights), deadline_s=30) as sender:
        with pytest.raises(WeightSyncError, match=r"cannot listen for receivers at .*weights: Address already in use"):
            SharedMemorySender(path, plan_of(weights))
        with receiving(path) as held:
            sender.send(weights.items(), 1, 1)
    assert are_equal(held[0], weights)
    assert not Path(path).exists()


def test_a_socket_path_that_is_too_long_is_refused(weights: Weights) -> None:
    with pytest.raises(WeightSyncError, match="a socket path has at most 100 bytes; use new_socket_path"):
        SharedMemorySender("/tmp/" + "x" * 100, plan_of(weights))


def test_an_engine_takes_no_weights_from_another_users_process(
    address: str, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_addresses.os, "getuid", lambda: os.geteuid() + 1)  # as if the sender's were another
    with (
        SharedMemorySender(address, plan_of(weights), deadline_s=30),
        pytest.raises(WeightSyncError, match=f"the sender at {address} is another user's process"),
    ):
        receive_all(address, deadline_s=5)


def test_an_engine_that_writes_into_the_stream_spoils_no_other_engines_weights(
    address: str, weights: Weights, start_engine: Any
) -> None:
    with SharedMemorySender(address, plan_of(weights), deadline_s=30) as sender:
        good, bad = start_engine(address), start_engine(address, "scribble", name="rollout-1")
        with pytest.raises(WeightSyncError, match=r"^rollout-1 gave up: the engine holds other bytes"):
            sender.send(weights.items(), 1, 2)
    assert good.next_text().startswith("WeightSyncError: trainer-0 gave up: rollout-1 gave up")
    assert bad.next_text().startswith("WeightSyncError: the engine holds other bytes")


def test_an_engine_with_another_token_is_disconnected_and_the_sync_continues(
    sender: TcpSender, place: TcpAddress, weights: Weights
) -> None:
    def come_after_the_unknown_client() -> object:
        with receiving(place._replace(token="0" * 32).with_token()) as refused:
            pass
        return [refused[0], receive_all(sender.address)]

    with in_thread(come_after_the_unknown_client) as found:  # the unknown client is answered within the sync
        sender.send(weights.items(), 1, 1)
    refused, held = found[0]  # type: ignore[misc]
    assert are_equal(held, weights)
    assert f"{place} did not show that it knows this address's token" in str(refused)


def test_an_engine_finds_a_false_sender_out() -> None:
    def pretend() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.sendall(bytes(32))
            assert len(sock.recv(64)) == 64
            sock.sendall(bytes(32))
            sock.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = TcpAddress("127.0.0.1", listener.getsockname()[1], "a token").with_token()
        with in_thread(pretend), receiving(address) as found:
            pass
    assert "it answered with another token" in str(found[0])
    assert "a token" not in str(found[0])


@pytest.mark.parametrize(
    "said", [b"", b"half a token", b"GET / HTTP/1.1\r\n" * 20], ids=["nothing", "half", "nonsense"]
)
def test_a_client_that_does_not_speak_our_protocol_does_not_stop_a_sync(
    sender: TcpSender, place: TcpAddress, weights: Weights, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sender, "_GREETING_S", 100.0)
    with contextlib.ExitStack() as connections:
        for _ in range(2):
            connections.enter_context(socket.create_connection((place.host, place.port))).sendall(said)
        with receiving(sender.address) as held:
            sender.send(weights.items(), 1, 1)
    assert are_equal(held[0], weights)


def test_a_client_that_has_shown_the_token_is_not_disconnected_for_an_unknown_one(
    sender: TcpSender, place: TcpAddress, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sender, "_MAX_PENDING", 2)
    with contextlib.ExitStack() as connections, in_thread(lambda: sender.send(weights.items(), 1, 2)) as sent:
        receivers = [_addresses.connect(sender.address, Deadline("a sync", 20)) for _ in range(2)]
        for _ in range(4):
            pending = socket.create_connection((place.host, place.port))
            connections.enter_context(pending).sendall(b"half a token")
        time.sleep(0.5)  # the sender sees them
        receivers[0].send(Join("rollout-0", 2))  # of a version that is not sent, which ends the sync
    assert "asked for version 2" in str(sent[0])


def test_a_silent_client_on_this_machine_does_not_stop_a_sync(
    address: str, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sender, "_GREETING_S", 2.0)
    with (
        SharedMemorySender(address, plan_of(weights), deadline_s=30) as sender,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent,
    ):
        silent.connect(kernel_address(address))  # as an engine does that is stopped in the middle
        with receiving(address) as held:
            sender.send(weights.items(), 1, 1)
    assert are_equal(held[0], weights)


def test_unknown_clients_that_stop_in_the_middle_do_not_make_a_sync_miss_its_deadline(
    sender: TcpSender, place: TcpAddress, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sender, "_GREETING_S", 100.0)  # the sender has less patience than that in all
    begin = time.monotonic()
    with contextlib.ExitStack() as connections:
        for _ in range(3):
            pending = connections.enter_context(socket.create_connection((place.host, place.port)))
            pending.sendall(b"half a token")
        with pytest.raises(DeadlineError, match="for 1 of 1 receivers to connect"):
            sender.send(weights.items(), 1, 1, deadline_s=1)
    assert time.monotonic() - begin < 50


def test_a_connection_that_is_lost_between_two_living_sides_fails_both_before_the_deadline(
    sender: TcpSender, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections: list[socket.socket] = []

    def accepted(self: TcpSender, sock: socket.socket, connection: Connection) -> object:
        connections.append(sock)
        return greet(self, sock, connection)

    def give_until_cut() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in give(weights):
            if name == "wide":
                connections[0].shutdown(socket.SHUT_RDWR)
            yield name, tensor

    greet = TcpSender._greet
    monkeypatch.setattr(TcpSender, "_greet", accepted)
    begin = time.monotonic()
    with (
        receiving(sender.address) as found,
        pytest.raises(WeightSyncError, match="rollout-0 hung up or died before all was sent"),
    ):
        sender.send(give_until_cut(), 1, 1)
    assert time.monotonic() - begin < 15  # of 20
    assert "trainer-0 hung up or died while bucket" in str(found[0])


def test_an_engine_that_comes_early_for_the_next_version_waits_for_it(sender: TcpSender, weights: Weights) -> None:
    with receiving(sender.address, 1):
        sender.send(weights.items(), 1, 1)
    with receiving(sender.address, 2) as held:
        time.sleep(0.2)
        weights["wide"].add_(1)
        sender.send(weights.items(), 2, 1)
    assert are_equal(held[0], weights)


def test_several_engines_take_turns_to_connect_and_all_hold_the_weights(sender: TcpSender, weights: Weights) -> None:
    with contextlib.ExitStack() as engines:
        held = [engines.enter_context(receiving(sender.address)) for _ in range(4)]
        sender.send(weights.items(), 1, 3)  # the fourth stays for the next sync
        sender.send(weights.items(), 1, 1)
    assert all(are_equal(each[0], weights) for each in held)


def test_an_engine_that_has_given_up_waiting_does_not_fail_the_next_one(sender: TcpSender, weights: Weights) -> None:
    with pytest.raises(DeadlineError):
        receive_all(sender.address, 2, deadline_s=0.3)
    with receiving(sender.address, 2) as held:
        sender.send(weights.items(), 2, 1)
    assert are_equal(held[0], weights)

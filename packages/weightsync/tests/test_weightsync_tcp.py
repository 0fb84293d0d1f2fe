"""TCP alone: addresses, and who is let in."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from weightsync_peers import in_thread, receive_all

from offbeat_types import DeadlineError, WeightSyncError
from offbeat_weightsync import BucketPlan, TcpSender, _sender, describe_tensors, new_address, open_sender
from offbeat_weightsync._addresses import TcpAddress
from offbeat_weightsync._connection import Connection


@pytest.fixture
def sender(weights: dict[str, Tensor]) -> TcpSender:
    return TcpSender(new_address("127.0.0.1"), BucketPlan.build(describe_tensors(weights.items()), 4096), deadline_s=20)


def take(address: str, version: int = 1, deadline_s: float = 20) -> tuple[threading.Thread, list[object]]:
    """Receive in a thread; the list gets the tensors or the error."""
    return in_thread(lambda: receive_all(address, version, deadline_s))


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
def test_an_address_that_lacks_a_part_is_refused_without_showing_its_token(
    text: str, weights: dict[str, Tensor]
) -> None:
    with pytest.raises(WeightSyncError, match=r"an address over TCP reads tcp://TOKEN@HOST:PORT") as caught:
        open_sender(text, BucketPlan.build(describe_tensors(weights.items())))
    assert "secret" not in str(caught.value)


def test_a_port_that_is_taken_is_named(sender: TcpSender) -> None:
    with (
        sender,
        pytest.raises(WeightSyncError, match=r"cannot listen .* at tcp://127.0.0.1:\d+: Address already in use"),
    ):
        TcpSender(sender.address, sender.plan)


def test_an_engine_with_another_token_is_sent_away_and_the_sync_goes_on(
    sender: TcpSender, weights: dict[str, Tensor]
) -> None:
    place = TcpAddress.parse(sender.address)
    assert place is not None
    with sender:
        stranger, refused = take(place._replace(token="0" * 32).with_token())
        friend, held = in_thread(lambda: (stranger.join(), receive_all(sender.address))[1])  # answered in a sync
        sender.send(weights.items(), 1, 1)
        friend.join()
    assert isinstance(held[0], dict)
    assert all(torch.equal(held[0][name], weights[name]) for name in weights)
    assert f"{place} did not show that it knows this address's token" in str(refused[0])


def test_an_engine_finds_a_false_sender_out(weights: dict[str, Tensor]) -> None:
    def pretend() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.sendall(bytes(32))
            assert len(sock.recv(64)) == 64
            sock.sendall(bytes(32))
            sock.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=pretend)
        thread.start()
        address = TcpAddress("127.0.0.1", listener.getsockname()[1], "a token").with_token()
        receiver, found = take(address)
        receiver.join()
        thread.join()
    assert "it answered with another token" in str(found[0])
    assert "a token" not in str(found[0])


@pytest.mark.parametrize("said", [b"", b"half a token"], ids=["nothing", "half"])
def test_who_connects_and_says_nothing_does_not_stop_a_sync(
    sender: TcpSender, weights: dict[str, Tensor], said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sender, "_GREETING_S", 100.0)
    place = TcpAddress.parse(sender.address)
    assert place is not None
    with sender, contextlib.ExitStack() as strangers:
        for _ in range(2):
            strangers.enter_context(socket.create_connection((place.host, place.port))).sendall(said)
        friend, held = take(sender.address)
        sender.send(weights.items(), 1, 1)
        friend.join()
    assert isinstance(held[0], dict)


def test_what_is_no_message_does_not_stop_a_sync(sender: TcpSender, weights: dict[str, Tensor]) -> None:
    place = TcpAddress.parse(sender.address)
    assert place is not None
    with sender, socket.create_connection((place.host, place.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n" * 20)
        friend, held = take(sender.address)
        sender.send(weights.items(), 1, 1)
        friend.join()
    assert isinstance(held[0], dict)


def test_strangers_that_stop_in_the_middle_do_not_make_a_sync_miss_its_deadline(
    sender: TcpSender, weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sender, "_GREETING_S", 100.0)  # the sender has less patience than that in all
    place = TcpAddress.parse(sender.address)
    assert place is not None
    begin = time.monotonic()
    with sender, contextlib.ExitStack() as strangers:
        for _ in range(3):
            stranger = strangers.enter_context(socket.create_connection((place.host, place.port)))
            stranger.sendall(b"half a token")
        with pytest.raises(DeadlineError, match="for 1 of 1 receivers to connect"):
            sender.send(weights.items(), 1, 1, deadline_s=1)
    assert time.monotonic() - begin < 50


def test_a_connection_that_is_lost_between_two_living_sides_fails_both_before_the_deadline(
    sender: TcpSender, weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    connections: list[socket.socket] = []

    def accepted(self: TcpSender, sock: socket.socket, connection: Connection) -> object:
        connections.append(sock)
        return greet(self, sock, connection)

    def give() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights.items():
            if name == "wide":
                connections[0].shutdown(socket.SHUT_RDWR)
            yield name, tensor

    greet = TcpSender._greet
    monkeypatch.setattr(TcpSender, "_greet", accepted)
    begin = time.monotonic()
    with sender:
        receiver, found = take(sender.address)
        with pytest.raises(WeightSyncError, match="rollout-0 hung up or died before all was sent"):
            sender.send(give(), 1, 1)
        receiver.join()
    assert time.monotonic() - begin < 15  # of 20
    assert "trainer-0 hung up or died while bucket" in str(found[0])


def test_an_engine_that_comes_early_for_the_next_version_waits_for_it(
    sender: TcpSender, weights: dict[str, Tensor]
) -> None:
    with sender:
        now, held = take(sender.address, 1)
        sender.send(weights.items(), 1, 1)
        now.join()
        early, later = take(sender.address, 2)
        time.sleep(0.2)
        weights["wide"].add_(1)
        sender.send(weights.items(), 2, 1)
        early.join()
    assert isinstance(held[0], dict)
    assert isinstance(later[0], dict)
    assert torch.equal(later[0]["wide"], weights["wide"])


def test_several_engines_take_turns_to_connect_and_all_hold_the_weights(
    sender: TcpSender, weights: dict[str, Tensor]
) -> None:
    with sender:
        engines = [take(sender.address) for _ in range(4)]
        proofs = sender.send(weights.items(), 1, 3)  # the fourth stays for the next sync
        proofs += sender.send(weights.items(), 1, 1)
        for thread, _ in engines:
            thread.join()
    assert all(isinstance(found[0], dict) for _, found in engines)
    assert len(set(proofs)) == 1


def test_an_engine_that_has_given_up_waiting_does_not_fail_the_next_one(
    sender: TcpSender, weights: dict[str, Tensor]
) -> None:
    with sender:
        thread, found = take(sender.address)
        sender.send(weights.items(), 1, 1)
        thread.join()
        hasty, gone = take(sender.address, 2, deadline_s=0.3)
        hasty.join()
        patient, held = take(sender.address, 2)
        sender.send(weights.items(), 2, 1)
        patient.join()
    assert isinstance(found[0], dict)
    assert isinstance(gone[0], DeadlineError)
    assert isinstance(held[0], dict)

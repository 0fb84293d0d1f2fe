"""The processes of a job of torchrun: only those with its token and its configuration are let in."""

import asyncio
import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from offbeat_actors import ClusterConfig, run_on_driver
from offbeat_actors._server import Server
from offbeat_actors._wire import Channel, SocketStream, Stop, write_frame
from offbeat_actors.torchrun import TorchrunLauncher
from offbeat_actors.torchrun._handshake import (
    HandshakeError,
    Hello,
    Welcome,
    admit,
    config_digests,
    differing,
    introduce,
    read_message,
    write_message,
)
from offbeat_actors.torchrun._job import Job
from offbeat_actors.torchrun._member import Member, _connect
from offbeat_actors.torchrun._members import Members
from offbeat_core import ConfigError, OffbeatError

HELLO = Hello(1, 0, "gpu-2", 7, 8.0, 2.0**30, "", 0, 0, {"offbeat-actors": "0.2.0"}, {"model": "ab"})
VARIABLES = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu-1", "MASTER_PORT": "29500"}


@dataclass(frozen=True)
class Config:
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


def meet(driver_token: str, member_token: str) -> tuple[Hello | HandshakeError, Welcome | HandshakeError]:
    """Return what the driver and a member learn of each other."""
    ours, theirs = socket.socketpair()
    found: list[Hello | HandshakeError] = []

    def drive() -> None:
        with ours:
            try:
                found.append(admit(ours, driver_token))
                write_message(ours, Welcome())
            except HandshakeError as error:
                found.append(error)

    driving = threading.Thread(target=drive)
    driving.start()
    with theirs:
        try:
            welcome: Welcome | HandshakeError = introduce(theirs, member_token, HELLO)
        except HandshakeError as error:
            welcome = error
    driving.join()
    return found[0], welcome


def test_a_process_with_the_token_is_let_in() -> None:
    assert meet("secret", "secret") == (HELLO, Welcome())


def test_nothing_is_read_from_a_process_with_another_token() -> None:
    driver, member = meet("secret", "guess")
    assert "does not know the token" in str(driver)
    assert isinstance(member, HandshakeError)


def test_a_message_without_bound_is_refused_before_it_is_read() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall((1 << 31).to_bytes(4, "little"))
        with pytest.raises(HandshakeError, match="2147483648 bytes, and 1048576 are the most"):
            read_message(ours, Hello)


def test_a_message_that_trickles_in_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat_actors.torchrun._handshake.HANDSHAKE_S", 0.3)
    ours, theirs = socket.socketpair()

    def trickle() -> None:
        for _ in range(80):  # more than the message has
            with contextlib.suppress(OSError):
                theirs.send(b"x")
            time.sleep(0.02)

    sending = threading.Thread(target=trickle, daemon=True)
    with ours, theirs:
        sending.start()
        with pytest.raises(HandshakeError, match="timed out"):
            admit(ours, "secret")
        sending.join()


def test_another_configuration_is_named_by_its_section() -> None:
    other = Config(ClusterConfig(num_nodes=2))
    assert differing(config_digests(Config()), config_digests(Config())) == []
    assert differing(config_digests(Config()), config_digests(other)) == ["cluster"]


class SharedStore:
    """Holds what torch's TCPStore would, for processes that are threads here."""

    def __init__(self) -> None:
        self._held: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self._held[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self._held for key in keys)

    def get(self, key: str) -> bytes:
        return self._held[key]


@dataclass(frozen=True)
class LocalJob(Job):
    """A job whose processes are threads of this one."""

    store: SharedStore = field(default_factory=SharedStore)

    def open_store(self, deadline_s: float) -> SharedStore:
        return self.store


class MemberServer(Server):
    def _leave_without_parent(self) -> None:
        raise AssertionError("it would exit with code 70")


async def serve(sock: socket.socket) -> int:
    member = Member()
    await MemberServer(Channel(SocketStream(sock)), ThreadPoolExecutor(1), role=member).run()
    return member.exit_code


def gather(*hellos: Hello, size: int, serves: bool = False) -> str:
    """Let these processes join a driver, beside one that guesses its token.

    Args:
        hellos: of the processes.
        size: number of processes that the driver waits for, itself included.
        serves: they stay until the driver ends, and get its exit code.

    Returns:
        The driver's error, "" where all have come.
    """
    store, codes, ends = SharedStore(), list[int](), threading.Event()

    def join(hello: Hello) -> None:
        job = LocalJob(hello.rank, size, hello.local_rank, "127.0.0.1", 9, hosts_store=False, store=store)
        try:
            with _connect(job, hello, 20.0) as sock:
                if not serves:
                    ends.wait(20)
                else:
                    codes.append(asyncio.run(serve(sock)))
        except OffbeatError:
            assert not serves

    def guess() -> None:
        driver = LocalJob(1, size, 0, "127.0.0.1", 9, hosts_store=False, store=store).find_driver(store, 1e9, 20.0)
        address = (driver.hosts[0], driver.port)
        with socket.create_connection(address, timeout=20) as sock, pytest.raises(HandshakeError):
            introduce(sock, "guess", HELLO)

    joining = [threading.Thread(target=guess, daemon=True)]
    joining += [threading.Thread(target=join, args=(hello,), daemon=True) for hello in hellos]
    for each in joining:
        each.start()
    job, own = LocalJob(0, size, 0, "127.0.0.1", 9, hosts_store=True, store=store), replace(HELLO, rank=0, host="gpu-1")
    try:
        members = Members(job, own, ClusterConfig(start_timeout_s=2.0 if len(hellos) < size - 1 else 20.0))
        assert [node.name for node in members.nodes()] == ["gpu-1", "gpu-2"]
        members.end(7)
    except OffbeatError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        ends.set()
        for each in joining:
            each.join(20)
    assert codes == [7] * len(hellos)
    return ""


def test_a_job_begins_when_all_its_processes_are_there() -> None:
    assert gather(HELLO, replace(HELLO, rank=2, local_rank=1), size=3, serves=True) == ""


class QuickDriver:
    """A stream whose other side asks for the end, and is gone as soon as it has the answer."""

    def __init__(self) -> None:
        self._unread = bytearray(write_frame(Stop()).tobytes())
        self._answered = asyncio.Event()

    async def receive_into(self, buffer: memoryview) -> int:
        if not self._unread:
            await self._answered.wait()
        part = bytes(self._unread[: len(buffer)])
        buffer[: len(part)] = part
        del self._unread[: len(part)]
        return len(part)

    async def send(self, data: memoryview) -> None:
        self._answered.set()

    def close(self) -> None:
        pass


def test_a_member_that_was_asked_to_end_does_not_miss_its_driver() -> None:
    async def serve_quick_driver() -> None:
        await MemberServer(Channel(QuickDriver()), ThreadPoolExecutor(1), role=Member()).run()

    asyncio.run(serve_quick_driver())


def test_ranks_that_do_not_come_are_named() -> None:
    said = gather(HELLO, size=4)
    assert said.startswith("DeadlineError")
    assert "ranks 2, 3 of 4" in said


def test_two_processes_cannot_claim_one_rank() -> None:
    assert "rank 1 on gpu-2 is there twice, or not one of the 3 ranks" in gather(HELLO, HELLO, size=3)


def test_a_process_with_other_versions_or_options_is_refused() -> None:
    said = gather(replace(HELLO, versions={"offbeat-actors": "0.1.9"}), size=2)
    assert "rank 1 on gpu-2 has other versions than rank 0: offbeat-actors 0.1.9 instead of 0.2.0" in said
    said = gather(replace(HELLO, sections={"model": "cd"}), size=2)
    assert "rank 1 on gpu-2 has another configuration than rank 0, in [model]" in said


def test_a_start_without_torchrun_says_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.argv", ["sft-app", "train", "my.toml"])
    with pytest.raises(ConfigError, match=r"RANK, .* not set; .*: torchrun --nnodes N .* -m \w+ train my.toml"):
        TorchrunLauncher.drive(Config(), lambda: 0)
    with pytest.raises(ConfigError, match="plan for other nodes with --cluster 2x8"):
        TorchrunLauncher.nodes(ClusterConfig())


def test_the_variables_of_a_job_are_read_once_and_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    assert Job.take("sft_app train my.toml") == Job(1, 4, 1, "gpu-1", 29500, hosts_store=False)
    with pytest.raises(ConfigError, match="RANK, WORLD_SIZE, LOCAL_RANK"):
        Job.take("sft_app train my.toml")


def test_several_processes_of_torchrun_do_not_each_begin_a_local_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"started 2 processes.*add --cluster\.launcher torchrun"):
        run_on_driver(Config(), lambda: 0)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert run_on_driver(Config(), lambda: 3) == 3

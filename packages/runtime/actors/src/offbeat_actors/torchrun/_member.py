"""A process of the job that is not the driver: the agent of its node, or one that only waits for the end."""

import asyncio
import os
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from offbeat_actors._agent import NodeAgent
from offbeat_actors._server import EXIT_PARENT_GONE, Server
from offbeat_actors._spec import ClusterConfig
from offbeat_actors._wire import Channel, SocketStream
from offbeat_actors.torchrun._handshake import (
    HANDSHAKE_S,
    Hello,
    config_digests,
    installed_versions,
    introduce,
    watch_peer,
)
from offbeat_actors.torchrun._job import DriverAddress, Job
from offbeat_core import ConfigError, DeadlineError, available_devices, load_backend
from offbeat_placement import local_node

_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that ask a run to end."""
_RETRY_S: Final = 0.5
_REACH_S: Final = 5.0
"""Time for a host to accept a connection: the driver names several, of which some may lead nowhere."""


class Member(NodeAgent):
    """The agent of a node.

    Attributes:
        exit_code: of the driver, once it has said it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.exit_code = EXIT_PARENT_GONE
        self._signal = asyncio.get_running_loop().create_future()

    async def asked_to_end(self) -> int:
        """Wait for a signal that asks this process to end, and return its number."""
        return int(await asyncio.shield(self._signal))

    def take_signal(self, number: int) -> None:
        """Leave a signal for the driver: it is the driver that ends this node, after it has saved a checkpoint."""
        if not self._signal.done():
            self._signal.set_result(number)

    async def leave(self, exit_code: int) -> None:
        """Take the exit code of the driver, which ends now."""
        self.exit_code = exit_code


class _MemberServer(Server):
    def _leave_without_parent(self) -> None:
        print("the driver (rank 0) is gone: this node ends its roles and exits", file=sys.stderr, flush=True)
        super()._leave_without_parent()


def serve_member(job: Job, cluster: ClusterConfig, config: Any) -> int:
    """Run what the driver asks for on this node until it ends, and return its exit code.

    Where the driver is gone without a word, the process exits with code 70. Its roles end with it in any case.

    Args:
        job: of this process.
        cluster: deadlines.
        config: of the run, to be compared with the driver's.

    Raises:
        ConfigError: the driver has another configuration or other versions.
        DeadlineError: there is no driver in `start_timeout_s`.
    """
    with _connect(job, describe_member(job, config), cluster.start_timeout_s) as sock:
        return asyncio.run(_serve(sock))


async def _serve(sock: socket.socket) -> int:
    member, loop = Member(), asyncio.get_running_loop()
    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as SIGHUP under nohup
            loop.add_signal_handler(number, member.take_signal, number)
    await _MemberServer(Channel(SocketStream(sock)), ThreadPoolExecutor(1), role=member).run()
    return member.exit_code


def describe_member(job: Job, config: Any) -> Hello:
    """Return what this process says of itself and of its node."""
    node = local_node()
    kind, number, num_bytes = _accelerators()
    return Hello(
        rank=job.rank,
        local_rank=job.local_rank,
        host=node.name,
        pid=os.getpid(),
        num_cpus=node.num_cpus,
        memory_bytes=node.memory_bytes,
        device_kind=kind,
        num_devices=number,
        device_bytes=num_bytes,
        versions={"Python": sys.version.split()[0], **installed_versions()},
        sections=config_digests(config),
    )


def _accelerators() -> tuple[str, int, int]:
    """Return kind, number and memory of the accelerators that a process can be shown a part of; the first such kind."""
    for kind, number in available_devices().items():
        backend = load_backend("offbeat.device", kind)
        if kind != "cpu" and backend.visible_variable:
            return kind, number, int(backend.memory_of_smallest())
    return "", 0, 0


def _connect(job: Job, hello: Hello, deadline_s: float) -> socket.socket:
    """Return the connection to the driver, which has admitted this process."""
    end_s = time.monotonic() + deadline_s
    store = job.open_store(deadline_s)
    failures: dict[str, str] = {}
    while time.monotonic() < end_s:
        # Read again each time: of a job that torchrun has started anew the store may still hold the former driver.
        driver = job.find_driver(store, end_s, deadline_s)
        for host in driver.hosts:
            try:
                return _join(host, driver, hello)
            except OSError as error:
                failures[f"{host}:{driver.port}"] = str(error)
        time.sleep(_RETRY_S)
    found = "; ".join(f"{where}: {why}" for where, why in failures.items())
    advice = f"{found}: is its port open between the nodes?"
    raise DeadlineError(f"rank {job.rank} of {job.size}", "the driver, rank 0, to admit it", deadline_s, advice)


def _join(host: str, driver: DriverAddress, hello: Hello) -> socket.socket:
    sock = socket.create_connection((host, driver.port), timeout=_REACH_S)
    try:
        sock.settimeout(HANDSHAKE_S)
        watch_peer(sock)
        refusal = introduce(sock, driver.token, hello).refusal
    except BaseException:
        sock.close()
        raise
    if refusal:
        sock.close()
        raise ConfigError(refusal)
    return sock

"""A node agent that is a Ray actor, as the driver has it."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable
from typing import Any, Final, TypeVar

from offbeat_actors._agent import Order, Report, Started, decode, encode
from offbeat_actors._remote import AgentLink, AgentLostError

T = TypeVar("T")

_ASK_S: Final = 5.0
"""Time for Ray to answer whether a node lives."""
_AGAIN_S: Final = 0.1
_REACH_S: Final = 2.0
"""Time for a node to accept a connection."""


class RayLink(AgentLink):
    """A node agent that is a Ray actor.

    Args:
        ray: the module.
        actor: its handle.
        node: Ray's id of its node.
        address: of its node.
    """

    def __init__(self, ray: Any, actor: Any, node: str, address: str) -> None:
        super().__init__(address)
        self.ray, self.actor, self.node = ray, actor, node

    async def start_process(self, order: Order) -> Started:
        """Start a process: see `AgentLink`."""
        return decode(await self._answer(self.actor.start_process.remote(encode(order))), Started)

    async def send(self, key: str, data: bytes) -> None:
        """Write to the socket of a process: see `AgentLink`. Whether the agent is lost is `receive`'s to find out."""
        try:
            await self.actor.send.remote(key, data)
        except self.ray.exceptions.RayError as error:
            raise ConnectionError(str(error)) from error

    async def receive(self, key: str, patience_s: float) -> Report:
        """Wait for news of a process: see `AgentLink`."""
        return decode(await self._answer(self.actor.receive.remote(key, patience_s)), Report)

    async def state(self, key: str) -> str:
        """Return what a process is doing: see `AgentLink`."""
        return str(await self._answer(self.actor.state.remote(key)))

    def send_signal(self, key: str, number: int) -> None:
        """Send a signal: see `AgentLink`."""
        self.actor.send_signal.remote(key, number)

    async def _answer(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except self.ray.exceptions.RayError as error:
            raise AgentLostError(await self.explain_loss(error)) from error

    def kill(self) -> None:
        """End it and all its processes."""
        with contextlib.suppress(self.ray.exceptions.RayError):
            self.ray.kill(self.actor)

    async def explain_loss(self, error: BaseException) -> str:
        """Say in one line how it was lost, and remember that it is."""
        alive = True
        with contextlib.suppress(TimeoutError):  # there is no answer where the driver itself is cut off
            async with asyncio.timeout(_ASK_S):
                error = await self._final_word(error)
                alive = await asyncio.to_thread(is_node_alive, self.ray, self.node)
        text = str(error)
        if not alive or "node has died" in text or "node was terminated" in text:
            self.lost = f"its node {self.address} was lost"
        else:
            last = [type(error).__name__, *(line.strip() for line in text.splitlines() if line.strip())][-1]
            self.lost = f"its node agent, a Ray actor on {self.address}, died: {last}"
        return self.lost

    async def _final_word(self, error: BaseException) -> BaseException:
        """Ask again while Ray only says that it cannot reach it: it learns later whether the node was lost."""
        unavailable = self.ray.exceptions.ActorUnavailableError
        while isinstance(error, unavailable) and await asyncio.to_thread(is_node_alive, self.ray, self.node):
            await asyncio.sleep(_AGAIN_S)
            try:
                await self.actor.whereabouts.remote()
            except self.ray.exceptions.RayError as later:
                error = later
            else:
                break  # but what it said meanwhile is lost
        return error


def is_node_alive(ray: Any, node_id: str) -> bool:
    """Return whether a node lives and can be reached. Ray learns of a lost one by heartbeats, a minute later."""
    found = next((node for node in ray.nodes() if node["NodeID"] == node_id and node["Alive"]), None)
    if found is None:
        return False
    try:
        socket.create_connection((found["NodeManagerAddress"], found["NodeManagerPort"]), timeout=_REACH_S).close()
    except OSError:
        return False
    return True

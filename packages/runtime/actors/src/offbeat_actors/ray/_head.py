"""The head of a Ray cluster: Ray ends every process of a cluster that has been without one for a minute."""

import asyncio
import time
from typing import Final

_POLL_EVERY_S: Final = 2.0
_REACH_S: Final = 2.0
"""Time for the head to accept a connection."""
PATIENCE_S: Final = 15.0
"""A head that answers nothing for so long is lost: before Ray ends all processes, this one too, after 60 s
(RAY_gcs_rpc_server_reconnect_timeout_s), a run must have saved what it has."""


async def head_loss(address: str, patience_s: float) -> str:
    """Wait until the head of a cluster is lost, and return that in one line.

    Args:
        address: host:port of the head.
        patience_s: it is lost after so long without an answer.
    """
    last_answer_s = time.monotonic()
    while True:
        if await _answers(address):
            last_answer_s = time.monotonic()
        elif time.monotonic() - last_answer_s > patience_s:
            return (
                f"it has answered nothing at {address} for {patience_s:g} s; see gcs_server.out among the logs of Ray "
                "on its machine (/tmp/ray/session_latest/logs), and start the cluster again"
            )
        await asyncio.sleep(_POLL_EVERY_S)


async def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(_REACH_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except OSError:  # TimeoutError is one
        return False
    writer.close()
    return True

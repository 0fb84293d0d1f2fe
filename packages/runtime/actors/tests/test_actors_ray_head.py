"""A Ray cluster whose head is gone is known, before Ray ends all of its processes."""

import asyncio
import time

import pytest

from offbeat_actors.ray import _head

PATIENCE_S = 0.5


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_head, "_POLL_EVERY_S", 0.02)


async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


def test_a_head_is_lost_once_it_has_answered_nothing_for_so_long() -> None:
    async def scenario() -> None:
        head = await asyncio.start_server(accept, "127.0.0.1", 0)
        host, port = head.sockets[0].getsockname()
        losing = asyncio.create_task(_head.head_loss(f"{host}:{port}", PATIENCE_S))
        await asyncio.wait({losing}, timeout=3 * PATIENCE_S)
        assert not losing.done(), "it answers"
        head.close()
        begin_s = time.monotonic()
        assert f"it has answered nothing at {host}:{port} for 0.5 s" in await losing
        assert time.monotonic() - begin_s > 0.8 * PATIENCE_S

    asyncio.run(scenario())


def test_a_head_that_is_back_in_time_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    patience_s, looks, answers = 2.0, list[bool](), _head._answers

    async def noted(address: str) -> bool:
        looks.append(await answers(address))
        return looks[-1]

    monkeypatch.setattr(_head, "_answers", noted)

    async def scenario() -> None:
        head = await asyncio.start_server(accept, "127.0.0.1", 0)
        host, port = head.sockets[0].getsockname()
        losing = asyncio.create_task(_head.head_loss(f"{host}:{port}", patience_s))
        while not any(looks):
            await asyncio.sleep(0.01)
        head.close()
        while all(looks):
            await asyncio.sleep(0.01)
        back = await asyncio.start_server(accept, host, port)
        await asyncio.wait({losing}, timeout=1.25 * patience_s)
        assert not losing.done(), "its patience begins anew with an answer"
        losing.cancel()
        back.close()

    asyncio.run(scenario())

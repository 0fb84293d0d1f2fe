"""A thread that stands in an event loop waits for what its tasks await."""

import asyncio
import concurrent.futures
import contextlib
import sys
import threading
import urllib.error
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from liveness_standing import full_server, silent_server, slow_server, standing, start, until

from offbeat_liveness._process.snapshot import OutsideWait


@pytest.fixture
def silent() -> Iterator[str]:
    with silent_server() as port:
        yield f"127.0.0.1:{port}"


@pytest.fixture
def in_loop() -> Iterator[Callable[[Callable[[], Coroutine[Any, Any, Any]], str], OutsideWait]]:
    """Runs a coroutine in a loop of a thread until what it waits for says a text; cancels it at the end."""
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    def run(function: Callable[[], Coroutine[Any, Any, Any]], text: str) -> OutsideWait:
        async def noted() -> None:
            task = asyncio.current_task()
            assert task is not None
            loops.append((asyncio.get_running_loop(), task))
            await function()

        return standing(lambda: asyncio.run(noted()), text)

    yield run
    for loop, task in loops:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(task.cancel)


async def never() -> None:
    await asyncio.Event().wait()


def line_of(text: str) -> int:
    """Of the first line of this file that holds a text."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if text in line)


def test_the_main_task_is_reported_first_and_others_after_it(in_loop: Any) -> None:
    async def main() -> None:
        tasks = [asyncio.create_task(asyncio.Queue[int]().get(), name="a rollout")]
        await asyncio.sleep(30)
        del tasks

    wait = in_loop(main, "a rollout")
    assert wait.kind == "asyncio"
    first, second = wait.text.split("; ")
    line = line_of("await asyncio.sleep(30)")
    assert first.endswith(f"awaits asyncio.sleep(30) at {__file__}:{line} in {main.__qualname__}")
    assert second == "task 'a rollout' awaits asyncio.Queue.get (the queue holds 0)"


@pytest.mark.parametrize("how", ["await", "gather", "wait_for", "wait", "group"])
def test_a_task_that_is_awaited_is_followed(in_loop: Any, how: str) -> None:
    async def main() -> None:
        if how == "group":
            async with asyncio.TaskGroup() as group:
                group.create_task(never(), name="inner")
            return
        inner = asyncio.create_task(never(), name="inner")
        if how == "await":
            await inner
        elif how == "gather":
            await asyncio.gather(inner, asyncio.create_task(never(), name="other"))
        elif how == "wait_for":
            await asyncio.wait_for(inner, 30)
        else:
            await asyncio.wait([inner], timeout=30)

    wait = in_loop(main, "which awaits asyncio.Event.wait")
    assert wait.text.count("awaits the task 'inner'") == wait.text.count("'inner'") == 1
    assert ("and 1 more" in wait.text) == (how == "gather")
    assert wait.text.count(f"{__file__}:{line_of('await asyncio.Event().wait()')} in never") == 1 + (how == "gather")


def test_a_task_that_has_failed_and_that_no_task_awaits_is_reported(in_loop: Any) -> None:
    """Its error is why the event is never set; asyncio reports it only when the task is thrown away."""

    async def start_update(started: asyncio.Event) -> None:
        if not started.is_set():
            raise urllib.error.HTTPError("http://engine", 503, "not ready", Message(), None)

    async def main() -> None:
        started = asyncio.Event()
        tasks = [asyncio.create_task(start_update(started), name="start")]
        done = [asyncio.create_task(asyncio.sleep(0), name="done"), asyncio.create_task(never(), name="cancelled")]
        done[1].cancel()
        seen = asyncio.create_task(start_update(started), name="seen")
        await asyncio.wait([seen])
        assert seen.exception()
        await started.wait()
        del tasks

    wait = in_loop(main, "'start' has failed")
    assert f"awaits asyncio.Event.wait at {__file__}:{line_of('await started.wait()')}" in wait.text
    _, failed = wait.text.split("; ")
    assert failed.startswith("task 'start' has failed with ")
    assert "urllib.error.HTTPError: 503, not ready" in failed
    assert f"at {__file__}:{line_of('raise urllib.error.HTTPError')} in" in failed
    assert failed.endswith(", unnoticed")


@pytest.mark.parametrize("server", [silent_server, slow_server])
def test_httpx_within_a_generator(in_loop: Any, server: Any) -> None:
    httpx = pytest.importorskip("httpx")
    with server() as port:

        async def answers() -> AsyncIterator[int]:
            async with httpx.AsyncClient(timeout=17) as client:
                yield (await client.get(f"http://127.0.0.1:{port}/")).status_code

        async def main() -> None:
            async for _ in answers():
                pass

        wait = in_loop(main, "timeout 17 s")
        assert f"an HTTP answer from 127.0.0.1:{port} (httpx, timeout 17 s)" in wait.text
        assert wait.address == f"127.0.0.1:{port}"


@pytest.mark.parametrize("server", [silent_server, slow_server, full_server])
def test_aiohttp(in_loop: Any, server: Any) -> None:
    aiohttp = pytest.importorskip("aiohttp")
    with server() as port:

        async def main() -> None:
            async with aiohttp.ClientSession() as client, client.get(f"http://127.0.0.1:{port}/") as answer:
                await answer.read()

        doing = "a connection to" if server is full_server else "an HTTP answer from"
        wait = in_loop(main, f"{doing} 127.0.0.1:{port} (aiohttp")
        assert wait.address == f"127.0.0.1:{port}"


def test_a_stream_names_its_peer(in_loop: Any, silent: str) -> None:
    async def main() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(silent.rpartition(":")[2]))
        try:
            await reader.read(10)
        finally:
            writer.close()

    assert in_loop(main, "data from").address == silent


def test_a_process_is_reported_with_its_pid(in_loop: Any) -> None:
    pids = []

    async def main() -> None:
        process = await asyncio.create_subprocess_exec("sleep", "60")
        pids.append(process.pid)
        try:
            await process.wait()
        finally:
            process.kill()

    wait = in_loop(main, "the process")
    assert wait.pid == pids[0]


def test_a_call_in_a_thread_is_named(in_loop: Any) -> None:
    stop = threading.Event()
    wait = in_loop(lambda: asyncio.to_thread(stop.wait, 30), "a thread that runs")
    stop.set()
    assert wait.kind == "asyncio"


def test_a_loop_in_c(silent: str) -> None:
    uvloop = pytest.importorskip("uvloop")
    httpx = pytest.importorskip("httpx")

    async def main() -> None:
        async with httpx.AsyncClient(timeout=5) as client:
            await client.get(f"http://{silent}/")

    wait = standing(lambda: uvloop.run(main()), "an HTTP answer")
    assert (wait.kind, wait.address) == ("asyncio", silent)


def test_a_future_that_a_loop_of_another_thread_fills() -> None:
    loop = asyncio.new_event_loop()
    thread = start(loop.run_forever, "loop")
    future = asyncio.run_coroutine_threadsafe(never(), loop)
    wait = standing(lambda: future.result(30), "asyncio.Event.wait")
    assert (wait.kind, wait.timeout_s) == ("asyncio", 30)
    future.cancel()
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    assert isinstance(future, concurrent.futures.Future)


def test_ten_thousand_tasks_are_reported_by_a_few(in_loop: Any) -> None:
    async def main() -> None:
        tasks = [asyncio.create_task(never()) for _ in range(10_000)]
        await asyncio.sleep(30)
        del tasks

    wait = in_loop(main, "more tasks")
    assert len(wait.text) < 1000
    assert "asyncio.sleep(30)" in wait.text


def test_asyncio_is_not_imported_for_it() -> None:
    import subprocess

    code = "import offbeat_liveness._process.outside, sys; print('asyncio' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == "False"


def test_a_task_that_has_not_begun_is_no_error(in_loop: Any) -> None:
    async def main() -> None:
        first = asyncio.create_task(asyncio.sleep(30), name="z late")
        await asyncio.sleep(30)
        del first

    assert until(lambda: in_loop(main, "asyncio.sleep(30)")).kind == "asyncio"

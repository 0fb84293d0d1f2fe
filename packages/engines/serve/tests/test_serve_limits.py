"""Nothing is taken on without a bound, nothing waited for without a deadline, nothing left in the engine."""

import asyncio
import json
import threading
from urllib.parse import urlparse

import pytest

from offbeat_core import ConfigError, OffbeatError, RolloutEngineConfig
from offbeat_serve import ServedModel, ServeSettings, _requests
from offbeat_testing import FakeRolloutEngine

pytestmark = pytest.mark.asyncio
ASK = {"prompt": [67, 68, 69], "max_tokens": 500, "ignore_eos": True}
DEADLINE_S = 60.0


async def until_running(served, num_running):
    async with asyncio.timeout(DEADLINE_S):
        while True:
            health = await served.engine.health()
            if health.num_running + health.num_waiting == num_running:
                return
            await asyncio.sleep(0.005)


async def open_raw(served):
    address = urlparse(served.server.url)
    return await asyncio.open_connection(address.hostname, address.port)


def raw_request(served, body: bytes, length: int | None = None) -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {urlparse(served.server.url).netloc}\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {length or len(body)}\r\n\r\n".encode() + body


async def test_a_long_body_is_decoded_beside_the_loop(served, monkeypatch):
    """Numbers written as 1.0 are read in Python, and one body can have hundreds of thousands of them."""
    seen = []
    convert = _requests._with_integers

    def look(value):
        seen.append(threading.current_thread().name)
        return convert(value)

    monkeypatch.setattr(_requests, "_with_integers", look)
    numbers = [5.0] * 20_000
    answer = await served.post("/v1/completions", prompt=numbers, max_tokens=1)
    assert answer.status_code == 400
    assert {name.partition("_")[0] for name in seen} == {"offbeat-encode"}
    seen.clear()
    assert (await served.post("/v1/completions", prompt=[5.0], max_tokens=1)).status_code == 200
    assert set(seen) == {"MainThread"}


async def test_a_client_that_leaves_ends_its_samples(served):
    await served.engine.pause("keep")
    _, writer = await open_raw(served)
    writer.write(raw_request(served, json.dumps({**ASK, "prompt": [[67], [68]], "n": 3}).encode()))
    await writer.drain()
    await until_running(served, 6)
    writer.close()
    await until_running(served, 0)
    await served.engine.resume()
    after = await served.post("/v1/completions", **{**ASK, "max_tokens": 1})
    assert after.status_code == 200


async def test_of_many_streams_those_that_are_left_end_and_the_others_are_whole(served):
    async def read(num_events):
        # A busy server sends several tokens in one event: a client that is to leave in the middle asks for many.
        ask = {**ASK, "max_tokens": 16 if num_events is None else 400, "stream": True}
        async with served.http.stream("POST", "/v1/completions", json=ask) as answer:
            lines = answer.aiter_lines()
            events = [line async for line in lines if line.startswith("data: ")] if num_events is None else []
            while len(events) < (num_events or 0):
                events += [line] if (line := await anext(lines)).startswith("data: ") else []
        return events

    async with asyncio.timeout(DEADLINE_S):
        found = await asyncio.gather(*(read(2 if number % 2 else None) for number in range(16)))
    assert [events[-1] == "data: [DONE]" for events in found] == [True, False] * 8
    await until_running(served, 0)
    before = (await served.engine.health()).num_tokens
    await asyncio.sleep(0.3)
    assert (await served.engine.health()).num_tokens == before


async def test_more_samples_than_allowed_are_sent_away_for_now(serving):
    async with serving(max_in_flight=4, max_prompts=2, max_samples=2) as served:
        await served.engine.pause("keep")
        first = asyncio.create_task(served.post("/v1/completions", **{**ASK, "max_tokens": 2, "n": 2}))
        second = asyncio.create_task(served.post("/v1/completions", **{**ASK, "max_tokens": 2}))
        await until_running(served, 3)
        refused = await served.post("/v1/completions", **ASK, n=2)
        await served.engine.resume()
        answered = [(await first).status_code, (await second).status_code]
        again = await served.post("/v1/completions", **{**ASK, "max_tokens": 1, "n": 2})
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert "3 samples are in flight, and 4 may be (max_in_flight)" in refused.json()["error"]["message"]
    assert [*answered, again.status_code] == [200, 200, 200]


async def test_a_body_has_a_longest_length_announced_or_not(serving):
    async def chunks():
        for _ in range(40):
            yield b" " * 100

    json_type = {"Content-Type": "application/json"}
    async with serving(max_body_bytes=2048) as served:
        announced = await served.post("/v1/completions", prompt="a" * 4000)
        streamed = await served.http.post("/v1/completions", content=chunks(), headers=json_type)
        fits = await served.post("/v1/completions", prompt="a" * 100, max_tokens=1)
    assert [announced.status_code, streamed.status_code, fits.status_code] == [413, 413, 200]
    assert "2048 bytes at most (max_body_bytes)" in streamed.json()["error"]["message"]


async def test_a_body_that_does_not_come_is_not_waited_for(serving):
    async with serving(body_deadline_s=0.2) as served:
        reader, writer = await open_raw(served)
        writer.write(raw_request(served, b'{"prompt": ', 1000))
        async with asyncio.timeout(DEADLINE_S):
            status = await reader.readline()
        writer.close()
    assert b"408" in status


@pytest.mark.parametrize(
    ("content", "content_type", "status"),
    [
        (b'{"prompt": "a"', "application/json", 400),
        (b"\xff\xfe", "application/json", 400),
        (b'{"prompt": "\xff"}', "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b'{"messages": [], "chat_template_kwargs": {"a": ' + b"[" * 100_000, "application/json", 400),
        (b"", "application/json", 400),
        (b'{"prompt": "a"}', "text/plain", 415),
        (b"prompt=a", "application/x-www-form-urlencoded", 415),
    ],
    ids=range(8),
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_what_is_no_json_is_refused(serving, path, content, content_type, status):
    async with serving(engine=FakeRolloutEngine(lambda *_: [1])) as served:
        answer = await served.http.post(path, content=content, headers={"Content-Type": content_type})
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_paths_and_methods_that_are_not_there_are_told_in_openai_s_form(serving):
    async with serving(engine=FakeRolloutEngine(lambda *_: [1])) as served:
        nowhere, put = await served.http.get("/v2"), await served.http.put("/v1/models")
    assert [nowhere.status_code, put.status_code] == [404, 405]
    assert set(put.headers["Allow"].split(", ")) == {"GET", "HEAD"}
    assert "/openapi.json says what there is" in put.json()["error"]["message"]


async def test_closing_answers_waiting_clients_and_admits_no_others(served):
    await served.engine.pause("keep")
    asked = asyncio.create_task(served.post("/v1/completions", **ASK))
    await until_running(served, 1)
    async with asyncio.timeout(DEADLINE_S):
        await served.server.close()
        answer = await asked
    await served.server.close()
    with pytest.raises(OSError):
        await open_raw(served)
    assert answer.json()["choices"][0]["finish_reason"] == "abort"


class HeldEngine(FakeRolloutEngine):
    """Answers what asks for one token; ends nothing else before it may."""

    def __init__(self) -> None:
        super().__init__(lambda *_: [1])
        self.is_asked, self.is_aborted, self.may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def generate(self, request):
        if request.params.max_tokens > 1:
            self.is_asked.set()
            await self.may_end.wait()
        return await super().generate(request)

    async def abort(self, request_id: str) -> None:
        self.is_aborted.set()
        await self.may_end.wait()


async def test_a_server_that_waits_for_its_last_answers_lets_nothing_more_in(serving):
    engine = HeldEngine()
    async with serving(engine=engine, abort_deadline_s=DEADLINE_S) as served, asyncio.timeout(DEADLINE_S):
        asked = asyncio.create_task(served.post("/v1/completions", **ASK))
        await engine.is_asked.wait()
        closing = asyncio.create_task(served.server.close())
        await engine.is_aborted.wait()
        late = await served.post("/v1/completions", **{**ASK, "max_tokens": 1})
        engine.may_end.set()
        await closing
        answer = await asked
    assert (late.status_code, late.json()["error"]["code"]) == (503, "closing")
    assert answer.status_code == 200


class StuckEngine(FakeRolloutEngine):
    """Never answers, and ignores aborts."""

    def __init__(self) -> None:
        super().__init__(lambda *_: [1])
        self.num_given_up = 0

    async def generate(self, request):
        try:
            await asyncio.Event().wait()
        finally:
            self.num_given_up += 1

    async def abort(self, request_id: str) -> None:
        await asyncio.Event().wait()


async def test_an_engine_that_is_stuck_is_not_waited_for(serving):
    engine = StuckEngine()
    async with serving(engine=engine, generate_deadline_s=0.1, abort_deadline_s=0.1) as served:
        async with asyncio.timeout(DEADLINE_S):
            answer = await served.post("/v1/completions", **ASK, n=2)
        assert engine.num_given_up == 1
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline"


class SilentEngine(FakeRolloutEngine):
    """Does not say how it is."""

    async def health(self):
        await asyncio.Event().wait()


async def test_an_engine_that_does_not_say_how_it_is_is_not_waited_for(serving):
    async with serving(engine=SilentEngine(lambda *_: [1]), health_deadline_s=0.1) as served:
        answer = await served.http.get("/health", timeout=10.0)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline")


@pytest.mark.parametrize(("asked", "context"), [(64, 32), (32, 32), (16, 16)])
@pytest.mark.parametrize("inside", [False, True])
async def test_a_context_is_no_longer_than_the_positions_of_the_model(asked, context, inside, tmp_path):
    sizes = {"vocab_size": 10, "max_position_embeddings": 32}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": sizes} if inside else sizes))
    config = RolloutEngineConfig(model_path=str(tmp_path), max_model_len=asked)
    assert ServedModel.read(config) == ServedModel(name=tmp_path.name, max_model_len=context, vocab_size=10)


class BrokenEngine(FakeRolloutEngine):
    """Fails in its own way."""

    def __init__(self, error: Exception) -> None:
        super().__init__(lambda *_: [1])
        self._error = error

    async def generate(self, request):
        raise self._error


@pytest.mark.parametrize(
    ("error", "message"),
    [(ZeroDivisionError("a secret"), "unexpected ZeroDivisionError"), (OffbeatError("the end"), "the end")],
    ids=["bug", "typed"],
)
async def test_an_engine_that_fails_is_a_500_that_tells_no_secret(serving, error, message, caplog):
    async with serving(engine=BrokenEngine(error)) as served:
        answer = await served.post("/v1/completions", **ASK)
    assert answer.status_code == 500
    assert answer.json()["error"]["message"].startswith(message)
    assert "a secret" not in answer.text
    assert ("a secret" in caplog.text) == (message != "the end")


async def test_one_request_may_not_ask_for_more_than_may_be_in_flight():
    with pytest.raises(ConfigError, match="max_in_flight: got 16 times 64, and 100"):
        ServeSettings(max_in_flight=100)

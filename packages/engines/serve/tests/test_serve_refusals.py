"""Requests for what is not served are refused in a sentence, and those that cannot fit before they cost anything."""

import asyncio
import shutil
import socket
import threading
from dataclasses import replace
from urllib.parse import urlparse

import pytest

from offbeat_core import SamplingParams, SessionPlan
from offbeat_data import Tokenizer, load_tokenizer
from offbeat_testing import FakeRolloutEngine

pytestmark = pytest.mark.asyncio
DEADLINE_S = 60.0
PLAN = SessionPlan(params=SamplingParams(max_tokens=4), deadline_s=60.0, max_calls=9)
CHAT = {"messages": [{"role": "user", "content": "two"}]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    ("asked", "param", "message"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty", "must be 0 or left out: no rollout engine applies penalties"),
        ({"presence_penalty": -1}, "presence_penalty", "must be 0 or left out: no rollout engine applies penalties"),
        ({"logit_bias": {"5": 10}}, "logit_bias", "must be {} or left out"),
        ({"response_format": {"type": "json_object"}}, "response_format", "no engine holds its samples to JSON"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format",
            'must be {"type": "text"} or left out',
        ),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice", 'must be "auto", "none" or left out'),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice", "no engine makes its"),
        ({"tools": [TOOL]}, "tools", "the model's chat template has no place for tools"),
        ({"logprobs": True, "top_logprobs": 5}, "top_logprobs", "must be 0 or left out"),
        ({"modalities": ["audio"]}, "modalities", 'must be ["text"] or left out'),
        ({"max_tokens": 513}, "max_tokens", "max_tokens must be at most 512, the model's context: got 513"),
        ({"max_completion_tokens": 100000}, "max_completion_tokens", "must be at most 512"),
        ({"repetition_penalty": 1.1}, "repetition_penalty", "this server does not serve it"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_no_engine_does_is_said_in_a_sentence(serving, asked, param, message):
    async with serving(engine=FakeRolloutEngine(lambda *_: [1])) as served:
        answer = await served.post("/v1/chat/completions", **CHAT, **asked)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert message in error["message"]
    assert "$." not in error["message"] or param == "repetition_penalty"


async def test_what_changes_nothing_is_taken(serving):
    asked = {"frequency_penalty": 0, "response_format": {"type": "text"}, "tools": [TOOL], "tool_choice": "none"}
    async with serving(engine=FakeRolloutEngine(lambda *_: [1])) as served:
        answer = await served.post("/v1/chat/completions", **CHAT, **asked, max_tokens=512)
    assert answer.status_code == 200


async def test_in_a_session_an_agent_may_ask_for_more_than_there_is_and_not_for_tools_that_no_model_sees(serving):
    async with serving(engine=FakeRolloutEngine(lambda *_: [1])) as served:
        session = served.server.sessions.open(PLAN)
        key = {"Authorization": f"Bearer {session.key}"}
        more, tools = [
            await served.http.post("/v1/chat/completions", json={**CHAT, **asked}, headers=key)
            for asked in ({"max_tokens": 100_000}, {"tools": [TOOL]})
        ]
    assert (more.status_code, tools.status_code) == (200, 400)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_text_that_no_tokens_could_stand_for_is_refused_without_encoding_it(serving, model, path, monkeypatch):
    encoded = []
    encode = Tokenizer._encode

    def seen(self, texts, **words):
        encoded.extend(map(len, texts))
        return encode(self, texts, **words)

    monkeypatch.setattr(Tokenizer, "_encode", seen)
    limit = 512 * load_tokenizer(model).longest_token_bytes
    async with serving(engine=FakeRolloutEngine(lambda *_: [1])) as served:

        async def ask(length):
            if path == "/v1/completions":
                return await served.post(path, prompt="a" * length)
            return await served.post(path, messages=[{"role": "user", "content": "a" * length}])

        longer, fits = await ask(limit + 100), await ask(limit - 100)
    assert [answer.json()["error"]["code"] for answer in (longer, fits)] == ["context_length_exceeded"] * 2
    assert f"bytes of text and may have {limit}: the model's context is 512 tokens" in longer.json()["error"]["message"]
    assert "tokens and the model's context" in fits.json()["error"]["message"]
    assert max(encoded) < limit


async def test_a_session_is_cut_off_by_text_that_cannot_fit(serving):
    async with serving(engine=FakeRolloutEngine(lambda *_: [1])) as served:
        session = served.server.sessions.open(PLAN)
        key = {"Authorization": f"Bearer {session.key}"}
        await served.http.post("/v1/chat/completions", json=CHAT, headers=key)
        longer = {"messages": [{"role": "user", "content": "a" * 100_000}]}
        refused = await served.http.post("/v1/chat/completions", json=longer, headers=key)
        [trajectory] = served.server.sessions.take(session.key).result().trajectories
    assert (refused.status_code, trajectory.ended) == (400, "max_tokens")


async def test_while_a_prompt_is_encoded_others_are_answered_and_not_all_may_wait(serving, monkeypatch):
    began, may_end = threading.Event(), threading.Event()
    encode = Tokenizer._encode

    def held(self, texts, **words):
        began.set()
        assert may_end.wait(DEADLINE_S)
        return encode(self, texts, **words)

    monkeypatch.setattr(Tokenizer, "_encode", held)
    async with serving(engine=FakeRolloutEngine(lambda *_: [1]), max_encoding=2) as served:
        asked = [asyncio.create_task(served.post("/v1/completions", prompt="a", max_tokens=1)) for _ in range(3)]
        assert await asyncio.to_thread(began.wait, DEADLINE_S)
        health = await served.http.get("/health")
        [refused], _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        may_end.set()
        answers = await asyncio.gather(*asked)
    assert health.status_code == 200
    assert sorted(answer.status_code for answer in answers) == [200, 200, 429]
    assert refused.result().headers["Retry-After"] == "1"
    assert "(max_encoding)" in refused.result().json()["error"]["message"]


@pytest.mark.parametrize("public_url", ["", "https://policy.example/v1"])
async def test_an_offer_names_the_address_that_is_configured_and_not_what_a_header_says(serving, public_url):
    async with serving(engine=FakeRolloutEngine(lambda *_: [1]), public_url=public_url) as served:
        plan = replace(PLAN, is_offered=True, row={"a": 1})
        served.server.sessions.open(plan)
        offer = (await served.http.post("/v1/sessions", headers={"Host": "localhost:1"})).json()
    assert offer["base_url"] == (public_url or f"{served.server.url}/v1")


def half_a_head(served):
    connection = socket.create_connection((urlparse(served.server.url).hostname, urlparse(served.server.url).port))
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
    connection.settimeout(DEADLINE_S)
    return connection


async def test_unknown_clients_in_front_of_a_client_do_not_keep_it_out_and_are_let_go(serving, tmp_path):
    token = "a-token-for-tests-only"
    (tmp_path / "token").write_text(token)
    files = {"token_file": str(tmp_path / "token"), "head_deadline_s": 1.0}
    async with serving(engine=FakeRolloutEngine(lambda *_: [1]), token=token, **files) as served:
        connections = await asyncio.to_thread(lambda: [half_a_head(served) for _ in range(100)])
        assert (await served.post("/v1/completions", prompt="a", max_tokens=1)).status_code == 200
        ends = await asyncio.to_thread(lambda: [end_of(connection) for connection in connections])
    assert ends == [b""] * 100


def end_of(connection):
    try:
        return connection.recv(100)
    except ConnectionResetError:
        return b""
    finally:
        connection.close()


TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
)


def nested(depth):
    value = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def calling(arguments):
    call = {"function": {"name": "add", "arguments": arguments}}
    return [*CHAT["messages"], {"role": "assistant", "tool_calls": [call]}, *CHAT["messages"]]


@pytest.mark.parametrize("in_session", [False, True])
async def test_what_nests_too_deep_is_a_mistake_of_the_client_and_half_a_character_is_none(
    serving, model, tmp_path, in_session, caplog
):
    folder = shutil.copytree(model, tmp_path / "tools")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tools = [{"type": "function", "function": {"name": "add", "parameters": nested(700)}}]
    async with serving(folder) as served:
        if in_session:
            served.http.headers["Authorization"] = f"Bearer {served.server.sessions.open(PLAN).key}"
        answer = await served.post("/v1/chat/completions", **CHAT, tools=tools)
        assert (answer.status_code, "nested too deep" in answer.text) == (400, True)
        answer = await served.post("/v1/chat/completions", messages=calling('{"a": "\\ud800"}'), max_tokens=2)
        assert answer.status_code == 200, answer.text
    assert "unexpected error" not in caplog.text


@pytest.mark.parametrize(
    "asked",
    [
        {"messages": [{"role": "x" * 100_000, "content": ""}]},
        {**CHAT, "x" * 100_000: 1},
        {**CHAT, "max_tokens": int("9" * 4000)},
    ],
)
async def test_a_refusal_does_not_repeat_megabytes(serving, asked):
    async with serving() as served:
        answer = await served.post("/v1/chat/completions", **asked)
        assert answer.status_code == 400
        assert len(answer.content) < 5000
        assert len((await served.http.get("/" + "a" * 50_000)).content) < 5000

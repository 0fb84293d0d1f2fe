"""/v1/completions through OpenAI's own client, on the real embedded engine."""

import asyncio
import shutil
from dataclasses import replace

import httpx
import numpy as np
import openai
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from offbeat_core import Completion, GenerateRequest, OffbeatError, SamplingParams, VersionSegment
from offbeat_data import load_tokenizer
from offbeat_serve import RolloutServer, ServedModel, ServeSettings, _endpoint
from offbeat_serve._answers import Answerer, Sampled
from offbeat_serve._requests import CompletionRequest, completion_prompts
from offbeat_testing import FakeRolloutEngine

pytestmark = pytest.mark.asyncio
PROMPT = [67, 68, 69, 70]
EXTRA = {"return_token_ids": True}


async def test_what_a_client_is_answered_is_what_the_engine_sampled(served):
    answer = await served.complete(
        prompt=PROMPT, n=3, max_tokens=12, temperature=0.7, seed=5, logprobs=1, extra_body=EXTRA
    )
    params = SamplingParams(max_tokens=12, temperature=0.7, seed=5)
    request = GenerateRequest(request_id="direct", prompt_ids=np.array(PROMPT, np.int32), num_samples=3, params=params)
    direct = await served.engine.generate(request)
    assert answer.policy_version == 0
    for index, (choice, completion) in enumerate(zip(answer.choices, direct, strict=True)):
        assert choice.index == index
        assert choice.prompt_token_ids == PROMPT
        assert choice.token_ids == completion.ids.tolist()
        assert np.array_equal(np.array(choice.logprobs.token_logprobs, np.float32), completion.logprobs)
        assert choice.text == completion.text
        assert choice.version_segments == [{"version": 0, "num_tokens": len(completion.ids)}]
    assert answer.usage.completion_tokens == sum(len(completion.ids) for completion in direct)


async def test_texts_are_encoded_and_several_prompts_answered_in_order(served, model):
    texts = ["one and one", "the sum"]
    encoded = [ids.tolist() for ids in load_tokenizer(model).encode(texts, add_special_tokens=True)]
    answer = await served.complete(prompt=texts, n=2, max_tokens=4, seed=1, extra_body=EXTRA)
    by_ids = await served.complete(prompt=encoded, n=2, max_tokens=4, seed=1, extra_body=EXTRA)
    assert [choice.prompt_token_ids for choice in answer.choices] == [encoded[0]] * 2 + [encoded[1]] * 2
    assert [choice.token_ids for choice in answer.choices] == [choice.token_ids for choice in by_ids.choices]
    num_sampled = sum(len(choice.token_ids) for choice in answer.choices)
    usage = (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens)
    assert usage == (sum(map(len, encoded)), num_sampled, sum(map(len, encoded)) + num_sampled)


async def test_a_text_that_is_continued_has_no_eos_from_a_tokenizer_that_ends_texts(model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    eos = load_tokenizer(folder).special_tokens["eos_token"]
    ending = [(eos, backend.token_to_id(eos))]
    backend.post_processor = processors.TemplateProcessing(single=f"$A {eos}", special_tokens=ending)
    backend.save(str(folder / "tokenizer.json"))
    request = CompletionRequest(model="policy", prompt=["one and one"])
    [ids] = completion_prompts(request, load_tokenizer(folder), ["one and one"])
    assert ids.tolist() == load_tokenizer(model).encode(["one and one"], add_special_tokens=False)[0].tolist()


async def test_sampling_parameters_reach_the_engine(served):
    greedy = await served.complete(prompt=PROMPT, temperature=0, max_tokens=6, n=2, extra_body=EXTRA)
    top_1 = await served.complete(prompt=PROMPT, max_tokens=6, extra_body={**EXTRA, "top_k": 1})
    nucleus = await served.complete(prompt=PROMPT, max_tokens=6, top_p=1e-6, extra_body=EXTRA)
    likely = await served.complete(prompt=PROMPT, max_tokens=6, extra_body={**EXTRA, "min_p": 1})
    stopped_by = greedy.choices[0].token_ids[2]
    body = {**EXTRA, "stop_token_ids": [stopped_by], "ignore_eos": True}
    stopped = await served.complete(prompt=PROMPT, temperature=0, max_tokens=6, extra_body=body)
    expected = greedy.choices[0].token_ids
    assert [choice.token_ids for one in (greedy, top_1, nucleus, likely) for choice in one.choices] == [expected] * 5
    assert stopped.choices[0].token_ids == expected[: expected.index(stopped_by) + 1]
    assert (stopped.choices[0].finish_reason, stopped.choices[0].ended_by) == ("stop", "stop")


async def test_without_a_limit_openai_s_own_holds_and_never_more_than_fits(served):
    free = {"ignore_eos": True, **EXTRA}
    default = await served.complete(prompt=PROMPT, extra_body=free)
    all_that_fit = await served.complete(prompt=[67] * 500, max_tokens=512, extra_body=free)
    assert len(default.choices[0].token_ids) == 16
    assert len(all_that_fit.choices[0].token_ids) == 12
    assert all_that_fit.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match="max_tokens must be at most 512"):
        await served.complete(prompt=PROMPT, max_tokens=10**9, extra_body=free)


BODIES = {"completions": {"prompt": PROMPT}, "chat/completions": {"messages": [{"role": "user", "content": "a"}]}}


@pytest.mark.parametrize(("path", "body"), BODIES.items(), ids=BODIES)
async def test_a_limit_of_the_server_s_own_holds_where_a_request_names_none(serving, path, body):
    engine = FakeRolloutEngine(lambda *_: [1])
    async with serving(engine=engine, default_max_tokens=5) as served:
        for more in ({}, {"max_tokens": 9}):
            await served.post(f"/v1/{path}", **body, **more)
    assert [request.params.max_tokens for request in engine.requests] == [5, 9]


class PoetsEngine(FakeRolloutEngine):
    """Notes the adapters that it is asked for."""

    def __init__(self) -> None:
        super().__init__(lambda *_: [1])
        self.adapters: list[str] = []

    async def generate(self, request):
        self.adapters.append(request.adapter)
        return await super().generate(replace(request, adapter=""))


@pytest.mark.parametrize(("path", "body"), BODIES.items(), ids=BODIES)
async def test_an_adapter_that_is_served_samples_every_request(model, path, body):
    engine = PoetsEngine()
    poet = ServedModel(name="poet", max_model_len=64, vocab_size=320, adapter="poet")
    async with (
        RolloutServer(engine, load_tokenizer(model), poet, ServeSettings(port=0)) as server,
        httpx.AsyncClient(base_url=server.url, verify=False) as http,
    ):
        answer = await http.post(f"/v1/{path}", json=body)
    assert (answer.status_code, engine.adapters) == (200, ["poet"])


async def test_a_stream_tells_what_the_whole_answer_says(served):
    ask = {"prompt": PROMPT, "n": 2, "max_tokens": 8, "seed": 3, "logprobs": 0, "extra_body": EXTRA}
    whole = await served.complete(**ask)
    stream = await served.complete(**ask, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert len(chunks) > 3, "no token was streamed before the end"
    for choice in whole.choices:
        parts = [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
        assert [token for one in parts for token in one.token_ids] == choice.token_ids
        assert "".join(one.text for one in parts) == choice.text
        for name in ("tokens", "token_logprobs", "text_offset"):
            assert [item for one in parts for item in getattr(one.logprobs, name)] == getattr(choice.logprobs, name)
        assert [one.finish_reason for one in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
        assert parts[0].prompt_token_ids == choice.prompt_token_ids
        assert parts[-1].version_segments == choice.version_segments
    assert chunks[-1].usage == whole.usage


@pytest.mark.parametrize("stop", [["e"], ["a", "th"], []])
async def test_a_stream_never_tells_what_a_stop_text_takes_back(served, stop):
    ask = {"prompt": PROMPT, "n": 4, "max_tokens": 80, "seed": 5, "stop": stop}
    whole = await served.complete(**ask)
    texts = [""] * 4
    async for chunk in await served.complete(**ask, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


async def test_a_stream_begins_at_once_and_whoever_leaves_it_ends_its_samples(served, monkeypatch):
    monkeypatch.setattr(_endpoint, "KEEP_ALIVE_S", 0.05)
    await served.engine.pause("keep")
    async with served.http.stream("POST", "/v1/completions", json={"prompt": PROMPT, "stream": True}) as answer:
        assert (answer.status_code, answer.headers["X-Policy-Version"]) == (200, "0")
        lines = answer.aiter_lines()
        assert [await anext(lines) for _ in range(3)] == [": sampling", "", ": sampling"]
    async with asyncio.timeout(60):
        while (await served.engine.health()).num_waiting:
            await asyncio.sleep(0.005)
    too_long = await served.post("/v1/completions", prompt="a b c " * 300, stream=True)
    assert too_long.status_code == 400


class HeldEngine(FakeRolloutEngine):
    """Streams a first token, and is then held up until it fails."""

    def __init__(self) -> None:
        super().__init__(lambda *_: [1])
        self.may_fail = asyncio.Event()

    async def stream(self, request, notify):
        notify(0, PROMPT[0], -0.5)
        await self.may_fail.wait()
        raise OffbeatError("the end")


async def test_a_stream_tells_of_a_token_when_it_comes_and_of_what_fails_later(serving):
    engine = HeldEngine()
    async with serving(engine=engine) as served:
        stream = aiter(await served.complete(prompt=PROMPT, stream=True))
        async with asyncio.timeout(60):
            first = await anext(stream)
        assert len(first.choices[0].text) == 1
        assert first.choices[0].finish_reason is None
        engine.may_fail.set()
        with pytest.raises(openai.APIError, match="the end"):
            await anext(stream)


@given(st.text(max_size=12), st.lists(st.text(min_size=1, max_size=3), max_size=3))
async def test_a_text_ends_before_the_stop_text_that_ended_it(model_answerer, text, stops):
    completion = Completion(
        ids=np.zeros(1, np.int32),
        logprobs=np.zeros(1, np.float32),
        segments=(VersionSegment(version=0, num_tokens=1),),
        stop_reason="stop",
        text=text,
    )
    request = CompletionRequest(prompt="x", stop=stops)
    sampled = Sampled(np.zeros(1, np.int32), [completion])
    [choice] = model_answerer.completion(request, "id", [sampled], 0).choices
    assert text.startswith(choice.text)
    assert not any(stop in choice.text for stop in stops)


@pytest.fixture(scope="session")
def model_answerer(model):
    return Answerer(load_tokenizer(model), "tiny")


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
        ({"temperature": 1e-9}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"logprobs": 5}, "logprobs"),
        ({"stop": ""}, "stop"),
        ({"seed": -1}, "seed"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [["a"]]}, "prompt"),
        ({"prompt": ["a"] * 17}, "prompt"),
        ({"prompt": [320]}, "prompt"),
        ({"prompt": [1] * 512}, "prompt"),
        ({"extra_body": {"best_of": 2}}, "best_of"),
    ],
    ids=str,
)
async def test_what_cannot_be_is_refused_by_name(serving, wrong, param):
    async with serving(engine=FakeRolloutEngine(lambda *_: [1])) as served:
        with pytest.raises(openai.BadRequestError) as refused:
            await served.complete(**{"prompt": "a", "max_tokens": 1, **wrong})
    assert refused.value.param.startswith(param)
    assert refused.value.type == "invalid_request_error"
    assert len(refused.value.message.splitlines()) == 1


async def test_an_engine_s_refusal_is_told_in_one_sentence(served):
    too_long = "a b c " * 300
    with pytest.raises(openai.BadRequestError, match="context 512: one must be left"):
        await served.complete(prompt=too_long)
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        await served.complete(model="gpt-9", prompt="a")


async def test_many_clients_at_once_get_their_own_answers(served):

    async def ask(seed: int) -> list[int]:
        answer = await served.complete(prompt=PROMPT, max_tokens=9, seed=seed, extra_body=EXTRA)
        return answer.choices[0].token_ids

    together = await asyncio.gather(*(ask(seed) for seed in range(24)))
    alone = [await ask(seed) for seed in range(24)]
    assert together == alone


async def test_models_and_health_name_the_policy(served):
    [card] = (await served.openai.models.list()).data
    health = await served.http.get("/health")
    assert (card.id, card.policy_version, card.max_model_len) == ("tiny", 0, 512)
    assert health.headers["X-Policy-Version"] == "0"
    assert health.json()["status"] == "ok"

"""Sessions: an agent that knows OpenAI's interface alone is recorded token for token."""

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from offbeat_core import RolloutEngineConfig, SamplingParams, SessionPlan
from offbeat_data import load_tokenizer
from offbeat_rollout_torch import TorchRolloutEngine
from offbeat_serve import RolloutServer, ServedModel, ServeSettings
from offbeat_serve._requests import CompletionRequest
from offbeat_testing import FakeRolloutEngine, reference_logprobs, reference_model

pytestmark = pytest.mark.asyncio
DEADLINE_S = 60.0
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def plan(**changes):
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=7, ignore_eos=True, whole_logprobs=True)
    return SessionPlan(**{"params": params, "deadline_s": DEADLINE_S, "max_calls": 20, **changes})


@pytest.fixture
def agent(served):
    """Opens a session and gives an agent's client, made as any program makes it."""

    def opened(**changes):
        session = served.server.sessions.open(plan(**changes))
        client = openai.AsyncOpenAI(
            base_url=f"{served.server.url}/v1", api_key=session.key, max_retries=0, http_client=served.http
        )
        return session, client

    return opened


def taken(served, session):
    found = served.server.sessions.take(session.key)
    assert found is session
    return found.result()


async def chat(client, messages, **ask):
    answer = await client.chat.completions.create(model="gpt-4o", messages=messages, **ask)
    return answer.choices[0].message


async def test_turns_that_an_agent_sends_back_as_text_are_one_trajectory_of_the_tokens_sampled(served, agent, model):
    session, client = agent()
    messages = [{"role": "user", "content": "one and one?"}]
    for question in ("and twice that?", "and once more?"):
        said = await chat(client, messages, temperature=0.2, max_tokens=100)  # sampled as the session says
        messages += [{"role": "assistant", "content": said.content.strip()}, {"role": "user", "content": question}]
    await chat(client, messages)
    recorded = taken(served, session)
    [trajectory] = recorded.trajectories
    assert [len(turn.ids) for turn in trajectory.turns] == [6, 6, 6]
    assert (recorded.ended_by, recorded.num_calls, recorded.num_aborted) == ("taken", 3, 0)
    assert recorded.answer == trajectory.turns[-1].text
    sequence = trajectory.to_sequence(np.array([], np.int32))
    expected = reference_logprobs(reference_model(model), sequence.ids)[sequence.loss_mask]
    np.testing.assert_allclose(trajectory.logprobs, expected, atol=1e-4)
    assert "and twice that?" in trajectory.replies[0].text


async def test_a_turn_that_was_changed_and_a_compacted_context_begin_trajectories_of_their_own(served, agent):
    session, client = agent()
    opening = [{"role": "user", "content": "one and one?"}]
    said = await chat(client, opening)
    follow = {"role": "user", "content": "sure?"}
    await chat(client, [*opening, {"role": "assistant", "content": said.content}, follow])
    await chat(client, [*opening, {"role": "assistant", "content": "changed by the agent"}, follow])
    await chat(client, [{"role": "user", "content": "in short: it was two. and now?"}])
    await chat(client, [*opening, {"role": "assistant", "content": said.content}, {"role": "user", "content": "why?"}])
    recorded = taken(served, session)
    assert [len(each.turns) for each in recorded.trajectories] == [2, 1, 1, 1]
    main, _, _, branch = recorded.trajectories
    before = np.concatenate([main.prompt_ids, main.turns[0].ids])
    assert branch.prompt_ids[: len(before)].tolist() == before.tolist()
    drawn = [tuple(turn.ids.tolist()) for each in recorded.trajectories for turn in each.turns]
    assert len(set(drawn)) == len(drawn), "each call should draw with a seed of its own"


async def test_what_is_as_short_as_the_agent_asked_was_not_cut_off(served, agent):
    """An agent that asks yes or no asks for one token: its answer is not one that a limit of the run has cut off."""
    session, client = agent(params=SamplingParams(max_tokens=20, seed=7, ignore_eos=True))
    question = [{"role": "user", "content": "yes or no?"}]
    said = await chat(client, question, max_tokens=1)
    follow = [*question, {"role": "assistant", "content": said.content}, {"role": "user", "content": "why?"}]
    await chat(client, follow, max_completion_tokens=2)
    await client.completions.create(model="x", prompt=[5, 6, 7])  # as many as OpenAI gives where none are asked for
    for asked in (20, 100):
        await client.completions.create(model="x", prompt=[5, 6, 8, asked], max_tokens=asked)
    await client.completions.create(model="x", prompt=[9] * 510, max_tokens=10)
    recorded = taken(served, session).trajectories
    assert [[len(turn.ids) for turn in each.turns] for each in recorded] == [[1, 2], [16], [20], [20], [2]]
    assert [each.ended for each in recorded] == ["done", "done", "cut_off", "cut_off", "cut_off"]


FILLING = "so " * 512


async def test_an_episode_whose_last_call_a_limit_refused_was_cut_off(served, agent):
    """The agent has handled the refusal and ended its session, as it does when it is done."""
    asked = {"role": "user", "content": "yes or no?"}
    for max_calls, reply, code, ended in (
        (1, "why?", "session_limit", "max_turns"),
        (9, FILLING, "context_length_exceeded", "max_tokens"),
    ):
        session, client = agent(max_calls=max_calls)
        said = await chat(client, [asked], max_tokens=1)
        follow = [asked, {"role": "assistant", "content": said.content}, {"role": "user", "content": reply}]
        with pytest.raises(openai.BadRequestError) as refused:
            await chat(client, follow, max_tokens=1)
        assert refused.value.code == code
        session.end("call")
        [trajectory] = taken(served, session).trajectories
        assert (trajectory.ended, len(trajectory.turns)) == (ended, 1)


async def test_an_agent_that_compacts_a_full_context_and_goes_on_was_not_cut_off(served, agent):
    session, client = agent(max_calls=2)
    await chat(client, [{"role": "user", "content": "yes or no?"}], max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="context"):
        await chat(client, [{"role": "user", "content": FILLING}])
    await chat(client, [{"role": "user", "content": "in short: yes or no?"}], max_tokens=1)
    session.end("call")
    with pytest.raises(openai.BadRequestError, match="context"):  # what comes after the end does not count
        await chat(client, [{"role": "user", "content": FILLING}])
    assert [each.ended for each in taken(served, session).trajectories] == ["done", "done"]


async def test_a_stream_and_tool_messages_go_on_with_what_was_sampled(served, agent):
    session, client = agent()
    messages = [{"role": "user", "content": "add"}]
    stream = await client.chat.completions.create(model="x", messages=messages, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
    messages += [{"role": "assistant", "content": text}, {"role": "tool", "tool_call_id": "call_1", "content": "42"}]
    await chat(client, messages)
    await chat(client, messages, extra_body={"chat_template_kwargs": {"a": 1}})  # another opening
    assert [len(each.turns) for each in taken(served, session).trajectories] == [2, 1]


async def test_every_sample_of_a_call_begins_a_trajectory_and_ids_are_gone_on_with(served, agent):
    session, client = agent()
    first = await client.completions.create(
        model="x", prompt=[5, 6, 7], n=2, max_tokens=3, extra_body={"return_token_ids": True}
    )
    await client.completions.create(model="x", prompt=[5, 6, 7, *first.choices[1].token_ids, 9], max_tokens=2)
    recorded = taken(served, session)
    assert [len(each.turns) for each in recorded.trajectories] == [1, 2]
    assert recorded.trajectories[1].replies[0].ids.tolist() == [9]


async def test_the_end_of_a_session_ends_its_calls_and_refuses_more(served, agent):
    session, client = agent(params=SamplingParams(max_tokens=400, seed=1, ignore_eos=True))
    waiting = asyncio.ensure_future(chat(client, [{"role": "user", "content": "go on"}]))
    while not (await served.engine.health()).num_running:
        await asyncio.sleep(0.005)
    session.end("call")
    with pytest.raises(openai.ConflictError, match="over"):
        await waiting
    with pytest.raises(openai.ConflictError, match="over"):
        await chat(client, [{"role": "user", "content": "go on"}])
    assert taken(served, session).trajectories == ()
    with pytest.raises(openai.AuthenticationError, match="no session with this key"):
        await chat(client, [{"role": "user", "content": "go on"}])
    while (await served.engine.health()).num_running:
        await asyncio.sleep(0.005)


async def test_a_call_is_sampled_as_the_session_says_and_the_agent_may_only_narrow_it(serving):
    engine = FakeRolloutEngine(lambda *_: [1])
    params = SamplingParams(max_tokens=6, temperature=0.7, top_k=5, stop=("END", "\n"), stop_token_ids=(3,))
    async with serving(engine=engine) as served:
        session = served.server.sessions.open(plan(params=params))
        http = {"headers": {"Authorization": f"Bearer {session.key}"}}
        ask = {"messages": [{"role": "user", "content": "go on"}], "temperature": 2.0, "top_k": 1}
        for more in ({"max_tokens": 100}, {"max_tokens": 4, "stop": ["\n", "so"], "stop_token_ids": [3, 4]}):
            answer = await served.http.post("/v1/chat/completions", json={**ask, **more}, **http)
            assert answer.status_code == 200, answer.text
    as_asked, narrowed = (request.params for request in engine.requests)
    assert replace(as_asked, seed=None) == params
    further = {"max_tokens": 4, "stop": ("END", "\n", "so"), "stop_token_ids": (3, 4)}
    assert replace(narrowed, seed=None) == replace(params, **further)


class EndingEngine(FakeRolloutEngine):
    """Calls `at_the_end` before it gives what it has sampled."""

    async def generate(self, request):
        found = await super().generate(request)
        self.at_the_end()
        return found


async def test_what_comes_after_the_end_of_a_session_is_not_recorded(serving):
    engine = EndingEngine(lambda *_: [1])
    async with serving(engine=engine) as served:
        session = served.server.sessions.open(plan(params=SamplingParams(max_tokens=6)))
        engine.at_the_end = lambda: session.end("deadline")
        body = {"messages": [{"role": "user", "content": "go on"}]}
        headers = {"Authorization": f"Bearer {session.key}"}
        await served.http.post("/v1/chat/completions", json=body, headers=headers)
        recorded = taken(served, session)
    assert (recorded.trajectories, recorded.answer, recorded.ended_by) == ((), "", "deadline")
    assert recorded.num_calls == 1


class AbortingEngine(FakeRolloutEngine):
    """Ends each sample before it is over."""

    async def generate(self, request):
        return [replace(each, stop_reason="aborted") for each in await super().generate(request)]


async def test_what_was_aborted_is_counted_and_not_recorded(serving):
    async with serving(engine=AbortingEngine(lambda *_: [1, 1])) as served:
        session = served.server.sessions.open(plan(params=SamplingParams(max_tokens=6)))
        body = {"messages": [{"role": "user", "content": "go on"}]}
        headers = {"Authorization": f"Bearer {session.key}"}
        await served.http.post("/v1/chat/completions", json=body, headers=headers)
        recorded = taken(served, session)
    assert (recorded.trajectories, recorded.num_aborted) == ((), 1)


async def test_a_session_ends_at_its_deadline_or_with_a_reward(served, agent):
    session, client = agent(deadline_s=0.05)
    await session.over.wait()
    assert taken(served, session).ended_by == "deadline"
    session, client = agent(may_post_reward=True)
    await chat(client, [{"role": "user", "content": "two"}])
    headers = {"Authorization": f"Bearer {session.reward_key}"}
    body = {"reward": 0.5, "parts": {"right": 1.0}}
    reply = await served.http.post("/v1/sessions/end", json=body, headers=headers)
    assert reply.json() == {"num_calls": 1}
    again = await served.http.post("/v1/sessions/end", json=body, headers=headers)
    assert again.status_code == 409
    recorded = taken(served, session)
    assert (recorded.ended_by, recorded.reward, recorded.reward_parts) == ("reward", 0.5, {"right": 1.0})


async def test_a_reward_of_0_is_a_reward(served, agent):
    session, _ = agent(may_post_reward=True)
    headers = {"Authorization": f"Bearer {session.reward_key}"}
    await served.http.post("/v1/sessions/end", json={"reward": 0.0, "parts": {"right": 0.0}}, headers=headers)
    recorded = taken(served, session)
    assert (recorded.ended_by, recorded.reward, recorded.reward_parts) == ("reward", 0.0, {"right": 0.0})


@pytest.mark.parametrize("may_post_reward", [False, True])
async def test_who_has_the_key_of_the_policy_alone_ends_a_session_and_pays_nothing(served, agent, may_post_reward):
    session, _ = agent(may_post_reward=may_post_reward)
    headers = {"Authorization": f"Bearer {session.key}"}
    refused = await served.http.post("/v1/sessions/end", json={"reward": 1.0}, headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "no_reward")
    assert not session.over.is_set()
    ended = await served.http.post("/v1/sessions/end", json={}, headers=headers)
    assert ended.status_code == 200
    assert (taken(served, session).ended_by, bool(session.reward_key)) == ("call", may_post_reward)
    gone = await served.http.post("/v1/sessions/end", json={}, headers={"Authorization": "Bearer reward-unknown"})
    assert gone.status_code == 401


@pytest.mark.parametrize(
    "parts", [{f"part {at}": 1.0 for at in range(1)}, {str(at): 1.0 for at in range(33)}, {"x" * 65: 0.0}, {"": 1.0}]
)
async def test_parts_of_a_reward_are_few_and_have_plain_names(served, agent, parts):
    session, _ = agent(may_post_reward=True)
    headers = {"Authorization": f"Bearer {session.reward_key}"}
    refused = await served.http.post("/v1/sessions/end", json={"reward": 1.0, "parts": parts}, headers=headers)
    assert refused.status_code == 400
    most = {f"judge/a.b-c_{at}": 1.0 for at in range(32)}
    taken_in = await served.http.post("/v1/sessions/end", json={"reward": 1.0, "parts": most}, headers=headers)
    assert taken_in.status_code == 200


async def test_sessions_draw_by_the_seeds_of_their_plans(served):
    def seeds(seed):
        session = served.server.sessions.open(plan(params=SamplingParams(seed=seed)))
        return [session.params(CompletionRequest(prompt="go on"), 5).seed for _ in range(3)]

    assert seeds(7) == seeds(7)
    assert len(set(seeds(7))) == 3
    assert not set(seeds(7)) & set(seeds(8))


async def test_each_prompt_of_a_call_counts_towards_its_samples(served, agent):
    session, client = agent(max_calls=5)
    with pytest.raises(openai.BadRequestError, match="may have 5 samples"):
        await client.completions.create(model="x", prompt=[[5], [6], [7]], n=2, max_tokens=1)
    await client.completions.create(model="x", prompt=[[5], [6]], n=2, max_tokens=1)
    assert taken(served, session).num_calls == 4


async def test_an_agent_elsewhere_is_given_a_session_once(served, agent):
    assert (await served.http.post("/v1/sessions")).status_code == 204
    over, _ = agent(is_offered=True, row={"question": "1+1"})
    session, _ = agent(is_offered=True, row={"question": "2+2"}, may_post_reward=True)
    later, _ = agent(is_offered=True, row={"question": "3+3"})
    over.end("deadline")  # before an agent came
    offer = (await served.http.post("/v1/sessions")).json()
    assert (offer["session_key"], offer["row"]) == (session.key, {"question": "2+2"})
    assert offer["base_url"] == f"{served.server.url}/v1"
    assert offer["reward_key"] == session.reward_key
    assert (await served.http.post("/v1/sessions")).json()["session_key"] == later.key
    assert (await served.http.post("/v1/sessions")).status_code == 204
    for each in (over, session, later):
        taken(served, each)


async def test_errors_are_openais_and_cost_nothing(served, agent):
    session, client = agent(max_calls=1)
    with pytest.raises(openai.BadRequestError) as refused:
        await chat(client, [{"role": "user", "content": "two " * 512}])
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="presence_penalty"):
        await chat(client, [{"role": "user", "content": "two"}], presence_penalty=1.0)
    await chat(client, [{"role": "user", "content": "two"}], service_tier="auto", store=False, metadata={"a": "b"})
    with pytest.raises(openai.BadRequestError, match="max_calls"):
        await chat(client, [{"role": "user", "content": "two"}])
    assert taken(served, session).num_calls == 1


async def test_a_template_that_rewrites_turns_gives_a_trajectory_for_each(model, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = (
        "{% for m in messages %}{{ loop.index if loop.last else '' }}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = RolloutEngineConfig(model_path=str(folder), device="cpu", max_model_len=512, num_threads=1)
    engine = await TorchRolloutEngine.create(config)
    served_model = ServedModel.read(config, "tiny")
    settings = ServeSettings(port=0)
    async with RolloutServer(engine, load_tokenizer(folder), served_model, settings, sessions_only=True) as server:
        session = server.sessions.open(plan())
        async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE_S) as http:
            assert (await http.get("/v1/models")).status_code == 401
            client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=session.key, http_client=http)
            messages = [{"role": "user", "content": "one"}]
            said = await chat(client, messages)
            await chat(client, [*messages, said.model_dump(), {"role": "user", "content": "two"}])
        assert [len(each.turns) for each in server.sessions.take(session.key).result().trajectories] == [1, 1]
    await engine.close()


README = Path(__file__).parents[1] / "README.md"


async def test_the_readme_s_session_records_an_agent(served):
    _, source = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    names: dict = {}
    exec(compile(source, "README.md", "exec"), names)

    async def agent(key):
        client = openai.AsyncOpenAI(
            base_url=f"{served.server.url}/v1", api_key=key, max_retries=0, http_client=served.http
        )
        await chat(client, [{"role": "user", "content": "what is one and one?"}], max_tokens=4)

    recorded = await names["act"](served.server, agent)
    assert [len(each.turns) for each in recorded.trajectories] == [1]

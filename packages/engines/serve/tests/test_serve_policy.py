"""What clients see while weights change: pauses are waited out or end requests, and every token names its version."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.asyncio
ASK = {"prompt": [67, 68, 69], "max_tokens": 480, "ignore_eos": True, "return_token_ids": True, "seed": 1}
DEADLINE_S = 60.0


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():
            await asyncio.sleep(0.002)


def in_flight(served, **changed):
    return asyncio.create_task(served.post("/v1/completions", **{**ASK, **changed}))


async def sampling(served, num_tokens=5):
    before = (await served.engine.health()).num_tokens

    async def has_begun():
        return (await served.engine.health()).num_tokens >= before + num_tokens

    await until(has_begun)


async def test_a_kept_request_goes_on_under_the_new_weights(served, update):
    asked = in_flight(served)
    await sampling(served)
    await served.engine.pause("keep")
    await served.engine.update_weights(update(1), 1)
    held = in_flight(served, max_tokens=4)
    during = await served.http.get("/health")
    assert not asked.done()
    await served.engine.resume()
    answer, new = await asked, await held
    segments = answer.json()["choices"][0]["version_segments"]
    assert [segment["version"] for segment in segments] == [0, 1]
    assert sum(segment["num_tokens"] for segment in segments) == ASK["max_tokens"]
    assert during.headers["X-Policy-Version"] == answer.headers["X-Policy-Version"] == "1"
    assert answer.json()["policy_version"] == 1
    assert new.json()["choices"][0]["version_segments"] == [{"version": 1, "num_tokens": 4}]


async def test_an_aborted_request_is_answered_with_what_it_has_and_can_be_gone_on_with(served, update):
    asked = in_flight(served)
    await sampling(served)
    await served.engine.pause("abort")
    [choice] = (await asked).json()["choices"]
    assert (choice["finish_reason"], choice["ended_by"]) == ("abort", "aborted")
    assert 0 < len(choice["token_ids"]) < ASK["max_tokens"]
    held = in_flight(served, prompt=ASK["prompt"] + choice["token_ids"], max_tokens=3)
    await served.engine.update_weights(update(7), 7)
    await served.engine.resume()
    rest = (await held).json()
    assert rest["choices"][0]["version_segments"] == [{"version": 7, "num_tokens": 3}]
    assert rest["policy_version"] == 7


async def test_a_pause_that_waits_lets_requests_finish(served):
    asked = in_flight(served, max_tokens=60)
    await sampling(served)
    await served.engine.pause("wait")
    async with asyncio.timeout(DEADLINE_S):
        [choice] = (await asked).json()["choices"]
    later = in_flight(served, max_tokens=2)
    await asyncio.sleep(0.05)
    assert not later.done()
    await served.engine.resume()
    assert (await later).status_code == 200
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 60)


async def test_a_pause_longer_than_the_deadline_is_told_and_leaves_nothing_behind(serving):
    async with serving(generate_deadline_s=0.2) as served:
        await served.engine.pause("keep")
        answer = await served.post("/v1/completions", **ASK)
        health = await served.engine.health()
        await served.engine.resume()
    assert answer.status_code == 504
    assert answer.json()["error"]["message"].startswith("generate: waited 0.2 s for the rollout engine to finish")
    assert health.num_waiting == health.num_running == 0


async def test_an_update_that_fails_half_way_is_a_503_until_a_whole_one_comes(served, new_weights, update):
    from offbeat_testing import FakeWeightStream

    with pytest.raises(Exception, match="on purpose"):
        await served.engine.update_weights(FakeWeightStream(new_weights, 1, fail_after=2), 1)
    refused = await served.post("/v1/completions", **ASK)
    await served.engine.update_weights(update(2), 2)
    served_again = await served.post("/v1/completions", **{**ASK, "max_tokens": 1})
    assert refused.status_code == 503
    assert "send a whole update" in refused.json()["error"]["message"]
    assert served_again.json()["policy_version"] == 2

"""An environment that raises, waits for ever, or never lets go of the thread ends its own episode and no other."""

import asyncio
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from offbeat_data import EnvironmentFailedError, EpisodeHost, Message, Prompt, RewardScore

PROMPT = Prompt(index=0, ids=np.array([1], np.int32), text="?", answer="12")
STEP_TIMEOUT_S = 0.3
PATIENCE_S = 30.0


class Echo:
    """Says back what it hears, or does what a test has put in for a text; ends on "end"."""

    def __init__(self, deeds: dict[str, Callable[[], Any]]) -> None:
        self._deeds = deeds
        self.is_closed = False
        self.answer: str | None = None

    async def reset(self, prompt: Prompt) -> None:
        self.answer = prompt.answer
        await self._do("reset")

    async def step(self, text: str) -> Sequence[Message] | None:
        await self._do(text)
        return None if text == "end" else [{"role": "user", "content": text, "note": {"tuple": (1, 2)}}]

    async def reward(self) -> RewardScore | None:
        await self._do("reward")
        return RewardScore(value=1.0, parts={"kept": float(self.answer == "12")})

    async def close(self) -> None:
        self.is_closed = True
        await self._do("close")

    async def _do(self, name: str) -> None:
        outcome = self._deeds.get(name, lambda: None)()
        if asyncio.iscoroutine(outcome):
            await outcome


def forever() -> None:
    while True:
        pass


def sleeping() -> None:
    time.sleep(600)


def reading() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.recv(1)


def searching() -> None:
    re.search(r"(a+)+$", "a" * 60 + "b")


def stubborn() -> None:
    """Catches what it can, and goes on."""
    num_caught = 0
    while True:
        try:
            forever()
        except Exception:  # noqa: BLE001
            num_caught += 1


def play(host: EpisodeHost, *texts: str) -> RewardScore | None:
    async def episode() -> RewardScore | None:
        await host.reset(1, PROMPT)
        for text in texts:
            await host.step(1, text)
        return await host.reward(1)

    return asyncio.run(asyncio.wait_for(episode(), PATIENCE_S))


def test_a_reward_that_is_no_finite_number_fails_its_episode() -> None:
    class Unsure(Echo):
        async def reward(self) -> RewardScore | None:
            return RewardScore(value=float("nan"), parts={})

    made: list[Unsure] = []

    def make() -> Unsure:
        made.append(Unsure({}))
        return made[-1]

    with pytest.raises(EnvironmentFailedError, match="finite number, got nan") as caught:
        play(EpisodeHost(make, STEP_TIMEOUT_S), "end")
    assert caught.value.reason == "not_finite"
    assert made[0].is_closed


def failing(deeds: dict[str, Callable[[], Any]], *texts: str) -> tuple[EnvironmentFailedError, Echo]:
    made: list[Echo] = []

    def make() -> Echo:
        made.append(Echo(deeds))
        return made[-1]

    with pytest.raises(EnvironmentFailedError) as caught:
        play(EpisodeHost(make, STEP_TIMEOUT_S), *texts)
    return caught.value, made[0]


def test_an_episode_is_passed_through_as_plain_data() -> None:
    async def episode() -> None:
        host = EpisodeHost(lambda: Echo({}), STEP_TIMEOUT_S)
        await host.reset(1, PROMPT)
        assert await host.step(1, "hello") == [{"role": "user", "content": "hello", "note": {"tuple": [1, 2]}}]
        assert await host.step(1, "end") is None
        assert await host.reward(1) == RewardScore(value=1.0, parts={"kept": 1.0})
        await host.close(1)
        await host.close(1)

    asyncio.run(episode())


@pytest.mark.parametrize("where", ["reset", "hello", "reward"])
def test_what_raises_is_named_and_closed(where: str) -> None:
    def deed() -> None:
        raise ValueError("no bread")

    failure, environment = failing({where: deed}, "hello")
    assert (failure.reason, failure.detail) == ("raised", "ValueError: no bread")
    assert environment.is_closed


@pytest.mark.parametrize("where", ["reset", "hello", "reward"])
def test_what_waits_for_ever_is_ended(where: str) -> None:
    failure, environment = failing({where: lambda: asyncio.sleep(600)}, "hello")
    assert failure.reason == "timed_out"
    assert "environment.step_timeout_s = 0.3" in failure.detail
    assert environment.is_closed


@pytest.mark.parametrize("deed", [forever, sleeping, reading, searching, stubborn], ids=lambda deed: deed.__name__)
def test_what_never_lets_go_of_the_thread_is_ended(deed: Callable[[], None]) -> None:
    failure, environment = failing({"hello": deed}, "hello")
    assert (failure.reason, failure.detail) == ("timed_out", "it blocked the thread for 0.3 s")
    assert environment.is_closed


def test_the_others_go_on_when_one_blocks() -> None:
    async def episodes() -> list[Any]:
        host = EpisodeHost(lambda: Echo({"bad": forever, "good": lambda: asyncio.sleep(0.01)}), STEP_TIMEOUT_S)

        async def one(number: int, text: str) -> Any:
            await host.reset(number, PROMPT)
            for _ in range(3):
                await host.step(number, text)
            return await host.reward(number)

        work = [one(number, "bad" if number == 2 else "good") for number in range(5)]
        return await asyncio.wait_for(asyncio.gather(*work, return_exceptions=True), PATIENCE_S)

    outcomes = asyncio.run(episodes())
    assert [isinstance(outcome, RewardScore) for outcome in outcomes] == [True, True, False, True, True]
    assert outcomes[2].reason == "timed_out"


def test_a_close_that_raises_or_hangs_changes_nothing() -> None:
    def deed() -> None:
        raise ValueError("stuck door")

    async def episode() -> RewardScore | None:
        host = EpisodeHost(lambda: Echo({"close": deed}), STEP_TIMEOUT_S)
        await host.reset(1, PROMPT)
        score = await host.reward(1)
        await host.close(1)
        return score

    assert asyncio.run(episode()) == RewardScore(value=1.0, parts={"kept": 1.0})


def test_an_answer_of_another_form_is_a_failure() -> None:
    class Odd(Echo):
        async def step(self, text: str) -> Any:
            return [{"content": text}]

    with pytest.raises(EnvironmentFailedError, match=r"\(raised\): TypeError: an answer must be chat messages"):
        play(EpisodeHost(lambda: Odd({}), STEP_TIMEOUT_S), "hello")


def test_an_episode_that_nobody_began_is_lost() -> None:
    async def episode() -> None:
        await EpisodeHost(lambda: Echo({}), STEP_TIMEOUT_S).step(7, "hello")

    with pytest.raises(EnvironmentFailedError, match=r"\(lost\): there is no episode 7"):
        asyncio.run(episode())


def test_a_cancelled_call_is_cancelled() -> None:
    async def episode() -> None:
        host = EpisodeHost(lambda: Echo({"hello": lambda: asyncio.sleep(600)}), PATIENCE_S)
        await host.reset(1, PROMPT)
        call = asyncio.create_task(host.step(1, "hello"))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(asyncio.wait_for(episode(), PATIENCE_S))


def test_outside_the_main_thread_waiting_is_bounded_all_the_same() -> None:
    reasons: list[str] = []

    def work() -> None:
        try:
            play(EpisodeHost(lambda: Echo({"hello": lambda: asyncio.sleep(600)}), STEP_TIMEOUT_S), "hello")
        except EnvironmentFailedError as error:
            reasons.append(error.reason)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert reasons == ["timed_out"]


def test_a_timer_that_was_there_before_is_put_back() -> None:
    struck: list[int] = []
    handler = signal.signal(signal.SIGALRM, lambda number, frame: struck.append(number))
    left_s, interval_s = signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
    try:
        failing({"hello": forever}, "hello")
        assert 0 < signal.setitimer(signal.ITIMER_REAL, 0.01)[0] <= PATIENCE_S - STEP_TIMEOUT_S
        end_s = time.monotonic() + PATIENCE_S
        while not struck and time.monotonic() < end_s:
            time.sleep(0.01)
        assert struck == [signal.SIGALRM]
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, left_s, interval_s)

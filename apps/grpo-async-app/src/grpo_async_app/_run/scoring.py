"""Scoring with a deadline, side by side: scorers are processes, ended and replaced when a completion takes too long.

A completion may ask a verifier for 10**10**10, or send a user's regular expression into the woods. No thread can be
stopped and math-verify's own timeouts need the main thread, so scoring happens where it can be ended.
"""

import asyncio
import contextlib
import time
import traceback
from collections import deque
from collections.abc import Coroutine, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final, TypeVar

from grpo_async_app._roles.scorer import AT_A_TIME_S, Judged, ScorerAnswer, prompt_to_json
from offbeat_actors import ActorHandle, ClusterConfig, LocalLauncher, RestartedRole, RoleSpec, call_or_kill
from offbeat_data import NotANumberError, Prompt, RewardConfig, RewardError, RewardScore
from offbeat_types import ConfigError, DataError, DeadlineError, OffbeatError, PeerFailedError

T = TypeVar("T")

_WINDOW: Final = 200
"""Completions over which `reward.max_error_share` is counted."""
_MOST_KEPT: Final = 20
"""Tracebacks in the log."""
_SLOW_S: Final = 0.5
"""A completion that waits as long for a scorer gets one of its own: a quick reward is served by one."""
_KILL_EVERY_S: Final = 0.1
_MADE_UP: Final = "a completion made up to try the reward: 42"


class ScorerPool:
    """Scores completions in up to `config.num_processes` scorers: one at first, others when completions wait.

    Scorers run beside the driver, also where other roles run on other machines: a user's functions lie here.

    Args:
        config: the `reward` section.
        cluster: how long a scorer may take to start, which imports what the reward needs.
        log: takes the first tracebacks of completions that could not be scored; None: they are not kept.

    Attributes:
        num_scored: completions that were judged, each counted at once, whatever came of it; it tells slow from stuck.
        last_error: why the latest completion that could not be scored was not; empty when all were.
    """

    def __init__(self, config: RewardConfig, cluster: ClusterConfig, log: Path | None = None) -> None:
        self._config, self._log = config, log
        self._launcher = LocalLauncher("grpo", cluster)
        self._names, self._num_scorers = count(), 0
        self._idle: asyncio.Queue[RestartedRole] = asyncio.Queue()
        self._gate = asyncio.Semaphore(config.num_processes)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed, self._is_quick = False, True
        self._failed: deque[bool] = deque(maxlen=_WINDOW)
        self._num_kept = 0
        self.num_scored, self.last_error = 0, ""

    async def start(self) -> None:
        """Start a scorer, which is idle then.

        Raises:
            ConfigError, BackendError: as `build_reward`.
            RewardError: it died while it started.
            DeadlineError: it did not start in time.
        """
        self._num_scorers += 1
        spec = RoleSpec(
            name=f"scorer-{next(self._names)}",
            target="grpo_async_app._roles.scorer:ScorerRole",
            kwargs={"config": self._config},
            main_thread=True,
        )
        scorer = RestartedRole(self._launcher, spec)
        try:
            await self._started(scorer)
        except BaseException:
            self._num_scorers -= 1
            raise
        self._idle.put_nowait(scorer)

    async def close(self) -> None:
        """End the scorers, and nobody waits for a slow verifier: what is being scored, or waits for it, raises."""
        self._is_closed = True
        self.kill()
        while self._tasks:  # one may just be starting another process
            await asyncio.wait(self._tasks, timeout=_KILL_EVERY_S)
            self.kill()
        await self._launcher.close()

    def kill(self) -> None:
        """End every scorer now."""
        self._launcher.kill()

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[RewardScore | None]:
        """Score completions of one prompt: as `reward.on_error` says, None or a score of 0 for one that cannot be.

        Raises:
            RewardError, DataError: as `judge`, when such completions are too many or none is allowed.
        """
        judged = await self._together(prompt, completions) if self._is_quick and len(completions) > 1 else []
        judged += await asyncio.gather(*(self._judged(prompt, each) for each in completions[len(judged) :]))
        return [self._counted(each) for each in judged]

    async def judge(self, prompt: Prompt, completion: str) -> RewardScore:
        """Score one completion; one that takes too long is worth 0 and has the part `timed_out` 1.

        Raises:
            RewardError: a user's function raised or returned no finite number (with the traceback as a note), the
                scorer died twice over it, or this is closed.
            DataError: the prompt lacks what a reward compares with.
        """
        judged = await self._judged(prompt, completion)
        if isinstance(judged, RewardScore):
            return judged
        raise judged

    async def _judged(self, prompt: Prompt, completion: str) -> Judged:
        async with self._gate:
            scorer = await self._take()
            # Who is cancelled leaves the scorer at work: it is idle when it has answered, or is ended at the deadline.
            try:
                return await asyncio.shield(self._in_background(self._ask(scorer, prompt, completion)))
            except RewardError as error:
                return error

    async def _together(self, prompt: Prompt, completions: Sequence[str]) -> list[Judged]:
        """Score by one call the first of them, or all if they are quick; none where one hangs or ends the scorer."""
        async with self._gate:
            scorer = await self._take()
            return await asyncio.shield(self._in_background(self._ask_together(scorer, prompt, completions)))

    async def _take(self) -> RestartedRole:
        """A scorer that is idle; after a while a new one is started, if there may be more."""
        if not self._idle.empty():
            return self._idle.get_nowait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SLOW_S):
                return await self._idle.get()
        if self._num_scorers < self._config.num_processes:
            await asyncio.shield(self._in_background(self.start()))
        return await self._idle.get()

    async def _ask(self, scorer: RestartedRole, prompt: Prompt, completion: str) -> Judged:
        """Ask a scorer, and its next process where it dies: it may have been killed from outside."""
        try:
            for is_last in (False, True):
                try:
                    [answer] = await self._call(scorer, prompt, [completion])
                    return answer.judged()
                except DeadlineError:
                    self.num_scored += 1
                    self._in_background(self._start_again(scorer))
                    return self._worthless("timed_out")
                except PeerFailedError as error:
                    if is_last:
                        self.num_scored += 1
                        self._in_background(self._start_again(scorer))
                        where = f"on prompt {prompt.index}; see its log above"
                        raise RewardError(f"{_end_of_scorer(error)} {where}") from error
        finally:
            self._idle.put_nowait(scorer)
        raise AssertionError  # the last attempt returns or raises

    async def _ask_together(self, scorer: RestartedRole, prompt: Prompt, completions: Sequence[str]) -> list[Judged]:
        try:
            return [each.judged() for each in await self._call(scorer, prompt, completions)]
        except (DeadlineError, PeerFailedError):
            self._in_background(self._start_again(scorer))
            return []
        finally:
            self._idle.put_nowait(scorer)

    async def _call(self, scorer: RestartedRole, prompt: Prompt, completions: Sequence[str]) -> list[ScorerAnswer]:
        handle = await self._started(scorer)
        start_s, deadline_s = time.monotonic(), self._config.timeout_s + AT_A_TIME_S * (len(completions) > 1)
        call = ("score", prompt_to_json(prompt), list(completions))
        answers: list[ScorerAnswer] = await call_or_kill(
            handle, *call, returns=list[ScorerAnswer], deadline_s=deadline_s
        )
        self._is_quick = time.monotonic() - start_s < AT_A_TIME_S
        self.num_scored += len(answers)
        return answers

    async def _started(self, scorer: RestartedRole) -> ActorHandle:
        if self._is_closed:
            raise RewardError("scoring has ended: this reward is closed")
        try:
            return await scorer.start()
        except PeerFailedError as error:
            raise RewardError(f"{_end_of_scorer(error)} before it was ready; see its log above") from error

    async def _start_again(self, scorer: RestartedRole) -> None:
        with contextlib.suppress(OffbeatError):  # whoever asks it next tries again
            await self._started(scorer)

    def _in_background(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _worthless(self, part: str) -> RewardScore:
        return RewardScore(value=0.0, parts={**dict.fromkeys(self._config.all_weights, 0.0), part: 1.0})

    def _counted(self, judged: Judged) -> RewardScore | None:
        if isinstance(judged, OffbeatError) and self._is_closed:
            raise judged
        if isinstance(judged, RewardScore):
            self._failed.append(False)
            return judged
        self._count_failed(judged)
        return self._worthless("failed") if self._config.on_error == "zero" else None

    def _count_failed(self, error: OffbeatError) -> None:
        """Raises RewardError when too many could not be scored, or the error where `reward.on_error` allows none."""
        self._failed.append(True)
        self.last_error = str(error)
        self._keep(error)
        if self._config.on_error == "fail":
            raise error
        num_failed, num_seen = sum(self._failed), len(self._failed)
        if num_failed > self._config.max_error_share * _WINDOW:
            where = f"; tracebacks in {self._log}" if self._log else ""
            raise RewardError(
                f"{num_failed} of the last {num_seen} completions could not be scored, more than "
                f"reward.max_error_share = {self._config.max_error_share:g} allows; the latest: {error}{where}"
            ) from error

    def _keep(self, error: OffbeatError) -> None:
        if self._log is None or self._num_kept >= _MOST_KEPT:
            return
        self._num_kept += 1
        with self._log.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write("".join(traceback.format_exception_only(error)) + "\n")


def _end_of_scorer(error: PeerFailedError) -> str:
    """Such as "the process that scores ended with code 1"."""
    return error.reason.replace("process exited", "process ended").replace("its process", "the process that scores", 1)


def try_reward(config: RewardConfig, prompt: Prompt, cluster: ClusterConfig) -> str:
    """Score one made-up completion, where a function of the user's own takes part, in a process that is then ended.

    Returns:
        What came of it, in words; empty where there is no such function.

    Raises:
        ConfigError: a function returns what is no number, or fails while `on_error` allows no failure.
        BackendError, DeadlineError: as `ScorerPool.start`.
    """
    if not any(":" in name for name in config.all_weights):
        return ""
    try:
        score = asyncio.run(_score_once(ScorerPool(config, cluster), prompt))
    except (RewardError, DataError) as error:
        if isinstance(error, NotANumberError) or config.on_error == "fail":
            raise ConfigError(f"reward: tried once on {_MADE_UP!r}, before anything starts: {error}") from error
        return f"could not score {_MADE_UP!r}: {error}; as reward.on_error = {config.on_error} it is no error yet"
    late = f", after more than reward.timeout_s = {config.timeout_s:g}" if score.parts["timed_out"] else ""
    return f"tried once on {_MADE_UP!r}: {score.value:g}{late}"


async def _score_once(pool: ScorerPool, prompt: Prompt) -> RewardScore:
    try:
        await pool.start()
        return await pool.judge(prompt, _MADE_UP)
    finally:
        await pool.close()

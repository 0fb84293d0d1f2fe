"""Requests to a judge's endpoint: rate, retries, cache, and what they cost."""

import asyncio
import hashlib
import json
import math
import os
import random
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from offbeat_data._scoring.functions import RewardError
from offbeat_types import BackendError, ConfigError

deadline: ContextVar[asyncio.Timeout | None] = ContextVar("offbeat_reward_deadline", default=None)
"""Of the completion that is being scored: whoever scores sets it, and a wait for the rate limit moves it."""

_AGAIN: Final = frozenset({408, 409, 429, 500, 502, 503, 504})
_LONGEST_BACKOFF_S: Final = 30.0


@dataclass(frozen=True, kw_only=True)
class JudgeReply:
    """What a judge said, and what it cost: `judge/requests`, `judge/cached`, `judge/prompt_tokens` and so on."""

    text: str
    costs: Mapping[str, float] = field(default_factory=dict)


class JudgeClient:
    """Asks one endpoint; to be used in one event loop.

    Args:
        url: of the endpoint, up to /v1.
        key_env: name of the environment variable with its key; empty: none.
        request_timeout_s: for one reply.
        max_retries: of a request that failed in passing.
        backoff_s: before the first retry.
        requests_per_minute: 0: no limit.
        cache_folder: empty: no cache.

    Raises:
        ConfigError: an address or a key that will not do.
        BackendError: httpx is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        key_env: str,
        request_timeout_s: float,
        max_retries: int,
        backoff_s: float,
        requests_per_minute: float,
        cache_folder: str,
    ) -> None:
        try:
            import httpx
        except ImportError as error:
            line = 'pip install "offbeat-data[judge]"'
            raise BackendError(f"the reward judge needs httpx; install it with: {line}") from error
        self._httpx, self._timeout_s = httpx, request_timeout_s
        self._url, self._headers = checked_url(url) + "/chat/completions", _headers(key_env)
        self._max_retries, self._backoff_s = max_retries, backoff_s
        self._rate = RateLimit(requests_per_minute)
        self._cache = Path(cache_folder).expanduser() if cache_folder else None
        self._client: Any = None
        self._under_way: dict[str, asyncio.Task[JudgeReply]] = {}

    async def ask(self, request: dict[str, Any]) -> JudgeReply:
        """The reply to a request: kept from before, or that to the same one under way, or a new one.

        Raises:
            RewardError: refused, or no answer after all retries.
        """
        key = hashlib.sha256(json.dumps([self._url, request], sort_keys=True).encode()).hexdigest()
        if kept := self._kept(key):
            return kept
        if (task := self._under_way.get(key)) is not None:
            return JudgeReply(text=(await asyncio.shield(task)).text, costs={"judge/cached": 1.0})
        if self._cache is None:  # two answers of a judge that draws are two opinions
            return await self._ask(request)
        task = self._under_way[key] = asyncio.create_task(self._asked(key, request))
        task.add_done_callback(lambda _: self._under_way.pop(key, None))
        return await asyncio.shield(task)

    async def _asked(self, key: str, request: dict[str, Any]) -> JudgeReply:
        reply = await self._ask(request)
        self._keep(key, reply.text)
        return reply

    async def _ask(self, request: dict[str, Any]) -> JudgeReply:
        for number in range(self._max_retries + 1):
            await self._rate.wait()
            try:
                answer = await self._post(request)
            except self._httpx.TransportError as error:
                problem, after_s = f"{type(error).__name__}: {error}", None
            else:
                if answer.status_code == 200:
                    return _read_reply(answer, number)
                problem = f"status {answer.status_code}: {answer.text[:200]}"
                if answer.status_code not in _AGAIN:
                    raise RewardError(f"the judge at {self._url} refuses: {problem}")
                after_s = _retry_after_s(answer.headers.get("retry-after", ""))
            if number < self._max_retries:
                await asyncio.sleep(after_s if after_s is not None else self._backoff(number))
        raise RewardError(f"the judge at {self._url} did not answer in {self._max_retries + 1} attempts: {problem}")

    async def _post(self, request: dict[str, Any]) -> Any:
        if self._client is None:  # made here: it belongs to the event loop
            limits = self._httpx.Limits(max_connections=None)
            is_checked = self._url.startswith("https:")  # to read the machine's certificates takes a second
            self._client = self._httpx.AsyncClient(
                limits=limits, trust_env=False, follow_redirects=False, verify=is_checked
            )
        return await self._client.post(self._url, json=request, headers=self._headers, timeout=self._timeout_s)

    def _backoff(self, number: int) -> float:
        return random.uniform(0.5, 1.0) * float(min(self._backoff_s * 2.0**number, _LONGEST_BACKOFF_S))

    def _file(self, key: str) -> Path | None:
        return self._cache and self._cache / key[:2] / f"{key}.json"

    def _kept(self, key: str) -> JudgeReply | None:
        path = self._file(key)
        try:
            text = json.loads(path.read_text())["text"] if path else None
        except (OSError, ValueError, KeyError, TypeError):  # not there, or cut off by the end of a machine
            return None
        return JudgeReply(text=text, costs={"judge/cached": 1.0}) if isinstance(text, str) else None

    def _keep(self, key: str, text: str) -> None:
        path = self._file(key)
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(f".{os.getpid()}.part")
            part.write_text(json.dumps({"text": text}))
            part.replace(path)
        except OSError as error:
            raise RewardError(f"reward.judge.cache_folder cannot be written: {error}") from error


class RateLimit:
    """Lets so many pass in a minute, evenly; the time that it takes is given back to `deadline`."""

    def __init__(self, per_minute: float) -> None:
        self._every_s, self._next_s = 60 / per_minute if per_minute else 0.0, 0.0

    async def wait(self) -> None:
        """Return when it is this one's turn."""
        if not self._every_s:
            return
        now_s = time.monotonic()
        own_s = max(self._next_s, now_s)
        self._next_s = own_s + self._every_s
        if own_s > now_s:
            scope = deadline.get()
            if scope is not None and (when_s := scope.when()) is not None:
                scope.reschedule(when_s + own_s - now_s)
            await asyncio.sleep(own_s - now_s)


def checked_url(url: str) -> str:
    """The address without a slash at its end.

    Raises:
        ConfigError: it is neither https nor on this machine, or holds a password.
    """
    parts = urlsplit(url)
    is_here = parts.hostname in ("localhost", "::1") or (parts.hostname or "").startswith("127.")
    if parts.scheme not in ("http", "https") or not parts.hostname or (parts.scheme == "http" and not is_here):
        raise ConfigError(
            f"reward.judge.url must be https, or http on this machine, such as http://127.0.0.1:8000/v1; got {url!r}"
        )
    if parts.password or parts.username:
        raise ConfigError(
            "reward.judge.url must hold no password: name an environment variable by reward.judge.key_env"
        )
    return url.rstrip("/")


def _headers(key_env: str) -> dict[str, str]:
    if not key_env:
        return {}
    key = os.environ.get(key_env, "")
    if not key:
        raise ConfigError(f"reward.judge.key_env = {key_env!r}: there is no such variable in the environment")
    return {"Authorization": f"Bearer {key}"}


def _read_reply(answer: Any, num_retries: int) -> JudgeReply:
    try:
        body = json.loads(answer.content)
        text = body["choices"][0]["message"]["content"]
        usage = body.get("usage") or {}
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise RewardError(f"the judge's answer is no chat completion: {answer.text[:200]!r}") from error
    tokens = {name: float(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")}
    costs = {"judge/requests": 1.0, "judge/retries": float(num_retries), "judge/cached": 0.0}
    return JudgeReply(text=text or "", costs={**costs, **{f"judge/{name}": count for name, count in tokens.items()}})


def _retry_after_s(told: str) -> float | None:
    """What the header Retry-After asks for, in seconds; None where it gives no number."""
    try:
        seconds = float(told)
    except ValueError:
        return None
    return None if math.isnan(seconds) else min(max(seconds, 0.0), _LONGEST_BACKOFF_S)

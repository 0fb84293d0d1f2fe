"""Requests to a judge's endpoint: rate, retries, cache, and what they cost."""

import asyncio
import hashlib
import ipaddress
import json
import math
import os
import random
import time
import zlib
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from offbeat_core import BackendError, ConfigError
from offbeat_data._scoring.functions import RewardError

deadline: ContextVar[asyncio.Timeout | None] = ContextVar("offbeat_reward_deadline", default=None)
"""Deadline of the completion that is being scored: the scorer sets it, and a wait for the rate limit moves it."""

_AGAIN: Final = frozenset({408, 409, 429, 500, 502, 503, 504})
_LONGEST_BACKOFF_S: Final = 30.0
MAX_ANSWER_BYTES: Final = 1 << 22
"""Largest answer, decompressed: a judge that thinks in 100,000 tokens writes a tenth of it."""
_ANY_ZLIB: Final = 32 + zlib.MAX_WBITS
_UNPACKED: Final = ("gzip", "x-gzip", "deflate")


@dataclass(frozen=True, kw_only=True)
class JudgeReply:
    """Answer of a judge, and its cost: `judge/requests`, `judge/cached`, `judge/prompt_tokens` and so on."""

    text: str
    costs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """An answer of the endpoint, no longer than `MAX_ANSWER_BYTES`."""

    status: int
    retry_after: str
    content: bytes

    @property
    def beginning(self) -> str:
        return self.content[:_SHOWN].decode(errors="replace")


_SHOWN: Final = 200


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
        """Return the reply to a request: kept from before, or that to the same one under way, or a new one.

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
                if answer.status == 200:
                    return _read_reply(answer, number)
                problem = f"status {answer.status}: {answer.beginning}"
                if answer.status not in _AGAIN:
                    raise RewardError(f"the judge at {self._url} refuses: {problem}")
                after_s = _retry_after_s(answer.retry_after)
            if number < self._max_retries:
                await asyncio.sleep(after_s if after_s is not None else self._backoff(number))
        raise RewardError(f"the judge at {self._url} did not answer in {self._max_retries + 1} attempts: {problem}")

    async def _post(self, request: dict[str, Any]) -> _Answer:
        """Send a request and read the answer to it, of bounded length and in bounded time, however it comes.

        Raises:
            httpx.TransportError: there is no whole answer in time.
            RewardError: it is longer than any answer of a judge, or packed in a way that was not asked for.
        """
        if self._client is None:  # made here: it belongs to the event loop
            limits = self._httpx.Limits(max_connections=None)
            is_checked = self._url.startswith("https:")  # to read the machine's certificates takes a second
            self._client = self._httpx.AsyncClient(
                limits=limits, trust_env=False, follow_redirects=False, verify=is_checked
            )
        try:
            # httpx's own timeout begins anew with each byte that comes.
            async with asyncio.timeout(self._timeout_s):
                return await self._stream(request)
        except TimeoutError as error:
            raise self._httpx.ReadTimeout(f"no whole answer within {self._timeout_s:g} s") from error

    async def _stream(self, request: dict[str, Any]) -> _Answer:
        raw = bytearray()
        asked = self._client.stream("POST", self._url, json=request, headers=self._headers, timeout=self._timeout_s)
        async with asked as answer:
            async for part in answer.aiter_raw():
                raw += part
                if len(raw) > MAX_ANSWER_BYTES:
                    raise RewardError(_TOO_LONG.format(self._url))
        content = _unpacked(bytes(raw), answer.headers.get("content-encoding", ""), self._url)
        return _Answer(status=answer.status_code, retry_after=answer.headers.get("retry-after", ""), content=content)

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


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def checked_url(url: str) -> str:
    """Return the address without a slash at its end.

    Raises:
        ConfigError: it is neither https nor on this machine, or holds a password.
    """
    parts = urlsplit(url)
    is_here = _is_loopback(parts.hostname or "")
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
    plain = {"Accept-Encoding": "identity"}  # a reply is short, and a packed one of any length is, too
    if not key_env:
        return plain
    key = os.environ.get(key_env, "")
    if not key:
        raise ConfigError(f"reward.judge.key_env = {key_env!r}: there is no such variable in the environment")
    return {**plain, "Authorization": f"Bearer {key}"}


_TOO_LONG: Final = f"the judge at {{}} answers with more than {MAX_ANSWER_BYTES} bytes"


def _unpacked(raw: bytes, encoding: str, url: str) -> bytes:
    """Undo the packing of an answer; it was asked for without any, and some proxies pack all the same."""
    if encoding.strip().lower() in ("", "identity"):
        return raw
    unpacking = zlib.decompressobj(_ANY_ZLIB)
    try:
        if encoding.strip().lower() not in _UNPACKED:
            raise zlib.error("it was asked for without any")  # noqa: TRY301
        content = unpacking.decompress(raw, MAX_ANSWER_BYTES)
    except zlib.error as error:
        raise RewardError(f"the judge at {url} packs its answer as {encoding[:40]!r}: {error}") from error
    if unpacking.unconsumed_tail:
        raise RewardError(_TOO_LONG.format(url))
    return content


def _read_reply(answer: _Answer, num_retries: int) -> JudgeReply:
    try:
        body = json.loads(answer.content)
        text = body["choices"][0]["message"]["content"] or ""
        usage = body.get("usage") or {}
        if not isinstance(text, str):
            raise TypeError("its content is no text")  # noqa: TRY301
        tokens = {name: _count(usage.get(name)) for name in ("prompt_tokens", "completion_tokens")}
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise RewardError(f"the judge's answer is no chat completion: {answer.beginning!r} ({error})") from error
    costs = {"judge/requests": 1.0, "judge/retries": float(num_retries), "judge/cached": 0.0}
    return JudgeReply(text=text, costs={**costs, **{f"judge/{name}": count for name, count in tokens.items()}})


def _count(value: Any) -> float:
    """Return the number of tokens that an endpoint reports; 0 for anything else: no reason to lose the reply."""
    is_count = isinstance(value, int | float) and 0 <= value < 1 << 53
    return float(value) if is_count else 0.0


def _retry_after_s(header: str) -> float | None:
    """Return what the header Retry-After asks for, in seconds; None where it gives no number."""
    try:
        seconds = float(header)
    except ValueError:
        return None
    return None if math.isnan(seconds) else min(max(seconds, 0.0), _LONGEST_BACKOFF_S)

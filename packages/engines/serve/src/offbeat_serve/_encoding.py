"""Prompts become tokens on one thread, so that the event loop answers meanwhile; text that cannot fit stays text."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Final, TypeVar

import msgspec

from offbeat_data import Tokenizer
from offbeat_serve._settings import RETRY_LATER, RefusedError

T = TypeVar("T")
CONTEXT_EXCEEDED: Final = "context_length_exceeded"
"""OpenAI's code for a prompt that is too long."""


class PromptEncoder:
    """Encodes the prompts of one request after the other.

    Args:
        tokenizer: of the model.
        max_model_len: tokens of the model's context.
        max_waiting: requests that are being encoded or wait for it; one more is refused.
    """

    def __init__(self, tokenizer: Tokenizer, max_model_len: int, max_waiting: int) -> None:
        self._tokenizer, self._max_model_len, self._max_waiting = tokenizer, max_model_len, max_waiting
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offbeat-encode")
        self._num_waiting = 0

    def check(self, prompt: object) -> None:
        """Refuse text that no number of tokens within the context could stand for, before it costs anything.

        Args:
            prompt: a text, or a structure of texts that a prompt will be made of.

        Raises:
            RefusedError: it is too long.
        """
        longest = self._tokenizer.longest_token_bytes
        limit, num_bytes = self._max_model_len * longest, _text_bytes(prompt)
        if num_bytes > limit:
            message = (
                f"the prompt has {num_bytes} bytes of text and may have {limit}: the model's context is "
                f"{self._max_model_len} tokens, and no token stands for more than {longest} bytes"
            )
            raise RefusedError(HTTPStatus.BAD_REQUEST, message, code=CONTEXT_EXCEEDED)

    async def run(self, encode: Callable[[], T]) -> T:
        """Call a function that encodes on the thread.

        Raises:
            RefusedError: too many wait already.
        """
        if self._num_waiting == self._max_waiting:
            message = f"{self._max_waiting} requests wait for their prompts to be encoded (max_encoding): try again"
            raise RefusedError(HTTPStatus.TOO_MANY_REQUESTS, message, code="too_many_prompts", headers=RETRY_LATER)
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, encode)
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        """Encode nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _text_bytes(value: object) -> int:
    """Count the bytes of all strings in a structure."""
    match value:
        case str():
            return len(value) if value.isascii() else len(value.encode(errors="surrogatepass"))
        case Mapping():
            return sum(_text_bytes(key) + _text_bytes(item) for key, item in value.items())
        case Sequence():
            return sum(map(_text_bytes, value))
        case msgspec.Struct():
            return sum(_text_bytes(getattr(value, name)) for name in value.__struct_fields__)
    return 0

"""The seam between this package and the two forms in which vLLM runs: in this process, and in processes of its own."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final, Protocol

from offbeat_rollout_vllm._samples import Delta
from offbeat_types import Image

OnDelta = Callable[[str, Delta], None]
"""Called in the owner's thread with the id of a sample and what a step added to it."""
AdapterUse = tuple[str, int]
"""Name and vLLM's number of an adapter."""
OnFailure = Callable[[str, Exception], None]
"""Called in the owner's thread with the id of a sample, or "" for all, and why it will not go on."""

WORKER_METHOD: Final = "offbeat_call"


class EngineForm(Protocol):
    """vLLM, with one thread that owns it. `run` may be called from any thread, the others as each says."""

    def start(self, on_delta: OnDelta, on_failure: OnFailure) -> "Future[None]":
        """Start the engine; done when it serves."""
        ...

    def run(self, function: Callable[[], Any]) -> "Future[Any]":
        """Run a short function in the owner's thread."""
        ...

    def prepare(self, prompt_ids: list[int], images: Sequence[Image]) -> "Future[Any]":
        """The engine's own form of a prompt with images, which `add` takes as often as it is wanted."""
        ...

    def add(self, sample_id: str, prompt: Any, params: dict[str, Any], adapter: AdapterUse | None) -> None:
        """Queue one sample: of a list of ids, or of what `prepare` gave. In the owner's thread."""
        ...

    def abort(self, sample_ids: Sequence[str]) -> None:
        """End samples; each gets a last delta with finish reason "abort". In the owner's thread."""
        ...

    def freeze(self) -> "Future[None]":
        """Stop sampling and keep what is in flight; done when no step runs and all that was sampled is delivered."""
        ...

    def thaw(self) -> "Future[None]":
        """Sample again."""
        ...

    def call_workers(self, text: str, deadline_s: float) -> "Future[list[str]]":
        """Call `WORKER_METHOD` of all workers; their replies in order of rank."""
        ...

    def publish(self, label: int) -> "Future[None]":
        """Drop every cached key and value and label what is sampled from now on. Only while frozen."""
        ...

    def sleep(self, level: int) -> "Future[None]":
        """Give memory back."""
        ...

    def wake(self, tags: tuple[str, ...]) -> "Future[None]":
        """Take memory again."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids without special tokens. From any thread."""
        ...

    def close(self, deadline_s: float) -> bool:
        """End engine and thread; whether both ended in time. From any thread but the owner's; may be called twice."""
        ...


def new_future() -> "Future[Any]":
    """A future that cannot be cancelled: the owner will set it, whoever still listens."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def settle(future: "Future[Any]", function: Callable[[], Any]) -> None:
    """Give a future what `function` returns or raises."""
    try:
        future.set_result(function())
    except BaseException as error:  # noqa: BLE001 - handed to whoever asked, whatever it is
        future.set_exception(error)

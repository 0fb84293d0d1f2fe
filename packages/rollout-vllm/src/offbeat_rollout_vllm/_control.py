"""What changes the engine as a whole: pauses, weights, adapters, sleep. One at a time, each to its end.

They run in a thread of their own, in the order of the calls. So none sees another half done, and a caller that stops
waiting stops nothing that has begun: an update ends with its version served, or with the engine refusing to serve.
"""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from offbeat_rollout_vllm._adapters import Adapters
from offbeat_rollout_vllm._forms import EngineForm
from offbeat_rollout_vllm._requests import Requests
from offbeat_rollout_vllm._updates import WeightLoader
from offbeat_rollout_vllm._workers import GRACE_S, Workers
from offbeat_types import (
    DeadlineError,
    LoraAdapter,
    OffbeatError,
    PauseMode,
    WeightProof,
    WeightStream,
)


class EngineControl:
    """Changes one engine. Its methods but `run` and `close` are for `run`."""

    def __init__(
        self, form: EngineForm, workers: Workers, requests: Requests, loader: WeightLoader, adapters: Adapters
    ) -> None:
        self._form, self._workers, self._requests = form, workers, requests
        self._loader, self._adapters = loader, adapters
        self._thread = ThreadPoolExecutor(1, "offbeat-rollout-vllm-control")
        self._frozen = False
        self.served, self.version = ServedVersions(), 0

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a method when those asked for before it have ended.

        A caller that gives up before its turn takes the call back; one that has begun goes on.
        """
        try:
            future = self._thread.submit(function, *arguments)
        except RuntimeError:
            raise OffbeatError("the rollout engine is closed; make a new one") from None
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Take no more calls, and give the loader's memory back when the last one has ended. May be called twice."""
        try:
            self._thread.submit(self._loader.close)
        except RuntimeError:
            return
        self._thread.shutdown(wait=False)

    def pause(self, mode: PauseMode) -> "Future[None]":
        """Sample no more; done when nothing is in flight, or with `keep` at once."""
        table = self._requests.table
        if mode == "wait" and self._requests.asleep and table.num_running + table.num_waiting:
            raise OffbeatError("the rollout engine sleeps on samples that pause('wait') would finish: wake it first")
        drained: Future[None] = self._owned(self._requests.pause, mode)
        if mode == "keep":
            self._freeze()
            drained = Future()
            drained.set_result(None)
        elif mode == "wait":
            self._thaw()  # what an earlier "keep" has frozen is to end
        return drained

    def resume(self) -> None:
        if self._requests.unusable and not self._requests.asleep:
            self._owned(self._requests.abort_all)
        self._thaw()
        self._owned(self._requests.resume)

    def update(self, stream: WeightStream, version: int, adapter: LoraAdapter | None) -> WeightProof:
        """Load the model, or an adapter alone, and serve it as `version`."""
        self._requests.refuse_if_broken()
        if "weights" in self._requests.asleep:
            raise OffbeatError("the rollout engine sleeps without weights; call wake(('weights',)) first")
        if adapter is not None:
            self._adapters.check_room(adapter.name)
        self._freeze()
        try:
            return self._load(stream, version, adapter)
        finally:
            if self._requests.mode != "keep":
                self._thaw()

    def _load(self, stream: WeightStream, version: int, adapter: LoraAdapter | None) -> WeightProof:
        name = adapter.name if adapter else MODEL
        try:
            if adapter is None:
                proof = self._loader.load(stream, version)
            else:
                proof = self._adapters.load(adapter, stream, f"adapter {name!r} of version {version}")
            self._wait(self._form.publish(self.served.next_label), "publish")
        except BaseException as error:
            if (self._adapters if adapter else self._loader).touched:
                reason = f"the update to version {version} failed half way ({error})"
                self._owned(self._requests.mark_unusable, name, reason)
            raise
        self.served.update(version, name)
        self.version = version
        if adapter is None:
            self._requests.unusable = ""
        return proof

    def drop_adapter(self, name: str) -> None:
        if self._owned(self._requests.use, name):
            raise OffbeatError(f"requests in flight use the adapter {name!r}: abort them or wait for them first")
        self._adapters.drop(name)

    def sleep(self, level: int) -> None:
        if "weights" in self._requests.asleep:
            raise OffbeatError("the rollout engine sleeps already: wake it before it sleeps again")
        self._freeze()
        self._wait(self._form.sleep(level), "sleep")
        self._requests.asleep = {"kv_cache", "weights"}
        if level == 2:
            self._requests.unusable = "they were given back by sleep(2)"
            self._adapters.mark_all_unusable(self._requests.unusable)

    def wake(self, tags: set[str]) -> None:
        """Take memory again, and sample again unless it is paused."""
        if wanted := self._requests.asleep & tags:
            if self._requests.unusable and wanted == self._requests.asleep:
                # Fully awake, vLLM steps at once: with weights that are not there.
                self._owned(self._requests.abort_all)
            self._wait(self._form.wake(tuple(wanted)), "wake")
            self._requests.asleep -= wanted
            # Fully awake, vLLM's scheduler runs again: not before we say so.
            self._wait(self._form.freeze(), "freeze")
        if self._requests.mode is None:
            self.resume()

    def _freeze(self) -> None:
        if not self._frozen:
            self._wait(self._form.freeze(), "freeze")
            self._frozen = True

    def _thaw(self) -> None:
        if self._frozen and not self._requests.asleep:
            self._wait(self._form.thaw(), "thaw")
            self._frozen = False

    def _owned(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._wait(self._form.run(lambda: function(*arguments)), function.__name__)

    def _wait(self, future: "Future[Any]", name: str) -> Any:
        deadline_s = self._workers.deadline_s
        try:
            return future.result(deadline_s + GRACE_S)
        except FutureTimeoutError as error:
            self._workers.lost = f"{name} was not answered in {deadline_s:g} s"
            raise DeadlineError(f"rollout-vllm.{name}", "vLLM", deadline_s) from error


MODEL = ""
"""The model without an adapter."""


class ServedVersions:
    """Which policy version a label of vLLM's stands for.

    vLLM labels tokens with one number for the whole engine, and here the model and each adapter have versions of their
    own: so the label counts updates, and this remembers what was served after each; label 0 is the start.
    """

    def __init__(self) -> None:
        self._after: list[dict[str, int]] = [{MODEL: 0}]

    @property
    def next_label(self) -> int:
        return len(self._after)

    def update(self, version: int, adapter: str = MODEL) -> None:
        """Note an update. One of the model changes what every adapter samples."""
        before = self._after[-1]
        self._after.append(dict.fromkeys(before, version) if adapter == MODEL else before | {adapter: version})

    def segments(self, spans: Iterable[tuple[int, int]], adapter: str = MODEL) -> list[tuple[int, int]]:
        """(version, number of tokens) from (label, number of tokens).

        Tokens under a label from before the adapter's first update have that of the model.
        """
        served = ((self._after[label], count) for label, count in spans)
        return [(versions.get(adapter, versions[MODEL]), count) for versions, count in served]

"""Changes to one engine as a whole, one at a time, in a thread of their own."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import Any

from offbeat_core import DeadlineError, LoraAdapter, OffbeatError, PauseMode, WeightProof, WeightStream
from offbeat_rollout_vllm._adapters import Adapters
from offbeat_rollout_vllm._forms import EngineForm
from offbeat_rollout_vllm._requests import MODEL, Requests, ServedVersions
from offbeat_rollout_vllm._updates import WeightLoader
from offbeat_rollout_vllm._workers import GRACE_S, Workers


class EngineControl:
    """Changes one engine as a whole: pauses, weights, adapters, sleep, traces.

    Its methods but `run` and `close` are for `run`. They run in a thread of their own, one at a time and each to its
    end, in the order of the calls. So none sees another half done, and a caller that stops waiting stops nothing that
    has begun: an update ends with its version served, or with the engine refusing to serve.
    """

    def __init__(
        self, form: EngineForm, workers: Workers, requests: Requests, loader: WeightLoader, adapters: Adapters
    ) -> None:
        self._form, self._workers, self._requests = form, workers, requests
        self._loader, self._adapters = loader, adapters
        self._thread = ThreadPoolExecutor(1, "offbeat-rollout-vllm-control")
        self._is_paused = False
        self.served, self.version = ServedVersions(), 0

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a method when those asked for before it have ended.

        A caller that gives up before its turn cancels the call; one that has begun continues.
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
            self._pause_scheduler()
            drained = Future()
            drained.set_result(None)
        elif mode == "wait":
            self._resume_scheduler()  # what an earlier "keep" has paused is to end
        return drained

    def resume(self) -> None:
        if self._requests.unusable and not self._requests.asleep:
            self._owned(self._requests.abort_all)
        self._resume_scheduler()
        self._owned(self._requests.resume)

    def update(self, stream: WeightStream, version: int, adapter: LoraAdapter | None) -> WeightProof:
        """Load the model, or an adapter alone, and serve it as `version`."""
        if adapter is None:
            return self._change(partial(self._loader.load, stream, version), version, None)
        source = f"adapter {adapter.name!r} of version {version}"
        return self._change(partial(self._adapters.load, adapter, stream, source), version, adapter)

    def receive(
        self, transport: str, addresses: Sequence[str], version: int, deadline_s: float, name: str
    ) -> WeightProof:
        """Let the workers take the model by themselves, and serve it as `version`."""
        load = partial(self._loader.receive, transport, addresses, version, deadline_s, name)
        return self._change(load, version, None)

    def _change(self, load: Callable[[], WeightProof], version: int, adapter: LoraAdapter | None) -> WeightProof:
        self._requests.refuse_if_broken()
        self.require_weights()
        if adapter is not None:
            self._adapters.check_room(adapter.name)
        self._pause_scheduler()
        try:
            return self._load(load, version, adapter)
        finally:
            if self._requests.mode != "keep":
                self._resume_scheduler()

    def require_weights(self) -> None:
        if "weights" in self._requests.asleep:
            raise OffbeatError("the rollout engine sleeps without weights; call wake(('weights',)) first")

    def _load(self, load: Callable[[], WeightProof], version: int, adapter: LoraAdapter | None) -> WeightProof:
        name = adapter.name if adapter else MODEL
        try:
            proof = load()
            self._wait(self._form.set_version(self.served.next_label), "set_version")
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
        self._pause_scheduler()
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
            self._wait(self._form.pause(), "pause")
        if self._requests.mode is None:
            self.resume()

    def trace(self, call: Callable[[Workers], Any]) -> Any:
        """Begin or end a trace between two steps: no token comes while vLLM writes it, which may take minutes."""
        self._pause_scheduler()
        try:
            return call(self._workers)
        finally:
            if self._requests.mode != "keep":
                self._resume_scheduler()

    def _pause_scheduler(self) -> None:
        if not self._is_paused:
            self._wait(self._form.pause(), "pause")
            self._owned(self._requests.table.forget_computed)
            self._is_paused = True

    def _resume_scheduler(self) -> None:
        if self._is_paused and not self._requests.asleep:
            self._wait(self._form.resume(), "resume")
            self._is_paused = False

    def _owned(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._wait(self._form.run(lambda: function(*arguments)), function.__name__)

    def _wait(self, future: "Future[Any]", name: str) -> Any:
        deadline_s = self._workers.deadline_s
        try:
            return future.result(deadline_s + GRACE_S)
        except FutureTimeoutError as error:
            self._workers.lost = f"{name} was not answered in {deadline_s:g} s"
            raise DeadlineError(f"rollout-vllm.{name}", "vLLM", deadline_s) from error

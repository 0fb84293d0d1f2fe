"""The two forms in which vLLM runs: in this process, and in processes of its own.

Source: vllm 0.32.0, vllm/v1/engine/llm_engine.py (LLMEngine.add_request, step, abort_request, collective_rpc),
core_client.py (InprocClient) and async_llm.py (AsyncLLM.generate, abort, pause_generation, resume_generation,
collective_rpc, update_weight_version, reset_prefix_cache).
"""

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from importlib import import_module
from typing import Any, Final

from offbeat_core import EngineThread, Image, OffbeatError, PeerFailedError, WeightSyncError, new_future, settle
from offbeat_rollout_vllm._options import environment
from offbeat_rollout_vllm._vllm_objects import (
    AdapterUse,
    Delta,
    adapter_request,
    engine_prompt,
    make_arguments,
    prepare_images,
    read_output,
    sampling_params,
)

OnDelta = Callable[[str, Delta], None]
"""Called in the owner's thread with the id of a sample and what a step added to it."""
OnFailure = Callable[[str, Exception], None]
"""Called in the owner's thread with the id of a sample, or "" for all, and why it will not continue."""

WORKER_METHOD: Final = "offbeat_call"
DEAD_CHECK_S: Final = 1.0
"""Period in which a call without an answer checks whether the engine core is still alive."""


class EngineForm(ABC):
    """vLLM, with one thread that owns it. `run` may be called from any thread, the others as each says."""

    def __init__(self, arguments: Mapping[str, Any], variables: Mapping[str, str], required: Mapping[str, str]) -> None:
        self._arguments, self._variables, self._required = arguments, variables, required
        self._engine: Any = None
        self._on_delta: OnDelta
        self._on_failure: OnFailure

    def start(self, on_delta: OnDelta, on_failure: OnFailure) -> "Future[None]":
        self._on_delta, self._on_failure = on_delta, on_failure
        return self._start_thread()

    @abstractmethod
    def _start_thread(self) -> "Future[None]": ...

    @abstractmethod
    def run(self, function: Callable[[], Any]) -> "Future[Any]":
        """Run a short function in the owner's thread."""

    @abstractmethod
    def _ask(self, call: Callable[[], Any]) -> "Future[Any]":
        """Make a call of vLLM's in the owner's thread; what it answers."""

    def prepare(self, prompt_ids: list[int], images: Sequence[Image]) -> "Future[Any]":
        """Return the engine's own form of a prompt with images, which `add` takes as often as it is wanted."""
        return prepare_images(self._engine.renderer, prompt_ids, images)

    @abstractmethod
    def add(self, sample_id: str, prompt: Any, params: dict[str, Any], adapter: AdapterUse | None) -> None:
        """Queue one sample: of a list of ids, or of what `prepare` gave. In the owner's thread."""

    @abstractmethod
    def abort(self, sample_ids: Sequence[str]) -> None:
        """End samples; each gets a last delta with finish reason "abort". In the owner's thread."""

    @abstractmethod
    def pause(self) -> "Future[None]":
        """Stop sampling and keep what is in flight; done when no step runs and all that was sampled is delivered."""

    @abstractmethod
    def resume(self) -> "Future[None]":
        """Sample again."""

    def call_workers(self, text: str, deadline_s: float) -> "Future[list[str]]":
        return self._ask(lambda: self._engine.collective_rpc(WORKER_METHOD, deadline_s, (text,)))

    @abstractmethod
    def set_version(self, label: int) -> "Future[None]":
        """Drop every cached key and value and label what is sampled from now on. Only while paused."""

    def sleep(self, level: int) -> "Future[None]":
        return self._ask(lambda: self._engine.sleep(level, "keep"))

    def wake(self, tags: tuple[str, ...]) -> "Future[None]":
        return self._ask(lambda: self._engine.wake_up(list(tags) or None))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._engine.get_tokenizer().decode(list(ids), skip_special_tokens=True))

    @abstractmethod
    def close(self, deadline_s: float) -> bool:
        """End engine and thread; whether both ended in time. From any thread but the owner's; may be called twice."""


def _refuse_old_cache(dropped: Any) -> None:
    if not dropped:
        raise WeightSyncError("vLLM did not drop its cached keys and values, so old ones could be used")


class InProcessForm(EngineForm):
    """A thread steps vLLM's LLMEngine, and does between two steps what it is asked to.

    With tensor parallelism the workers are child processes, and the scheduler is here.

    Args:
        num_threads: torch threads of the engine's thread; 0 leaves torch's choice.
    """

    def __init__(
        self, arguments: Mapping[str, Any], variables: Mapping[str, str], required: Mapping[str, str], num_threads: int
    ) -> None:
        # A step must end with its tokens delivered: a batch in flight during an update would get the wrong version.
        arguments = {**arguments, "async_scheduling": False}
        super().__init__(arguments, variables, {**required, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
        self._num_threads, self._is_paused, self._label = num_threads, False, 0
        self._internal_ids: dict[str, str] = {}
        self._thread = EngineThread(
            "offbeat-rollout-vllm",
            build=self._build,
            can_step=lambda: not self._is_paused and self._engine.has_unfinished_requests(),
            step=self._step,
            shut_down=self._shut_down,
        )

    def _start_thread(self) -> "Future[None]":
        return self._thread.start()

    def run(self, function: Callable[[], Any]) -> "Future[Any]":
        return self._thread.call(function)

    def _ask(self, call: Callable[[], Any]) -> "Future[Any]":
        return self.run(call)

    def _build(self) -> None:
        with environment(self._variables, self._required):
            import torch

            if self._num_threads:
                torch.set_num_threads(self._num_threads)
            self._engine = import_module("vllm.v1.engine.llm_engine").LLMEngine.from_engine_args(
                make_arguments("EngineArgs", self._arguments)
            )
        self._engine.engine_core.set_weight_version("0")

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:  # noqa: BLE001 - the boundary: every sample in flight learns of it
            self._internal_ids.clear()
            self._is_paused = True
            self._on_failure("", error)
            return
        for output in outputs:
            delta = read_output(output, self._label)
            if delta.finish_reason is not None:
                self._internal_ids.pop(output.request_id, None)
            self._on_delta(output.request_id, delta)

    def add(self, sample_id: str, prompt: Any, params: dict[str, Any], adapter: AdapterUse | None) -> None:
        self._internal_ids[sample_id] = self._engine.add_request(
            sample_id, engine_prompt(prompt), sampling_params(params), lora_request=adapter_request(adapter)
        )

    def abort(self, sample_ids: Sequence[str]) -> None:
        found = [sample_id for sample_id in sample_ids if self._internal_ids.pop(sample_id, None)]
        self._engine.abort_request(found)
        for sample_id in found:
            self._on_delta(sample_id, Delta(ids=(), logprobs=(), label=self._label, finish_reason="abort"))

    def pause(self) -> "Future[None]":
        """Return a step delivers what it samples, so between two steps nothing is under way."""
        return self.run(lambda: setattr(self, "_is_paused", True))

    def resume(self) -> "Future[None]":
        return self.run(lambda: setattr(self, "_is_paused", False))

    def set_version(self, label: int) -> "Future[None]":
        def set_version() -> None:
            _refuse_old_cache(self._engine.reset_prefix_cache(reset_running_requests=True))
            self._engine.reset_mm_cache()
            self._engine.reset_encoder_cache()
            self._engine.engine_core.set_weight_version(str(label))
            self._label = int(self._engine.engine_core.get_weight_version())

        return self.run(set_version)

    def close(self, deadline_s: float) -> bool:
        if not self._thread.is_closed:
            self.run(self._thread.close)
        return self._thread.join(deadline_s)

    def _shut_down(self) -> None:
        """End workers, give memory back, and leave torch.distributed as it was: the next engine starts it anew."""
        self._engine.renderer.shutdown()
        self._engine.engine_core.shutdown()


class AsyncForm(EngineForm):
    """An AsyncLLM, whose engine core is another process, in a thread with an event loop that belongs to it."""

    def __init__(self, arguments: Mapping[str, Any], variables: Mapping[str, str], required: Mapping[str, str]) -> None:
        super().__init__(arguments, variables, {**required, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
        self._loop = asyncio.new_event_loop()
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._closed = False
        self._ready = new_future()
        self._thread = threading.Thread(target=self._run, name="offbeat-rollout-vllm", daemon=True)

    def _start_thread(self) -> "Future[None]":
        self._thread.start()
        return self._ready

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._build())
        except BaseException as error:  # noqa: BLE001 - handed to the thread that made the engine
            self._closed = True
            if self._engine is not None:
                self._engine.shutdown()
            self._loop.close()
            self._ready.set_exception(error)
            return
        self._ready.set_result(None)
        self._loop.run_forever()
        self._loop.run_until_complete(self._shut_down())
        self._loop.close()

    async def _build(self) -> None:
        with environment(self._variables, self._required):
            arguments = make_arguments("AsyncEngineArgs", self._arguments)
            self._engine = import_module("vllm.v1.engine.async_llm").AsyncLLM.from_engine_args(arguments)
        await self._engine.update_weight_version("0")

    def run(self, function: Callable[[], Any]) -> "Future[Any]":
        future = new_future()
        if not self._closed:
            try:
                self._loop.call_soon_threadsafe(settle, future, function)
            except RuntimeError:  # it was closed in between
                pass
            else:
                return future
        future.set_exception(OffbeatError("the rollout engine is closed; make a new one"))
        return future

    def _ask(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> "Future[Any]":
        future = new_future()

        async def run() -> None:
            try:
                future.set_result(await self._unless_dead(call()))
            except BaseException as error:  # noqa: BLE001 - handed to the caller
                future.set_exception(error)

        def refuse(started: "Future[Any]") -> None:
            if error := started.exception():
                future.set_exception(error)

        self.run(lambda: self._keep(run())).add_done_callback(refuse)
        return future

    async def _unless_dead(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Return vLLM's answer. vLLM never answers a call to an engine core that has died meanwhile."""
        answer = self._loop.create_task(call)
        try:
            while not (await asyncio.wait({answer}, timeout=DEAD_CHECK_S))[0]:
                if self._engine.errored:
                    error = self._engine.dead_error
                    self._on_failure("", error)
                    raise PeerFailedError("vLLM", f"{type(error).__name__}: {error}")
            return answer.result()
        finally:
            answer.cancel()

    def _keep(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = self._loop.create_task(work)
        self._streams[f"task {id(task)}"] = task
        task.add_done_callback(lambda done: self._streams.pop(f"task {id(done)}", None))
        return task

    def add(self, sample_id: str, prompt: Any, params: dict[str, Any], adapter: AdapterUse | None) -> None:
        stream = self._engine.generate(
            engine_prompt(prompt), sampling_params(params), sample_id, lora_request=adapter_request(adapter)
        )
        self._streams[sample_id] = self._loop.create_task(self._follow(sample_id, stream))

    async def _follow(self, sample_id: str, stream: Any) -> None:
        try:
            async for output in stream:
                if output.outputs:
                    self._on_delta(sample_id, read_output(output, None))
        except Exception as error:  # noqa: BLE001 - the boundary: the caller of the sample gets the error
            self._on_failure("" if self._engine.errored else sample_id, error)
        finally:
            self._streams.pop(sample_id, None)

    def abort(self, sample_ids: Sequence[str]) -> None:
        """VLLM ends each stream with an output that says so."""
        self._keep(self._engine.abort(list(sample_ids)))

    def pause(self) -> "Future[None]":
        async def pause() -> None:
            await self._engine.pause_generation(mode="keep", clear_cache=False)
            # Outputs come through the same socket as the reply, before it; let them pass through vLLM's tasks and ours.
            await self._engine.is_paused()
            for _ in range(len(self._streams) + 2):
                await asyncio.sleep(0)

        return self._ask(pause)

    def resume(self) -> "Future[None]":
        return self._ask(lambda: self._engine.resume_generation())

    def set_version(self, label: int) -> "Future[None]":
        async def set_version() -> None:
            _refuse_old_cache(await self._engine.reset_prefix_cache(reset_running_requests=True))
            await self._engine.reset_mm_cache()
            await self._engine.reset_encoder_cache()
            await self._engine.update_weight_version(str(label))

        return self._ask(set_version)

    def close(self, deadline_s: float) -> bool:
        if not self._closed:
            self._closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    async def _shut_down(self) -> None:
        """End the child processes, and what is left of our own tasks and vLLM's."""
        await asyncio.to_thread(self._engine.shutdown)
        rest = [task for task in asyncio.all_tasks(self._loop) if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

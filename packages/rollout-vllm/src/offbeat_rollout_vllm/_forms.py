"""vLLM in processes of its own: an AsyncLLM, in a thread with an event loop that belongs to it.

Source: vllm 0.32.0, vllm/v1/engine/async_llm.py (AsyncLLM.generate, abort, pause_generation, resume_generation,
collective_rpc, update_weight_version, reset_prefix_cache).
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from importlib import import_module
from typing import Any, Final

from offbeat_rollout_vllm._environment import environment
from offbeat_rollout_vllm._form import WORKER_METHOD, AdapterUse, OnDelta, OnFailure, new_future, settle
from offbeat_rollout_vllm._images import prepare_images
from offbeat_rollout_vllm._outputs import adapter_request, engine_prompt, make_arguments, read_output, sampling_params
from offbeat_types import Image, OffbeatError, PeerFailedError, WeightSyncError

LOOK_S: Final = 1.0
"""How often a call that is not answered looks whether the engine core still lives."""


class AsyncForm:
    """See `EngineForm`.

    Args:
        arguments: for vLLM's EngineArgs.
        variables: environment of it and its child processes while they start, where the user has set nothing else.
        required: the same, whatever the user has set.
    """

    def __init__(self, arguments: Mapping[str, Any], variables: Mapping[str, str], required: Mapping[str, str]) -> None:
        self._arguments, self._variables = dict(arguments), variables
        self._required = {**required, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        self._loop = asyncio.new_event_loop()
        self._llm: Any = None
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._closed = False
        self._ready = new_future()
        self._thread = threading.Thread(target=self._run, name="offbeat-rollout-vllm", daemon=True)

    def start(self, on_delta: OnDelta, on_failure: OnFailure) -> "Future[None]":
        """See `EngineForm`."""
        self._on_delta, self._on_failure = on_delta, on_failure
        self._thread.start()
        return self._ready

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._build())
        except BaseException as error:  # noqa: BLE001 - handed to whoever made the engine
            self._closed = True
            if self._llm is not None:
                self._llm.shutdown()
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
            self._llm = import_module("vllm.v1.engine.async_llm").AsyncLLM.from_engine_args(arguments)
        await self._llm.update_weight_version("0")

    def run(self, function: Callable[[], Any]) -> "Future[Any]":
        """See `EngineForm`."""
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

    def _await(self, make: Callable[[], Coroutine[Any, Any, Any]]) -> "Future[Any]":
        """Run a coroutine in the owner's loop."""
        future = new_future()

        async def run() -> None:
            try:
                future.set_result(await self._unless_dead(make()))
            except BaseException as error:  # noqa: BLE001 - handed to whoever asked
                future.set_exception(error)

        def refuse(started: "Future[Any]") -> None:
            if error := started.exception():
                future.set_exception(error)

        self.run(lambda: self._keep(run())).add_done_callback(refuse)
        return future

    async def _unless_dead(self, call: Coroutine[Any, Any, Any]) -> Any:
        """What vLLM answers. A call to an engine core that has died meanwhile is left unanswered by vLLM for ever.

        Raises:
            PeerFailedError: it has died.
        """
        answer = self._loop.create_task(call)
        try:
            while not (await asyncio.wait({answer}, timeout=LOOK_S))[0]:
                if self._llm.errored:
                    error = self._llm.dead_error
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

    def prepare(self, prompt_ids: list[int], images: Sequence[Image]) -> "Future[Any]":
        """See `EngineForm`."""
        return prepare_images(self._llm.renderer, prompt_ids, images)

    def add(self, sample_id: str, prompt: Any, params: dict[str, Any], adapter: AdapterUse | None) -> None:
        """See `EngineForm`."""
        stream = self._llm.generate(
            engine_prompt(prompt), sampling_params(params), sample_id, lora_request=adapter_request(adapter)
        )
        self._streams[sample_id] = self._loop.create_task(self._follow(sample_id, stream))

    async def _follow(self, sample_id: str, stream: Any) -> None:
        try:
            async for output in stream:
                if output.outputs:
                    self._on_delta(sample_id, read_output(output, None))
        except Exception as error:  # noqa: BLE001 - the boundary: whoever waits for the sample learns of it
            self._on_failure("" if self._llm.errored else sample_id, error)
        finally:
            self._streams.pop(sample_id, None)

    def abort(self, sample_ids: Sequence[str]) -> None:
        """See `EngineForm`. vLLM ends each stream with an output that says so."""
        self._keep(self._llm.abort(list(sample_ids)))

    def freeze(self) -> "Future[None]":
        """See `EngineForm`."""

        async def freeze() -> None:
            await self._llm.pause_generation(mode="keep", clear_cache=False)
            # Outputs come through the same socket as the reply, before it; let them pass through vLLM's tasks and ours.
            await self._llm.is_paused()
            for _ in range(len(self._streams) + 2):
                await asyncio.sleep(0)

        return self._await(freeze)

    def thaw(self) -> "Future[None]":
        """See `EngineForm`."""
        return self._await(lambda: self._llm.resume_generation())

    def call_workers(self, text: str, deadline_s: float) -> "Future[list[str]]":
        """See `EngineForm`."""
        return self._await(lambda: self._llm.collective_rpc(WORKER_METHOD, deadline_s, (text,)))

    def publish(self, label: int) -> "Future[None]":
        """See `EngineForm`."""

        async def publish() -> None:
            if not await self._llm.reset_prefix_cache(reset_running_requests=True):
                raise WeightSyncError("vLLM did not drop its cached keys and values, so old ones could be used")
            await self._llm.reset_mm_cache()
            await self._llm.reset_encoder_cache()
            await self._llm.update_weight_version(str(label))

        return self._await(publish)

    def sleep(self, level: int) -> "Future[None]":
        """See `EngineForm`."""
        return self._await(lambda: self._llm.sleep(level, "keep"))

    def wake(self, tags: tuple[str, ...]) -> "Future[None]":
        """See `EngineForm`."""
        return self._await(lambda: self._llm.wake_up(list(tags) or None))

    def decode(self, ids: Sequence[int]) -> str:
        """See `EngineForm`."""
        return str(self._llm.get_tokenizer().decode(list(ids), skip_special_tokens=True))

    def close(self, deadline_s: float) -> bool:
        """See `EngineForm`."""
        if not self._closed:
            self._closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    async def _shut_down(self) -> None:
        """End the child processes, and what is left of our own tasks and vLLM's."""
        await asyncio.to_thread(self._llm.shutdown)
        rest = [task for task in asyncio.all_tasks(self._loop) if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

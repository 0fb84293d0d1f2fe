"""vLLM in this process: a thread steps its LLMEngine, and does between two steps what it is asked to.

Source: vllm 0.32.0, vllm/v1/engine/llm_engine.py (LLMEngine.add_request, step, abort_request, collective_rpc) and
core_client.py (InprocClient).
"""

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from importlib import import_module
from typing import Any

from offbeat_rollout_vllm._environment import environment
from offbeat_rollout_vllm._form import WORKER_METHOD, AdapterUse, OnDelta, OnFailure, new_future, settle
from offbeat_rollout_vllm._images import prepare_images
from offbeat_rollout_vllm._outputs import adapter_request, engine_prompt, make_arguments, read_output, sampling_params
from offbeat_rollout_vllm._samples import Delta
from offbeat_types import Image, OffbeatError, WeightSyncError

Job = tuple[Callable[[], Any], "Future[Any]"]


class InProcessForm:
    """See `EngineForm`. With tensor parallelism the workers are child processes, and the scheduler is here.

    Args:
        arguments: for vLLM's EngineArgs.
        variables: environment while it starts, where the user has set nothing else.
        required: environment while it starts, whatever the user has set.
        num_threads: torch threads of the engine's thread; 0 leaves torch's choice.
    """

    def __init__(
        self, arguments: Mapping[str, Any], variables: Mapping[str, str], required: Mapping[str, str], num_threads: int
    ) -> None:
        # A step must end with its tokens delivered: a batch in flight during an update would get the wrong version.
        self._arguments = {**arguments, "async_scheduling": False}
        self._variables, self._required = variables, {**required, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        self._num_threads = num_threads
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._door = threading.Lock()  # a job passes before `_closed` is set, and is answered, or not at all
        self._closed = self._frozen = False
        self._engine: Any = None
        self._label = 0
        self._internal_ids: dict[str, str] = {}
        self._ready = new_future()
        self._thread = threading.Thread(target=self._run, name="offbeat-rollout-vllm", daemon=True)

    def start(self, on_delta: OnDelta, on_failure: OnFailure) -> "Future[None]":
        """See `EngineForm`."""
        self._on_delta, self._on_failure = on_delta, on_failure
        self._thread.start()
        return self._ready

    def run(self, function: Callable[[], Any]) -> "Future[Any]":
        """See `EngineForm`."""
        future = new_future()
        with self._door:
            if not self._closed:
                self._jobs.put((function, future))
                return future
        future.set_exception(OffbeatError("the rollout engine is closed; make a new one"))
        return future

    def _run(self) -> None:
        try:
            self._engine = self._build()
        except BaseException as error:  # noqa: BLE001 - handed to whoever made the engine
            self._refuse_jobs()
            self._ready.set_exception(error)
            return
        self._ready.set_result(None)
        while not self._closed:
            self._do_jobs()
            if self._can_step():
                self._step()
        try:
            self._shut_down()
        finally:
            self._refuse_jobs()

    def _build(self) -> Any:
        with environment(self._variables, self._required):
            import torch

            if self._num_threads:
                torch.set_num_threads(self._num_threads)
            engine = import_module("vllm.v1.engine.llm_engine").LLMEngine.from_engine_args(
                make_arguments("EngineArgs", self._arguments)
            )
        engine.engine_core.set_weight_version("0")
        return engine

    def _can_step(self) -> bool:
        return not self._closed and not self._frozen and self._engine.has_unfinished_requests()

    def _do_jobs(self) -> None:
        """Do what was asked; wait for it when there is nothing to step."""
        while not self._closed and (not self._jobs.empty() or not self._can_step()):
            function, future = self._jobs.get()
            settle(future, function)

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:  # noqa: BLE001 - the boundary: every sample in flight learns of it
            self._internal_ids.clear()
            self._frozen = True
            self._on_failure("", error)
            return
        for output in outputs:
            delta = read_output(output, self._label)
            if delta.finish_reason is not None:
                self._internal_ids.pop(output.request_id, None)
            self._on_delta(output.request_id, delta)

    def prepare(self, prompt_ids: list[int], images: Sequence[Image]) -> "Future[Any]":
        """See `EngineForm`."""
        return prepare_images(self._engine.renderer, prompt_ids, images)

    def add(self, sample_id: str, prompt: Any, params: dict[str, Any], adapter: AdapterUse | None) -> None:
        """See `EngineForm`."""
        self._internal_ids[sample_id] = self._engine.add_request(
            sample_id, engine_prompt(prompt), sampling_params(params), lora_request=adapter_request(adapter)
        )

    def abort(self, sample_ids: Sequence[str]) -> None:
        """See `EngineForm`."""
        found = [sample_id for sample_id in sample_ids if self._internal_ids.pop(sample_id, None)]
        self._engine.abort_request(found)
        for sample_id in found:
            self._on_delta(sample_id, Delta(ids=(), logprobs=(), label=self._label, finish_reason="abort"))

    def freeze(self) -> "Future[None]":
        """See `EngineForm`. A step delivers what it samples, so between two steps nothing is under way."""
        return self.run(lambda: setattr(self, "_frozen", True))

    def thaw(self) -> "Future[None]":
        """See `EngineForm`."""
        return self.run(lambda: setattr(self, "_frozen", False))

    def call_workers(self, text: str, deadline_s: float) -> "Future[list[str]]":
        """See `EngineForm`."""
        return self.run(lambda: self._engine.collective_rpc(WORKER_METHOD, deadline_s, (text,)))

    def publish(self, label: int) -> "Future[None]":
        """See `EngineForm`."""

        def publish() -> None:
            if not self._engine.reset_prefix_cache(reset_running_requests=True):
                raise WeightSyncError("vLLM did not drop its cached keys and values, so old ones could be used")
            self._engine.reset_mm_cache()
            self._engine.reset_encoder_cache()
            self._engine.engine_core.set_weight_version(str(label))
            self._label = int(self._engine.engine_core.get_weight_version())

        return self.run(publish)

    def sleep(self, level: int) -> "Future[None]":
        """See `EngineForm`."""
        return self.run(lambda: self._engine.sleep(level, "keep"))

    def wake(self, tags: tuple[str, ...]) -> "Future[None]":
        """See `EngineForm`."""
        return self.run(lambda: self._engine.wake_up(list(tags) or None))

    def decode(self, ids: Sequence[int]) -> str:
        """See `EngineForm`."""
        return str(self._engine.get_tokenizer().decode(list(ids), skip_special_tokens=True))

    def close(self, deadline_s: float) -> bool:
        """See `EngineForm`."""
        if not self._closed:
            self.run(lambda: setattr(self, "_closed", True))
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _shut_down(self) -> None:
        """End workers, give memory back, and leave torch.distributed as it was: the next engine starts it anew."""
        self._engine.renderer.shutdown()
        self._engine.engine_core.shutdown()

    def _refuse_jobs(self) -> None:
        with self._door:
            self._closed = True
        while not self._jobs.empty():
            _, future = self._jobs.get()
            future.set_exception(OffbeatError("the rollout engine was closed"))

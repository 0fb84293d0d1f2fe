"""The thread that owns model, cache and samples. Everyone else asks it to run a function between two steps."""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from offbeat_mesh import Device
from offbeat_rollout_torch._samples import RequestInFlight
from offbeat_rollout_torch._stepper import Stepper
from offbeat_rollout_torch._vision import Pictures
from offbeat_rollout_torch._weights import DecoderWeights, WeightWriter
from offbeat_types import (
    EngineHealth,
    Floats,
    OffbeatError,
    PauseMode,
    PeerFailedError,
    ScoreRequest,
    WeightProof,
    WeightStream,
    WeightSyncError,
)

Job = tuple[Callable[[], Any], "Future[Any]"]


class Worker:
    """Runs steps and jobs in one thread of its own.

    Args:
        build: makes the stepper, in the thread.
        device: where the stepper computes.
        num_threads: torch threads of this thread; 0 leaves torch's choice. (They are counted per calling thread.)
    """

    def __init__(self, build: Callable[[], Stepper], device: Device, num_threads: int) -> None:
        self._build, self._device, self._num_threads = build, device, num_threads
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._stepper: Stepper
        self._mode: PauseMode | None = None
        self._held: list[RequestInFlight] = []
        self._drained: list[Future[None]] = []
        self._asleep: set[str] = set()
        self._unusable = ""
        self._closed = False
        self._door = threading.Lock()  # a job passes before `_closed` is set, and is answered, or not at all
        self._started_s = time.monotonic()
        self._ready = new_future()
        self._thread = threading.Thread(target=self._run, name="offbeat-rollout-torch", daemon=True)

    # Called from any thread

    def start(self) -> "Future[Any]":
        """Start the thread; the future is done when the model is loaded."""
        self._thread.start()
        return self._ready

    def call(self, function: Callable[[], Any]) -> "Future[Any]":
        """Run `function` in the thread, between two steps."""
        future = new_future()
        with self._door:
            if not self._closed:
                self._jobs.put((function, future))
                return future
        future.set_exception(OffbeatError("the rollout engine is closed; make a new one"))
        return future

    @property
    def is_closed(self) -> bool:
        """Whether it takes no more jobs."""
        return self._closed

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; say whether it did."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def health(self) -> EngineHealth:
        """Read the counters, without waiting for the thread."""
        stepper = self._stepper
        return EngineHealth(
            version=stepper.version,
            num_running=len(stepper.scheduler.running),
            num_waiting=len(stepper.scheduler.waiting) + sum(len(one.samples) for one in self._held),
            num_tokens=stepper.num_tokens,
            busy_s=stepper.busy_s,
            uptime_s=time.monotonic() - self._started_s,
        )

    # Run in the thread

    def _run(self) -> None:
        with torch.inference_mode():
            try:
                if self._num_threads:
                    torch.set_num_threads(self._num_threads)
                self._stepper = self._build()
            except BaseException as error:  # noqa: BLE001 - handed to whoever made the engine
                self._refuse_jobs()
                self._ready.set_exception(error)
                return
            self._ready.set_result(None)
            while not self._closed:
                self._do_jobs()
                if self._can_step():
                    self._step()
        self._refuse_jobs()

    def _refuse_jobs(self) -> None:
        with self._door:
            self._closed = True
        while not self._jobs.empty():
            _, future = self._jobs.get()
            future.set_exception(OffbeatError("the rollout engine was closed"))

    def _can_step(self) -> bool:
        stopped = self._closed or self._asleep or self._unusable or self._mode in ("keep", "abort")
        return not stopped and bool(self._stepper.scheduler.requests)

    def _do_jobs(self) -> None:
        """Do what was asked; wait for it when there is nothing to step."""
        while not self._closed and (not self._jobs.empty() or not self._can_step()):
            function, future = self._jobs.get()
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - handed to whoever asked, whatever it is
                future.set_exception(error)

    def _step(self) -> None:
        scheduler = self._stepper.scheduler
        try:
            self._stepper.step()
        except Exception as error:  # noqa: BLE001 - the boundary: every request in flight learns of it
            for request in list(scheduler.requests.values()):
                scheduler.remove(request)
                request.fail(error if isinstance(error, OffbeatError) else _broken(error))
        for request in scheduler.retire():
            request.finish()
        self._tell_drained()

    def _tell_drained(self) -> None:
        if not self._stepper.scheduler.requests:
            for future in self._drained:
                future.set_result(None)
            self._drained = []

    def submit(self, request: RequestInFlight) -> None:
        """Queue a request, or hold it while paused."""
        held = {one.request_id for one in self._held}
        if request.request_id in held | self._stepper.scheduler.requests.keys():
            raise OffbeatError(f"request_id {request.request_id!r} is in flight already; give each request its own")
        if self._mode is not None:
            self._held.append(request)
            return
        self._refuse_if_unusable()
        self._stepper.scheduler.add(request)

    def score(self, request: ScoreRequest, pictures: Pictures | None = None) -> list[Floats]:
        """Score tokens; nothing is sampled meanwhile."""
        for tag in ("weights", "kv_cache"):
            self._refuse_asleep(tag)
        self._refuse_if_unusable()
        return self._stepper.score(request, pictures)

    def abort(self, request_id: str) -> None:
        """End one request with what it has."""
        scheduler = self._stepper.scheduler
        if request := scheduler.requests.get(request_id):
            scheduler.remove(request)
            request.finish()
        for request in [one for one in self._held if one.request_id == request_id]:
            self._held.remove(request)
            request.finish()
        self._tell_drained()

    def abort_all(self) -> None:
        """End everything in flight with what it has."""
        for request_id in list(self._stepper.scheduler.requests):
            self.abort(request_id)

    def pause(self, mode: PauseMode, drained: "Future[None]") -> None:
        """Stop sampling; `drained` is done when the pause is reached."""
        self._mode = mode
        if mode == "abort":
            self.abort_all()
        if mode == "keep":
            drained.set_result(None)
        else:
            self._drained.append(drained)
            self._tell_drained()

    def resume(self) -> None:
        """Sample again; what was held is queued, or refused if there are no usable weights."""
        self._mode = None
        held, self._held = self._held, []
        if self._unusable:
            self.abort_all()
        for request in held:
            try:
                self.submit(request)
            except OffbeatError as error:
                request.fail(error)

    def update_weights(self, stream: WeightStream, version: int) -> WeightProof:
        """Write a whole stream in place. A failure after the first write leaves the engine refusing to serve."""
        self._refuse_asleep("weights")
        if stream.version != version:
            raise WeightSyncError(f"update_weights: asked for version {version}, the stream holds {stream.version}")
        stepper = self._stepper
        writer = WeightWriter(stepper.weights, WeightSyncError, f"weight stream of version {version}")
        try:
            for name, tensor in stream:
                writer.write(name, tensor)
            writer.finish()
            proof = stream.prove(stepper.weights.read)
        except Exception as error:
            if writer.written:
                self._spoil(f"the update to version {version} failed half way ({error})")
            if isinstance(error, OffbeatError):
                raise
            raise WeightSyncError(f"weight stream of version {version}: {error}") from error
        stepper.weights.freeze()
        stepper.version, self._unusable = version, ""
        self._forget()
        return proof

    def _spoil(self, reason: str) -> None:
        """Weights of two versions are mixed: serve nothing until a whole update arrives."""
        self._unusable = reason
        self._forget()
        if self._mode != "keep":
            self.abort_all()

    def _forget(self) -> None:
        """Drop what was computed of samples in flight: keys and values, and what the vision tower saw."""
        scheduler = self._stepper.scheduler
        scheduler.cache.drop()
        for request in scheduler.requests.values():
            if request.pictures is not None:
                request.pictures.seen = ()

    def _refuse_if_unusable(self) -> None:
        if self._unusable:
            raise WeightSyncError(f"the rollout engine has no usable weights: {self._unusable}; send a whole update")

    def _refuse_asleep(self, tag: str) -> None:
        if tag in self._asleep:
            raise OffbeatError(f"the rollout engine sleeps without {tag}; call wake(({tag!r},)) first")

    def sleep(self, level: int) -> None:
        """Free the cache, and at level 2 the weights; the process has less memory when this returns."""
        stepper = self._stepper
        self._forget()
        self._asleep.add("kv_cache")
        if level == 2:
            stepper.weights.release()
            self._asleep.add("weights")
        self._device.release_unused()

    def wake(self, tags: tuple[str, ...]) -> None:
        """Take memory again. Weights that were given back must come anew by `update_weights`."""
        wanted = set(tags or ("weights", "kv_cache"))
        if "weights" in wanted & self._asleep:
            old = self._stepper.weights
            self._stepper.weights = DecoderWeights(old.architecture, old.dtype, old.device, pack=old.pack)
            self._unusable = "they were given back by sleep(2)"
        self._asleep -= wanted

    def close(self) -> None:
        """End everything in flight and the thread."""
        self.abort_all()
        for request in self._held:
            request.finish()
        self._held = []
        self._closed = True


def new_future() -> "Future[Any]":
    """Make a future that cannot be cancelled: the thread will set it, whoever still listens."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def _broken(error: Exception) -> PeerFailedError:
    """What a step that raised leaves behind (no memory, a kernel that failed) only a new process mends."""
    return PeerFailedError("the embedded engine", f"a step of generation raised {type(error).__name__}: {error}")

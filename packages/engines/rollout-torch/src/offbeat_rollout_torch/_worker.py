"""The thread that owns model, cache and samples; others ask it to run a function between two steps."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
import torch

from offbeat_core import (
    LOGPROB,
    ConfigError,
    EngineHealth,
    EngineThread,
    Fingerprint,
    Floats,
    Ids,
    Inspection,
    LoraAdapter,
    OffbeatError,
    PauseMode,
    PeerFailedError,
    ScoreRequest,
    WeightProof,
    WeightStream,
    WeightSyncError,
    fingerprint,
    new_future,
)
from offbeat_device import Device
from offbeat_rollout_torch._adapters import Adapter
from offbeat_rollout_torch._images import RequestImages
from offbeat_rollout_torch._inspection import Notes
from offbeat_rollout_torch._loading import WeightWriter
from offbeat_rollout_torch._model_runner import ModelRunner
from offbeat_rollout_torch._scheduler import RequestState


class Worker:
    """Runs steps and jobs in one thread of its own. But for `health`, its methods are for `thread.call`.

    Args:
        build: makes the model runner, in the thread.
        device: where the model runner computes.
        num_threads: torch threads of this thread; 0 leaves torch's choice. (They are counted per calling thread.)
    """

    def __init__(self, build: Callable[[], ModelRunner], device: Device, num_threads: int) -> None:
        self._build_runner, self._device, self._num_threads = build, device, num_threads
        self._runner: ModelRunner
        self._mode: PauseMode | None = None
        self._held: list[RequestState] = []
        self._drained: list[Future[None]] = []
        self._asleep: set[str] = set()
        self._unusable = ""
        self._started_s = time.monotonic()
        self.thread = EngineThread(
            "offbeat-rollout-torch",
            build=self._build,
            can_step=self._can_step,
            step=self._step,
            context=torch.inference_mode,
        )

    def health(self) -> EngineHealth:
        """Read the counters, without waiting for the thread."""
        runner = self._runner
        return EngineHealth(
            version=runner.version,
            num_running=len(runner.scheduler.running),
            num_waiting=len(runner.scheduler.waiting) + sum(len(one.samples) for one in self._held),
            num_tokens=runner.num_tokens,
            busy_s=runner.busy_s,
            uptime_s=time.monotonic() - self._started_s,
            num_decoding=runner.num_decoding,
        )

    def _build(self) -> None:
        if self._num_threads:
            torch.set_num_threads(self._num_threads)
        self._runner = self._build_runner()

    def _can_step(self) -> bool:
        stopped = self._asleep or self._unusable or self._mode in ("keep", "abort")
        return not stopped and bool(self._runner.scheduler.requests)

    def _step(self) -> None:
        try:
            self._advance(self._runner.step)
        finally:
            # After an error, too: with it and no new token, `health` would let this engine pass for stuck.
            self._runner.num_decoding = 0

    def _settle(self) -> None:
        """Have the samples know all that was drawn; those that have ended by it are finished."""
        self._advance(self._runner.settle)

    def _advance(self, work: Callable[[], None]) -> None:
        scheduler = self._runner.scheduler
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the boundary: every request in flight learns of it
            for request in list(scheduler.requests.values()):
                scheduler.remove(request)
                request.done.set_exception(error if isinstance(error, OffbeatError) else _broken(error))
        for request in scheduler.retire():
            request.finish()
        self._notify_drained()

    def _notify_drained(self) -> None:
        if not self._runner.scheduler.requests:
            for future in self._drained:
                future.set_result(None)
            self._drained = []

    def submit(self, request: RequestState) -> None:
        """Queue a request, or hold it while paused."""
        held = {one.request_id for one in self._held}
        if request.request_id in held | self._runner.scheduler.requests.keys():
            raise OffbeatError(f"request_id {request.request_id!r} is in flight already; give each request its own")
        if request.adapter not in self._runner.adapters:
            raise ConfigError(
                f"the engine has no adapter {request.adapter!r} (it has: {self._runner.adapters}); send it first"
            )
        # Before the weights are looked at: an update may come before `resume`, which submits it again.
        if self._mode is not None:
            self._held.append(request)
            return
        self._refuse_if_unusable()
        self._runner.scheduler.add(request)

    def score(self, request: ScoreRequest, images: RequestImages | None = None) -> list[Floats]:
        """Score tokens; nothing is sampled meanwhile."""
        for tag in ("weights", "kv_cache"):
            self._refuse_asleep(tag)
        self._refuse_if_unusable()
        self._settle()
        return self._runner.score(request, images)

    def inspect(self, ids: Ids, layer: int | None, adapter: str, temperature: float) -> Inspection:
        """Run one sequence alone, and return what the engine computes; nothing is sampled meanwhile."""
        for tag in ("weights", "kv_cache"):
            self._refuse_asleep(tag)
        self._refuse_if_unusable()
        self._settle()
        notes = Notes(self._runner.weights.architecture, layer)
        # Each token but the first is scored, and the last is repeated: it goes through the model to be seen.
        request = ScoreRequest(
            request_id="inspect",
            prompt_ids=ids[:1],
            continuations=(np.append(ids[1:], ids[-1]),),
            temperature=temperature,
        )
        [logprobs] = self._runner.score(request, None, adapter, notes)
        scored = np.concatenate(([0.0], logprobs[:-1])).astype(np.float32)
        return {**notes.read(), LOGPROB: scored[:, None]}

    def fingerprints(self, names: Sequence[str]) -> dict[str, Fingerprint]:
        """Return the fingerprints of the tensors of these names that are here."""
        self._refuse_asleep("weights")
        weights = self._runner.weights
        held = [name for name in names if weights.aliases.get(name, name) in {*weights.parameters, *weights.stacks}]
        return {name: fingerprint(weights.read(name).float().cpu().numpy()) for name in held}

    def abort(self, request_id: str) -> None:
        self._settle()
        scheduler = self._runner.scheduler
        if request := scheduler.requests.get(request_id):
            scheduler.remove(request)
            request.finish()
        for request in [one for one in self._held if one.request_id == request_id]:
            self._held.remove(request)
            request.finish()
        self._notify_drained()

    def abort_all(self) -> None:
        for request_id in list(self._runner.scheduler.requests):
            self.abort(request_id)

    def pause(self, mode: PauseMode) -> "Future[None]":
        """Stop sampling; what it returns is done when the pause is reached."""
        self._settle()
        self._mode, drained = mode, new_future()
        if mode == "abort":
            self.abort_all()
        if mode == "keep":
            drained.set_result(None)
        else:
            self._drained.append(drained)
            self._notify_drained()
        return drained

    def resume(self) -> None:
        """Sample again; what was held is queued, or refused if there are no usable weights."""
        self._mode = None
        held, self._held = self._held, []
        # Samples that were held have no weights to go on with, and would never end.
        if self._unusable:
            self.abort_all()
        for request in held:
            try:
                self.submit(request)
            except OffbeatError as error:
                request.done.set_exception(error)

    def update_weights(self, stream: WeightStream, version: int) -> WeightProof:
        """Write a whole stream in place. A failure after the first write leaves the engine refusing to serve."""
        self._refuse_asleep("weights")
        if stream.version != version:
            raise WeightSyncError(f"update_weights: asked for version {version}, the stream holds {stream.version}")
        self._settle()
        runner = self._runner
        writer = WeightWriter(runner.weights, WeightSyncError, f"weight stream of version {version}")
        try:
            for name, tensor in stream:
                writer.write(name, tensor)
            writer.finish()
            proof = stream.prove(runner.weights.read)
        except Exception as error:
            if writer.has_written:  # before the first write the old version is whole
                self._mark_unusable(f"the update to version {version} failed half way ({error})")
            if isinstance(error, OffbeatError):
                raise
            raise WeightSyncError(f"weight stream of version {version}: {error}") from error
        runner.weights.freeze()
        runner.adapters.model_updated(version)
        self._unusable = ""
        self._drop_computed()
        return proof

    def update_adapter(self, stream: WeightStream, version: int, adapter: LoraAdapter) -> WeightProof:
        """Take an adapter whole, prove it, and put it in the place of the old one, which serves until then."""
        # An adapter lies on the weights: they must be here, and of one version.
        self._refuse_asleep("weights")
        self._refuse_if_unusable()
        if stream.version != version:
            raise WeightSyncError(f"update_weights: asked for version {version}, the stream holds {stream.version}")
        self._settle()
        runner, source = self._runner, f"adapter {adapter.name!r} of version {version}"
        try:
            # Copied: a tensor of the stream is valid only until the next is asked for.
            taken = {name: torch.as_tensor(tensor).clone() for name, tensor in stream}
            held = Adapter(runner.weights, taken, adapter.scale, source)
            proof = stream.prove(held.read)
        except OffbeatError:
            raise
        except Exception as error:
            raise WeightSyncError(f"{source}: {error}") from error
        runner.adapters.put(adapter, held, version)
        self._drop_computed()
        return proof

    def drop_adapter(self, name: str) -> None:
        """Forget an adapter that no request in flight uses."""
        # Held requests as well: they use it after `resume`.
        users = [
            one for one in (*self._runner.scheduler.requests.values(), *self._held) if name and one.adapter == name
        ]
        if users:
            raise OffbeatError(f"request {users[0].request_id!r} uses the adapter {name!r}; abort it, or wait for it")
        self._runner.adapters.drop(name)

    def _mark_unusable(self, reason: str) -> None:
        """Weights of two versions are mixed: serve nothing until a whole update arrives."""
        self._unusable = reason
        self._drop_computed()
        # Samples that a pause holds wait: another update may come before `resume`, which looks again.
        if self._mode != "keep":
            self.abort_all()

    def _drop_computed(self) -> None:
        """Drop what was computed of samples in flight: keys and values, and what the vision tower made of images."""
        scheduler = self._runner.scheduler
        scheduler.cache.drop()
        for request in scheduler.requests.values():
            if request.images is not None:
                request.images.features = ()

    def _refuse_if_unusable(self) -> None:
        if self._unusable:
            raise WeightSyncError(f"the rollout engine has no usable weights: {self._unusable}; send a whole update")

    def _refuse_asleep(self, tag: str) -> None:
        if tag in self._asleep:
            raise OffbeatError(f"the rollout engine sleeps without {tag}; call wake(({tag!r},)) first")

    def sleep(self, level: int) -> None:
        """Free the cache, and at level 2 the weights; the process has less memory when this returns.

        Where rows are static, addresses stay if the device can do that, and so do recorded steps, with the memory that
        they compute in: about that of one step, or of the largest pass of prompts.
        """
        self._settle()
        runner = self._runner
        runner.release_cache()  # first: what is dropped is zeroed
        self._drop_computed()
        self._asleep.add("kv_cache")
        if level == 2:
            runner.release_weights()
            self._asleep.add("weights")
        self._device.release_unused()

    def wake(self, wanted: set[str]) -> None:
        """Take memory again. Weights that were given back must come anew by `update_weights`.

        Raises:
            OffbeatError: the device has too little. What there was no memory for still sleeps.
        """
        if "weights" in wanted & self._asleep:
            self._runner.weights = self._runner.weights.restored()
            self._unusable = "they were given back by sleep(2)"
            self._asleep.remove("weights")
        if "kv_cache" in wanted & self._asleep:
            self._runner.restore_cache()
            self._asleep.remove("kv_cache")

    def close(self) -> None:
        self.abort_all()
        for request in self._held:
            request.finish()
        self._held = []
        self.thread.close()


def _broken(error: Exception) -> PeerFailedError:
    """Return what a step that raised leaves behind (no memory, a kernel that failed) only a new process mends."""
    return PeerFailedError("the embedded engine", f"a step of generation raised {type(error).__name__}: {error}")

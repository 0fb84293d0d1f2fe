"""The engine as the rest of offbeat sees it: async methods over vLLM in one of its two forms."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from offbeat_core import (
    Completion,
    ConfigError,
    DeadlineError,
    EngineHealth,
    Fingerprint,
    Floats,
    GenerateRequest,
    Ids,
    Inspection,
    LoraAdapter,
    OffbeatError,
    PauseMode,
    RolloutEngineConfig,
    RolloutEngineSettings,
    ScoreRequest,
    WeightProof,
    WeightStream,
    WeightSyncError,
    wake_tags,
)
from offbeat_rollout_vllm._adapters import Adapters, read_peft_adapter
from offbeat_rollout_vllm._control import EngineControl
from offbeat_rollout_vllm._inspection import Inspector
from offbeat_rollout_vllm._invariance import check_batch_invariance
from offbeat_rollout_vllm._options import remove_shared_memory
from offbeat_rollout_vllm._requests import (
    Requests,
    RequestState,
    RequestTable,
    Sample,
    check_scores,
    read_scores,
    score_requests,
)
from offbeat_rollout_vllm._setup import (
    DROPPED_SETTINGS,
    Setup,
    cache_budget,
    capabilities_on,
    check_torchvision,
    held_bytes,
    installed_engine,
    notices_of,
    refuses_adapters,
    supported_version,
)
from offbeat_rollout_vllm._updates import WeightLoader
from offbeat_rollout_vllm._vllm_objects import check_request
from offbeat_rollout_vllm._workers import Workers

CLOSE_DEADLINE_S: Final = 60.0
MIB: Final = 1 << 20
logger = logging.getLogger(__name__)


class VllmRolloutEngine:
    """vLLM, in this process or in processes of its own. Make it with `create`."""

    capabilities_on = staticmethod(capabilities_on)
    notices_of = staticmethod(notices_of)
    refuses_adapters = staticmethod(refuses_adapters)
    cache_budget = staticmethod(cache_budget)
    held_bytes = staticmethod(held_bytes)
    dropped_settings = DROPPED_SETTINGS
    workers_receive = True
    returns_routes = True

    def __init__(self, config: RolloutEngineConfig) -> None:
        setup = self._setup = Setup(config)
        self.notices, self.capabilities = setup.notices, setup.capabilities
        for notice in self.notices:
            logger.warning(notice)
        self._config, self._options, self._folder, self._form = setup.config, setup.options, setup.folder, setup.form
        self._workers = Workers(self._form, setup.num_workers, self._options.worker_deadline_s)
        self._table = RequestTable(self._folder.eos_ids)
        self._closed, self._started_s = False, time.monotonic()

    @classmethod
    def check_installed(cls, settings: RolloutEngineSettings | None = None) -> None:
        """See whether vLLM is here, in a version that is supported, and can import what it imports.

        Args:
            settings: of the engine, whose options may allow any version.

        Raises:
            BackendError: it is not, or cannot.
        """
        installed = installed_engine()
        if settings is None or not settings.options.get("any_version"):
            supported_version(*installed)
        check_torchvision()

    @classmethod
    async def create(cls, config: RolloutEngineConfig) -> "VllmRolloutEngine":
        """Load the model and start.

        Raises:
            BackendError: vLLM is not installed, or in a version that is not supported.
            ModelError: the folder is missing or corrupt.
            ConfigError: an option or device that cannot be, or batches that change numbers though none may.
            DeadlineError: the engine did not start in time.
        """
        engine = cls(config)
        await engine._start()
        first = engine._setup.first_weights()
        try:
            if first is not None:
                await engine.update_weights(first, 0)
            if engine._setup.is_batch_invariant:
                vocab_size, max_model_len = engine._folder.vocab_size, config.max_model_len
                await check_batch_invariance(engine._run, vocab_size, max_model_len, config.max_running)
        except BaseException:
            await engine.close()
            raise
        return engine

    async def _start(self) -> None:
        deadline_s = self._options.start_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.wrap_future(self._form.start(self._table.push, self._table.fail))
            self.workers = await asyncio.to_thread(self._workers.call, "describe")
            self._check_device()
        except BaseException as error:
            # A start that takes too long continues in its thread, which ends the engine as soon as it can.
            await asyncio.to_thread(self._form.close, 0.0 if isinstance(error, TimeoutError) else CLOSE_DEADLINE_S)
            if isinstance(error, TimeoutError):
                advice = "raise options.start_deadline_s"
                raise DeadlineError("rollout-vllm.start", "vLLM", deadline_s, advice) from error
            if isinstance(error, OffbeatError) or not isinstance(error, Exception):
                raise
            raise ConfigError(f"vLLM did not start with these settings: {type(error).__name__}: {error}") from error
        bucket_bytes, about = self._options.bucket_mb * MIB, self.workers[0]
        on_cpu = about["device"].split(":")[0] == "cpu"
        self._loader = WeightLoader(self._workers, self._folder, bucket_bytes, about["dtype"], on_cpu=on_cpu)
        limits, dtype = self._setup.limits, about["adapter_dtype"]
        self._adapters = Adapters(self._workers, self._folder, limits, dtype, self._loader.reserve, on_cpu=on_cpu)
        max_model_len = self._config.max_model_len
        self._requests = Requests(self._form, self._workers, self._table, self._adapters, max_model_len)
        self._control = EngineControl(self._form, self._workers, self._requests, self._loader, self._adapters)
        self._inspector = Inspector(self._workers, self._control, self._folder, max_model_len, self._loader.reserve)
        self._started_s = time.monotonic()

    def _check_device(self) -> None:
        wanted, found = self._config.device.split(":")[0], self.workers[0]["device"].split(":")[0]
        if wanted not in ("auto", found):
            raise ConfigError(f"rollout.device is {self._config.device}, but this build of vLLM runs on {found}")

    # Sampling

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """See `RolloutEngine`.

        Raises:
            DataError: the prompt is empty, holds unknown ids, leaves no room, or does not fit its images.
            ConfigError: a sampling parameter that cannot be, an adapter that the engine does not have.
            WeightSyncError: an update failed half way, and no whole one has come since.
            PeerFailedError: vLLM failed.
        """
        self.capabilities.check(request, "rollout-vllm")
        check_request(request, self._folder.vocab_size, self._config.max_model_len, self._folder.image_token_id)
        if not request.num_samples:
            return []
        prompt = np.asarray(request.prompt_ids).tolist()
        if request.images:
            prompt = await asyncio.wrap_future(self._form.prepare(prompt, request.images))
        state = RequestState(request, prompt)
        await self._run(state)
        return [self._completion(sample, request.adapter) for sample in state.samples]

    def _completion(self, sample: Sample, adapter: str) -> Completion:
        versions = self._control.served.segments(sample.labels, adapter)
        text = self._form.decode(sample.ids)
        return Completion.join(sample.ids, sample.logprobs, versions, sample.stop_reason, text, sample.routes)

    async def score(self, request: ScoreRequest) -> list[Floats]:
        """See `ScoringEngine`: at temperature 1, of the distribution that nothing is cut from."""
        check_scores(request, self.capabilities, self._folder.vocab_size, self._config.max_model_len)
        states = score_requests(request)
        running = [asyncio.ensure_future(self._run(state)) for state in states]
        try:
            await asyncio.gather(*running)
        finally:
            for each in running:
                each.cancel()
        return read_scores(request, states)

    async def inspect(
        self, ids: Ids, layer: int | None = None, *, adapter: str = "", temperature: float = 1.0
    ) -> Inspection:
        """See `InspectedEngine`. Of tensor-parallel ranks and compiled models it has what is whole.

        Raises:
            DataError: the sequence is longer than the engine takes, or the model has no such layer.
            OffbeatError: samples are in flight, so that it would not run alone.
        """
        if self._table.num_running + self._table.num_waiting:
            raise OffbeatError("samples are in flight, and inspect runs one sequence alone: wait for them first")
        return await self._inspector.inspect(self._run, ids, layer, adapter, temperature)

    async def fingerprints(self, names: Sequence[str]) -> Mapping[str, Fingerprint]:
        found: Mapping[str, Fingerprint] = await self._control.run(self._inspector.fingerprints, names)
        return found

    async def _run(self, state: RequestState) -> None:
        try:
            await self._owned(self._requests.submit, state)
            await asyncio.wrap_future(state.done)
        except asyncio.CancelledError:
            self._form.run(lambda: self._requests.abort(state.request.request_id))
            raise

    async def _owned(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.wrap_future(self._form.run(lambda: function(*arguments)))

    async def abort(self, request_id: str) -> None:
        await self._owned(self._requests.abort, request_id)

    # Pausing

    async def pause(self, mode: PauseMode) -> None:
        """See `RolloutEngine`.

        Raises:
            ConfigError: there is no such mode.
            OffbeatError: `wait`, and the engine sleeps on samples that `keep` holds.
        """
        self.capabilities.check_pause(mode)
        await asyncio.wrap_future(await self._control.run(self._control.pause, mode))

    async def resume(self) -> None:
        await self._control.run(self._control.resume)

    # Weights

    async def update_weights(
        self, stream: WeightStream, version: int, *, adapter: LoraAdapter | None = None
    ) -> WeightProof:
        """See `RolloutEngine`. Samples in flight continue under the new weights, their cached keys and values dropped.

        The stream is iterated in a thread of its own. When it fails after the first bucket was loaded the engine
        refuses to serve until a whole update arrives, because weights are written in place. An adapter is received
        whole before anything changes. Adapters stay through an update of the model. An update whose caller is cancelled
        continues to its end, and pauses, sleep and further updates wait for it.
        """
        self.capabilities.check_adapter(adapter, "rollout-vllm")
        if stream.version != version:
            raise WeightSyncError(f"update_weights: asked for version {version}, the stream holds {stream.version}")
        if adapter is None and self._setup.is_fp8 and not self._setup.holds_blocks:
            from offbeat_weightsync import DequantizedStream

            stream = DequantizedStream(stream)
        proof: WeightProof = await self._control.run(self._control.update, stream, version, adapter)
        return proof

    async def receive_weights(
        self, transport: str, addresses: Sequence[str], version: int, deadline_s: float, *, name: str
    ) -> WeightProof:
        """See `ReceivingEngine`. It serves and fails as after `update_weights`.

        Each of vLLM's workers joins its sender by itself, as `NAME.worker-RANK`, and hands what arrives on its device
        to vLLM's own loaders. The sums of what all hold, each its parts, are compared with what was sent.
        """
        proof: WeightProof = await self._control.run(
            self._control.receive, transport, addresses, version, deadline_s, name
        )
        return proof

    async def load_adapter(self, name: str, folder: str | Path, version: int = 0) -> WeightProof:
        """Load a LoRA adapter that Hugging Face PEFT has saved, or put it in place of the one of that name.

        Args:
            name: what requests call it.
            folder: with adapter_config.json and adapter_model.safetensors.
            version: policy version of what is sampled with it.

        Raises:
            ModelError: a file is missing or corrupt, or it is no plain LoRA.
            ConfigError, WeightSyncError: as in `update_weights`.
        """
        path = Path(folder).expanduser()
        adapter, stream = await asyncio.to_thread(read_peft_adapter, path, name, version)
        return await self.update_weights(stream, version, adapter=adapter)

    async def drop_adapter(self, name: str) -> None:
        if not name or not self.capabilities.lora:
            return
        await self._control.run(self._control.drop_adapter, name)

    async def sleep(self, level: int) -> None:
        """See `RolloutEngine`. After level 2, `wake` needs an `update_weights` before anything is sampled."""
        if level not in self.capabilities.sleep_levels:
            levels = ", ".join(map(str, self.capabilities.sleep_levels)) or "none: set options.enable_sleep_mode"
            raise ConfigError(f"sleep level must be one of: {levels}; got {level!r}")
        await self._control.run(self._control.sleep, level)

    async def wake(self, tags: tuple[str, ...] = ()) -> None:
        await self._control.run(self._control.wake, wake_tags(tags))

    # Life

    async def begin_trace(self) -> None:
        await self._control.run(self._control.trace, self._setup.traces.begin)

    async def end_trace(self) -> list[Path]:
        """See `TracingEngine`. Nothing is sampled while vLLM writes."""
        paths: list[Path] = await self._control.run(self._control.trace, self._setup.traces.end)
        return paths

    async def health(self) -> EngineHealth:
        table = self._table
        return EngineHealth(
            version=self._control.version,
            num_running=table.num_running,
            num_waiting=self._requests.num_waiting,
            num_tokens=table.num_tokens,
            busy_s=table.busy_s,
            uptime_s=time.monotonic() - self._started_s,
            num_decoding=table.num_decoding,
        )

    async def close(self) -> None:
        """See `RolloutEngine`. Closing twice is fine.

        Raises:
            DeadlineError: vLLM's thread is stuck.
        """
        if not self._closed:
            self._closed = True
            try:
                async with asyncio.timeout(CLOSE_DEADLINE_S):
                    await self._owned(self._requests.end_all)
                    await asyncio.wrap_future(await self._owned(self._table.when_empty))
            except (OffbeatError, TimeoutError):
                logger.debug("vLLM did not end its requests; closing it all the same")
        if not await asyncio.to_thread(self._form.close, CLOSE_DEADLINE_S):
            raise DeadlineError("rollout.close", "vLLM's thread", CLOSE_DEADLINE_S)
        self._control.close()
        remove_shared_memory(self.workers[0]["shared_memory"])

"""The engine as the rest of offbeat sees it."""

import asyncio
import time
import uuid
from contextlib import aclosing, suppress
from typing import Final, Self

import numpy as np

from offbeat_core import (
    Completion,
    ConfigError,
    DataError,
    DeadlineError,
    EngineHealth,
    GenerateRequest,
    LoraAdapter,
    ModelFolder,
    OffbeatError,
    PauseMode,
    PeerFailedError,
    RolloutCapabilities,
    RolloutEngineConfig,
    RolloutEngineSettings,
    WeightProof,
    WeightStream,
    WeightSyncError,
    wake_tags,
)
from offbeat_rollout_trtllm._handles import open_cuda_handles
from offbeat_rollout_trtllm._images import PromptImages
from offbeat_rollout_trtllm._local_link import LocalLink
from offbeat_rollout_trtllm._options import TrtllmOptions, cache_budget, held_bytes, load_tokenizer
from offbeat_rollout_trtllm._requests import InFlight, Sample, check_cut, to_engine_params
from offbeat_rollout_trtllm._server_link import EngineLink, ServerLink
from offbeat_rollout_trtllm._versions import Release, check_same_torch, find_release, installed_version
from offbeat_rollout_trtllm._weights import OpenHandles, WeightLoader

PAUSED: Final = "paused"
LOADING: Final = "loading"
FIRST_PAUSE_S: Final = 0.05


class TrtllmRolloutEngine:
    """Samples completions with TensorRT-LLM. Make it with `create`.

    Args:
        config: the common settings.
        link: the engine.
        release: its version's entry in the table.
        open_handles: how this process names tensors to the engine's workers.

    Attributes:
        capabilities: what it can do; it takes images where the model does.
    """

    cache_budget = staticmethod(cache_budget)
    held_bytes = staticmethod(held_bytes)

    def __init__(
        self, config: RolloutEngineConfig, link: EngineLink, release: Release, open_handles: OpenHandles
    ) -> None:
        self._config, self._options = config, TrtllmOptions.parse(config.options)
        self._link, self._release, self._folder = link, release, ModelFolder(config.model_path)
        self.capabilities = RolloutCapabilities(
            pause_modes=("abort", "wait"),
            sleep_levels=(1, 2),
            shares_prompt_prefix=True,
            multimodal=self._folder.has_vision,
        )
        self._tokenizer, self._eos_ids = load_tokenizer(self._folder.path), self._folder.eos_ids
        fp8 = self._options.weights == "fp8_blocks"
        if fp8 and self._folder.has_vision:
            raise ConfigError("weights = fp8_blocks is for models of language alone, and this one has a vision_config")
        self._loader = WeightLoader(
            link, self._folder, open_handles, bucket_bytes=self._options.bucket_bytes, fp8_blocks=fp8
        )
        self._in_flight = InFlight()
        self._client_id = uuid.uuid4().hex  # a server may have other clients, whose requests are named alike
        self._version, self._closed = 0, False
        self._asleep: set[str] = set()

    @staticmethod
    def notices_of(settings: RolloutEngineSettings) -> list[str]:
        """Return what is known to speak against settings, which is nothing or an error; TensorRT-LLM need not be here.

        Raises:
            ConfigError: an option that cannot be, or no server where this environment's torch keeps the engine out.
        """
        options = TrtllmOptions.parse(settings.options)
        if not options.server and not options.allow_unlisted_version:
            check_same_torch()
        return []

    needs_accelerator = True
    """Tell `doctor` to leave the engine out on a machine without one."""

    @classmethod
    def check_installed(cls, settings: RolloutEngineSettings | None = None) -> None:
        """See whether TensorRT-LLM is here, in a version that is supported.

        Args:
            settings: of the engine; nothing is needed here where their options name a server.

        Raises:
            BackendError: it is not; a server elsewhere can be used all the same.
        """
        options = TrtllmOptions.parse(settings.options if settings else {})
        if not options.server:
            find_release(installed_version(), allow_unlisted=options.allow_unlisted_version)

    @classmethod
    async def create(cls, config: RolloutEngineConfig, *, open_handles: OpenHandles = open_cuda_handles) -> Self:
        """Start the engine, or connect to one that runs.

        Raises:
            BackendError: TensorRT-LLM is not installed, or of a version that is not supported.
            ConfigError: an option that cannot be.
            ModelError: the model folder is missing or corrupt.
            PeerFailedError: no server at the address given.
        """
        options = TrtllmOptions.parse(config.options)
        load_tokenizer(ModelFolder(config.model_path).path)  # before minutes pass
        link: EngineLink
        if options.server:
            link = ServerLink(options.server, deadline_s=options.call_deadline_s)
        else:
            link = await LocalLink.start(config, options)
        release = find_release(await link.version_of_engine(), allow_unlisted=options.allow_unlisted_version)
        engine = cls(config, link, release, open_handles)
        engine._version = await link.served_version() or 0
        return engine

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """See `RolloutEngine`. Samples of a group are requests of their own, each with its seed.

        Raises:
            DataError: the prompt is empty, holds unknown ids, leaves no room, or does not fit its images.
            ConfigError: a sampling parameter that cannot be, an adapter; an image, and the model takes none.
            OffbeatError: a request of this id is in flight.
            WeightSyncError: an update failed half way, and no whole one has come since.
            PeerFailedError: the engine's server died.
        """
        self._check(request)
        first_seed = request.params.first_seed()
        async with self._in_flight.request(request.request_id) as aborted:
            samples = [self._sample(request, index, first_seed, aborted) for index in range(request.num_samples)]
            results = await asyncio.gather(*samples, return_exceptions=True)
        for each in results:
            if isinstance(each, BaseException):
                raise each
        return [each for each in results if isinstance(each, Completion)]

    async def _sample(
        self, request: GenerateRequest, index: int, first_seed: int, aborted: asyncio.Event
    ) -> Completion:
        sample = Sample(request.params, self._eos_ids, self._tokenizer)
        async with self._in_flight.sampling(aborted) as may_sample:
            if may_sample:
                sample_id = f"{self._client_id}/{request.request_id}/{index}"
                await self._follow(request, sample_id, first_seed + index, sample, aborted)
        return sample.completion()

    async def _follow(
        self, request: GenerateRequest, sample_id: str, seed: int, sample: Sample, aborted: asyncio.Event
    ) -> None:
        self._check_awake()
        room = self._config.max_model_len - len(request.prompt_ids)
        params = to_engine_params(
            request.params,
            seed=seed,
            eos_ids=self._eos_ids,
            max_tokens=min(request.params.max_tokens, room),
        )
        whose = f"request {request.request_id!r}"
        images = PromptImages.of(request.images, self._folder, whose) if request.images else None
        ending = asyncio.create_task(self._end_when(aborted, sample_id))
        try:
            stream = self._link.stream(sample_id, np.asarray(request.prompt_ids).tolist(), params, images)
            async with aclosing(stream) as deltas:
                async for delta in deltas:
                    self._in_flight.note_tokens(sample_id, sample.add(delta))
                    self._version = max(self._version, delta.version)
                    if sample.ended:
                        break
        finally:
            ending.cancel()
            self._in_flight.forget_sample(sample_id)

    async def _end_when(self, aborted: asyncio.Event, sample_id: str) -> None:
        """Tell the engine, again and again: the sample may not have got there yet."""
        await aborted.wait()
        pause_s = FIRST_PAUSE_S
        with suppress(PeerFailedError, DeadlineError):  # an engine that has gone shows in the sample's own stream
            while True:
                await self._link.abort(sample_id)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 1.0)

    def _check(self, request: GenerateRequest) -> None:
        if self._closed:
            raise OffbeatError("the engine is closed: make a new one")
        self.capabilities.check(request, "rollout-trtllm")
        request.check(self._folder.vocab_size, self._config.max_model_len)
        places = np.count_nonzero(np.asarray(request.prompt_ids) == self._folder.image_token_id)
        if self._folder.has_vision and places and not request.images:
            raise DataError(
                f"request {request.request_id!r}: the prompt holds {places} placeholder tokens of images (id "
                f"{self._folder.image_token_id}) and the request no image; put the images into it, or leave them out"
            )
        check_cut(request.params, allow_cut=self._options.allow_cut_sampling)

    def _check_awake(self) -> None:
        if self._asleep:
            raise OffbeatError(f"the engine has released {', '.join(sorted(self._asleep))}: wake it first")

    async def abort(self, request_id: str) -> None:
        self._in_flight.abort(request_id)

    async def pause(self, mode: PauseMode) -> None:
        """See `RolloutEngine`.

        Raises:
            DeadlineError: what is in flight does not end.
        """
        self.capabilities.check_pause(mode)
        self._in_flight.shut(PAUSED)
        if mode == "abort":
            for request_id in self._in_flight.request_ids:
                self._in_flight.abort(request_id)
        await self._in_flight.drained("rollout.pause", self._options.call_deadline_s)

    async def resume(self) -> None:
        self._in_flight.open(PAUSED)

    async def update_weights(
        self, stream: WeightStream, version: int, *, adapter: LoraAdapter | None = None
    ) -> WeightProof:
        """See `RolloutEngine`. What is in flight ends first, under the old weights; what comes waits.

        Raises:
            ConfigError: an adapter, which this engine does not take.
            WeightSyncError: see `WeightLoader.load`; the engine then refuses to serve.
            DeadlineError: what is in flight does not end.
        """
        self.capabilities.check_adapter(adapter, "rollout-trtllm")
        if stream.version != version:
            raise WeightSyncError(f"the stream holds version {stream.version}, and {version} was asked for")
        self._in_flight.shut(LOADING)
        try:
            await self._in_flight.drained("rollout.update_weights", self._options.call_deadline_s)
            proof = await self._loader.load(stream, version)
            self._version = version
            return proof
        finally:
            self._in_flight.open(LOADING)

    async def drop_adapter(self, name: str) -> None:
        """See `RolloutEngine`. There is none."""

    async def sleep(self, level: int) -> None:
        """See `RolloutEngine`. After level 2 the engine refuses to serve until it has weights again."""
        self.capabilities.check_sleep(level)
        if self._in_flight.num_running:
            raise OffbeatError(f"{self._in_flight.num_running} samples are in flight: pause before you sleep")
        parts = {"kv_cache"} if level == 1 else wake_tags(())
        if level > 1:
            await self._link.begin_weights()  # what memory holds after it is allocated again is not to be served
        await self._link.release(self._tags(parts - self._asleep))
        self._asleep |= parts

    async def wake(self, tags: tuple[str, ...] = ()) -> None:
        """See `RolloutEngine`. Released keys and values are gone, so the engine forgets that it had them."""
        parts = self._asleep & wake_tags(tags)
        if parts:
            await self._link.resume(self._tags(parts))
        if "kv_cache" in parts:
            await self._link.reset_prefix_cache()
        self._asleep -= parts

    def _tags(self, parts: set[str]) -> list[str]:
        release = self._release
        return [
            *(release.weight_tags if "weights" in parts else ()),
            *(release.cache_tags if "kv_cache" in parts else ()),
        ]

    async def health(self) -> EngineHealth:
        counts = self._in_flight
        return EngineHealth(
            version=self._version,
            num_running=counts.num_running,
            num_waiting=counts.num_waiting,
            num_tokens=counts.num_tokens,
            busy_s=counts.busy_s,
            uptime_s=time.monotonic() - counts.started_s,
            num_decoding=counts.num_decoding,
        )

    async def close(self) -> None:
        """See `RolloutEngine`. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        for request_id in self._in_flight.request_ids:
            self._in_flight.abort(request_id)
        await self._in_flight.drained("rollout.close", self._options.call_deadline_s)
        await self._link.close()

"""The engine as the rest of offbeat sees it: async methods over the worker thread."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Self, TypeVar

import torch

from offbeat_core import (
    CacheBudget,
    CacheNeeds,
    Completion,
    ConfigError,
    DataError,
    DeadlineError,
    EngineHealth,
    Fingerprint,
    Floats,
    GenerateRequest,
    HeldBytes,
    Ids,
    Inspection,
    LoraAdapter,
    OnToken,
    PauseMode,
    RolloutCapabilities,
    RolloutEngineConfig,
    RolloutEngineSettings,
    ScoreRequest,
    WeightProof,
    WeightStream,
    read_options,
    setting,
    wake_tags,
)
from offbeat_device import Device, check_exact, check_exact_family, open_device
from offbeat_rollout_torch._cache import SMALLEST_CAPACITY, KVCache, state_tokens, token_bytes
from offbeat_rollout_torch._decoder import DecoderWeights
from offbeat_rollout_torch._families import eos_ids_of, load_tokenizer, read_architecture
from offbeat_rollout_torch._images import ImageProcessor, RequestImages
from offbeat_rollout_torch._loading import load_weights
from offbeat_rollout_torch._model_runner import ModelRunner
from offbeat_rollout_torch._scheduler import RequestState, Scheduler, StopCriteria
from offbeat_rollout_torch._static_rows.cache import StaticCache, static_row_tokens
from offbeat_rollout_torch._static_rows.compiled import choose_step
from offbeat_rollout_torch._static_rows.decoder import StaticDecoder
from offbeat_rollout_torch._static_rows.prefill import SEGMENT_TOKENS
from offbeat_rollout_torch._worker import Worker
from offbeat_weightsync import DequantizedStream

T = TypeVar("T")
FP8: Final = "fp8"
CLOSE_DEADLINE_S: Final = 60.0
CACHE_SHARE_OF_MEMORY: Final = 0.25


@dataclass(frozen=True, kw_only=True)
class TorchRolloutOptions:
    """Extras of this engine, given as `RolloutEngineConfig.options`."""

    kv_cache_tokens: int = setting(
        0,
        "Budget of cached tokens, exceeded by an eighth or one longest row at most; 0: max_running times "
        "max_model_len, or a quarter of memory.",
        "tokens",
        ge=0,
    )
    prefix_cache_share: float = setting(
        0.25,
        "Share of kv_cache_tokens that may keep what ended samples have computed, for prompts that begin with their "
        "tokens, such as the next turn of an episode; 0: nothing is kept.",
        ge=0,
        le=1,
    )
    max_prefill_tokens: int = setting(2048, "Prompt tokens of one step; longer prompts take several.", "tokens", ge=16)
    prefill_beside_decoding: int = setting(
        512,
        "Prompt tokens of one step of static rows in which other samples decode; where steps are recorded, a prompt "
        "counts in multiples of 64.",
        "tokens",
        ge=16,
    )
    pack_weights: bool = setting(True, "Hold large matrices in oneDNN's layout on the CPU: 2 to 3 times as fast.")

    static_rows: bool | None = setting(
        None,
        "Decode in rows of max_model_len tokens, taken at once, with tokens and draws on the device and read one step "
        "late; none: where the device records work, which is CUDA.",
    )
    graphs: bool = setting(
        True, "Record steps of static rows, decoding and prompts, and repeat each by one call, on CUDA."
    )
    compile_steps: str = setting(
        "auto",
        "Compile the small operators of steps of static rows with torch.compile, those of prompts where they are "
        "recorded: auto does on a device that records work and whose compiler is complete; on refuses to start where "
        "decoding steps cannot be compiled.",
        choices=("auto", "on", "off"),
    )
    numerics: str = setting(
        "native",
        "exact: the bits of log-probabilities do not depend on the batch, and are those of the torch trainer with the "
        "same option; without static rows and adapters.",
        choices=("native", "exact"),
    )

    @property
    def is_exact(self) -> bool:
        return self.numerics == "exact"

    @classmethod
    def parse(cls, options: dict[str, Any]) -> Self:
        """Check names, types and bounds.

        Raises:
            ConfigError: whatever is wrong.
        """
        parsed = read_options("rollout-torch", cls, options)
        if parsed.is_exact and (parsed.static_rows or not parsed.pack_weights):
            wrong = "static_rows = true" if parsed.static_rows else "pack_weights = false"
            raise ConfigError(f'option numerics = "exact" has arithmetic of its own, without {wrong}: leave it out')
        return parsed


def cache_budget(settings: RolloutEngineSettings, needs: CacheNeeds) -> CacheBudget:
    """Return the memory that this engine takes of a device: for its budget of tokens or its samples, up to a share.

    States of samples are in either.
    """
    options = TorchRolloutOptions.parse(settings.options)
    of_samples = settings.max_running * (settings.max_model_len * needs.token_bytes + needs.state_bytes)
    wanted = options.kv_cache_tokens * needs.token_bytes if options.kv_cache_tokens else of_samples
    if needs.device_bytes and not options.kv_cache_tokens:
        wanted = min(wanted, CACHE_SHARE_OF_MEMORY * needs.device_bytes)
    advice = "a smaller {0}.max_model_len, or fewer kv_cache_tokens in {0}.options"
    return CacheBudget(cache_bytes=int(wanted), advice=advice)


def held_bytes(settings: RolloutEngineSettings) -> HeldBytes:
    """Return that states are float32, whatever the format of the model. See `HeldBytes`."""
    return HeldBytes(state=4)


def refuses_adapters(config: RolloutEngineConfig, rank: int) -> str:
    """Why an engine of these settings takes no LoRA adapters of this rank; empty where it does."""
    if TorchRolloutOptions.parse(config.options).is_exact:
        return 'rollout-torch takes no adapters with numerics = "exact"'
    vision = read_architecture(Path(config.model_path).expanduser()).vision
    return "rollout-torch takes no adapters of a vision-language model" if vision else ""


def check_model(folder: Path) -> None:
    """Refuse a model that this engine cannot compute, before there is an engine.

    Raises:
        ModelError: its family, or a variant of it, is not supported.
    """
    read_architecture(folder.expanduser())


class TorchRolloutEngine:
    """Samples completions in this process, in a thread of its own. Make it with `create`.

    Attributes:
        capabilities: what it can do; it takes images where the model does.
        whole_logprobs: it reports log-probabilities before a cut too; known before there is an engine.
        loads_on_device: it takes weights that are on its device, without a copy through the host; known before, too.
        parks_cache_alone: its sleep of level 1 leaves the weights where they are; known before, too.
        returns_routes: it says which experts of a mixture each token took; known before, too.
        computes_exactly: it knows option numerics; known before, too.
    """

    whole_logprobs: ClassVar[bool] = True
    loads_on_device: ClassVar[bool] = True
    parks_cache_alone: ClassVar[bool] = True
    returns_routes: ClassVar[bool] = True
    computes_exactly: ClassVar[bool] = True
    cache_budget = staticmethod(cache_budget)
    held_bytes = staticmethod(held_bytes)
    refuses_adapters = staticmethod(refuses_adapters)
    check_model = staticmethod(check_model)

    def __init__(self, config: RolloutEngineConfig) -> None:
        folder = Path(config.model_path).expanduser()
        self._options = TorchRolloutOptions.parse(config.options)
        if config.tensor_parallel != 1:
            raise ConfigError(
                f"rollout-torch runs on one device, and rollout.tensor_parallel is {config.tensor_parallel}; set it to "
                "1, or take a backend that splits its model, such as vllm"
            )
        self._architecture = read_architecture(folder)
        if self._options.is_exact:
            check_exact_family(self._architecture.family)
            if config.weight_format == FP8:
                raise ConfigError(
                    'numerics = "exact" needs weights that are the trainer\'s: set weight_format = "dtype"'
                )
        self._image_processor = ImageProcessor(folder) if self._architecture.vision else None
        self.capabilities = RolloutCapabilities(
            pause_modes=("abort", "wait", "keep"),
            sleep_levels=(1, 2),
            shares_prompt_prefix=True,
            multimodal=self._image_processor is not None,
            lora=self._image_processor is None and not self._options.is_exact,
            scores=True,
            scores_images=self._image_processor is not None,
            scores_any_temperature=True,
            whole_logprobs=self.whole_logprobs,
            fp8_weights=not (self._architecture.num_experts or self._architecture.rule),
            routes=bool(self._architecture.num_experts),
        )
        self._tokenizer = load_tokenizer(folder)
        self._folder, self._config = folder, config
        self._device: Device = open_device(config.device)
        eos_ids = eos_ids_of(folder, self._tokenizer)
        self._stop_criteria = StopCriteria(
            eos_ids=eos_ids, max_model_len=min(config.max_model_len, self._architecture.max_positions)
        )
        self._row_tokens = self._static_row_tokens()
        if self._options.compile_steps == "on" and not self._row_tokens:
            raise ConfigError(
                "option compile_steps is on, and rows are not static; set static_rows to true, or use auto"
            )
        self._budget_tokens = self._kv_budget()
        self._worker = Worker(self._build, self._device, config.num_threads)

    @classmethod
    async def create(cls, config: RolloutEngineConfig) -> Self:
        """Load the model and start.

        Raises:
            ModelError: the folder is missing, corrupt, or of a family that is not supported.
            ConfigError: an option or device that cannot be.
        """
        engine = cls(config)
        await asyncio.wrap_future(engine._worker.thread.start())
        return engine

    def _build(self) -> ModelRunner:
        dtype: torch.dtype = getattr(torch, self._config.dtype)
        reserve = self._device.reserve if self._row_tokens else None  # for recorded steps, which hold addresses
        weights = DecoderWeights(
            self._architecture,
            dtype,
            self._device.torch_device,
            pack=self._options.pack_weights,
            reserve=reserve,
            exact=self._options.is_exact,
        )
        if weights.exact:
            a = self._architecture
            head = a.vocab_size, a.hidden_size
            check_exact(weights.device, dtype, weights.shapes(), a.head_dim, head=head)
        load_weights(weights, self._folder, as_fp8=self._config.weight_format == FP8)
        budget, longest = self._budget_tokens, self._stop_criteria.max_model_len
        kept, like, static = int(self._options.prefix_cache_share * budget), weights.final_norm, None
        if self._row_tokens:
            num_rows = min(self._config.max_running, budget // self._row_tokens)
            rows = StaticCache(self._architecture, num_rows, self._row_tokens, budget, like, kept, reserve)
            step = choose_step(self._options.compile_steps, weights, self._device)
            static = StaticDecoder(rows, self._device, longest, step, records=self._options.graphs)
        cache = (
            static.cache
            if static
            else KVCache(self._architecture, budget, longest, like, kept, shares=not weights.exact)
        )
        options = self._options
        scheduler = Scheduler(
            cache,
            self._config.max_running,
            options.max_prefill_tokens,
            options.prefill_beside_decoding,
            SEGMENT_TOKENS if static and static.records else 1,
        )
        return ModelRunner(scheduler, weights, self._stop_criteria, static, notes_routes=self._config.return_routes)

    def _static_row_tokens(self) -> int:
        """Tokens of a static row; 0 without such."""
        wanted = self._options.static_rows
        if self._options.is_exact:
            return 0
        if self._architecture.num_experts or self._architecture.rule:
            if wanted:
                what = "mixtures of experts" if self._architecture.num_experts else "layers with the gated delta rule"
                raise ConfigError(f"static_rows compute no {what}: leave the option out, or set false")
            return 0
        if wanted is False or (wanted is None and self._device.work_graphs() is None):
            return 0
        return static_row_tokens(self._stop_criteria.max_model_len)

    def _kv_budget(self) -> int:
        if self._options.kv_cache_tokens:
            least, given = self._row_tokens or self._cost(1), self._options.kv_cache_tokens
            if given < least:
                advice = ", a row of max_model_len; or set static_rows to false" if self._row_tokens else ""
                raise ConfigError(f"kv_cache_tokens must be at least {least}, got {given}{advice}")
            return self._options.kv_cache_tokens
        of_token = token_bytes(self._architecture, getattr(torch, self._config.dtype))
        longest = self._cost(self._stop_criteria.max_model_len)
        allowed = int(CACHE_SHARE_OF_MEMORY * self._device.memory().total_bytes) // of_token
        return max(min(self._config.max_running * longest, allowed), longest)

    def _cost(self, length: int) -> int:
        """Tokens of cache that a sequence of this length takes: a power of two, and what its states are worth."""
        capacity = max(SMALLEST_CAPACITY, 1 << (length - 1).bit_length())
        return capacity + state_tokens(self._architecture, getattr(torch, self._config.dtype))

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """See `RolloutEngine`.

        Raises:
            DataError: the prompt is empty, holds unknown ids, leaves no room, or does not fit its images.
            ConfigError: a sampling parameter that cannot be, an adapter that was not sent; an image, and the model
                takes none.
            WeightSyncError: an update failed half way, and no whole one has come since.
        """
        return await self._generate(request, None)

    async def stream(self, request: GenerateRequest, notify: OnToken) -> list[Completion]:
        loop = asyncio.get_running_loop()

        def pass_on(sample: int, token: int, logprob: float) -> None:
            loop.call_soon_threadsafe(notify, sample, token, logprob)

        return await self._generate(request, pass_on)

    async def _generate(self, request: GenerateRequest, notify: OnToken | None) -> list[Completion]:
        self._check(request)
        state = RequestState(request, self._tokenizer, await self._prepare_images(request), notify)
        if not state.samples:
            return []
        try:
            await self._call(self._worker.submit, state)
            return await asyncio.wrap_future(state.done)
        except asyncio.CancelledError:
            self._worker.thread.call(lambda: self._worker.abort(request.request_id))
            raise

    async def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.wrap_future(self._worker.thread.call(lambda: function(*arguments)))

    async def score(self, request: ScoreRequest) -> list[Floats]:
        """See `ScoringEngine`: at any temperature, in the memory of the cache that samples leave, or give up for it."""
        request.check(self._architecture.vocab_size, self._stop_criteria.max_model_len)
        request.check_images(self.capabilities, "rollout-torch")
        self._check_room(request.request_id, request.longest)
        images = await self._prepare_images(request)
        return await self._call(self._worker.score, request, images)

    async def inspect(
        self, ids: Ids, layer: int | None = None, *, adapter: str = "", temperature: float = 1.0
    ) -> Inspection:
        """See `InspectedEngine`: one sequence alone, uncompiled, in a cache of its own."""
        longest, num_layers = self._stop_criteria.max_model_len, self._architecture.num_layers
        if not 0 < len(ids) < longest:
            raise DataError(f"inspect takes 1 to {longest - 1} tokens (max_model_len - 1), got {len(ids)}")
        if layer is not None and not 0 <= layer < num_layers:
            raise DataError(f"layer {layer} was asked for, and the model has layers 0 to {num_layers - 1}")
        self._check_room("inspect", len(ids) + 1)
        return await self._call(self._worker.inspect, ids, layer, adapter, temperature)

    async def fingerprints(self, names: Sequence[str]) -> Mapping[str, Fingerprint]:
        return await self._call(self._worker.fingerprints, names)

    async def _prepare_images(self, request: GenerateRequest | ScoreRequest) -> RequestImages | None:
        """Prepare the images, in another thread than that of the event loop."""
        if self._image_processor is None:
            return None
        return await asyncio.to_thread(self._image_processor.prepare, request, self._device.torch_device)

    def _check(self, request: GenerateRequest) -> None:
        self.capabilities.check(request, "rollout-torch")
        longest = self._stop_criteria.max_model_len
        request.check(self._architecture.vocab_size, longest)
        self._check_room(request.request_id, min(len(request.prompt_ids) + request.params.max_tokens, longest))

    def _check_room(self, request_id: str, num_tokens: int) -> None:
        needed = self._row_tokens or self._cost(num_tokens)
        if needed > self._budget_tokens:
            raise DataError(
                f"request {request_id!r}: prompt and completion may take {needed} tokens of cache, and "
                f"kv_cache_tokens is {self._budget_tokens}; raise it, or lower max_tokens"
            )

    async def abort(self, request_id: str) -> None:
        await self._call(self._worker.abort, request_id)

    async def pause(self, mode: PauseMode) -> None:
        self.capabilities.check_pause(mode)
        await asyncio.wrap_future(await self._call(self._worker.pause, mode))

    async def resume(self) -> None:
        await self._call(self._worker.resume)

    async def update_weights(
        self, stream: WeightStream, version: int, *, adapter: LoraAdapter | None = None
    ) -> WeightProof:
        """See `RolloutEngine`. Samples in flight continue, computed anew under the new weights.

        The stream is iterated in the worker's thread. When it fails after its first tensor the engine refuses to
        serve until a whole update arrives, because weights are written in place. FP8 blocks are held as the values they
        stand for, in the engine's format: precision is that of FP8, memory is not.

        An adapter is received whole before anything changes, so a stream that fails leaves the old one in place. It
        stays through `sleep`: it is small.
        """
        self.capabilities.check_adapter(adapter, "rollout-torch")
        if adapter is not None:
            return await self._call(self._worker.update_adapter, stream, version, adapter)
        if self._config.weight_format == FP8:
            stream = DequantizedStream(stream)
        return await self._call(self._worker.update_weights, stream, version)

    async def drop_adapter(self, name: str) -> None:
        await self._call(self._worker.drop_adapter, name)

    async def sleep(self, level: int) -> None:
        """See `RolloutEngine`. After level 2, `wake` needs an `update_weights` before anything is sampled."""
        self.capabilities.check_sleep(level)
        await self._call(self._worker.sleep, level)

    async def wake(self, tags: tuple[str, ...] = ()) -> None:
        await self._call(self._worker.wake, wake_tags(tags))

    async def health(self) -> EngineHealth:
        return self._worker.health()

    async def close(self) -> None:
        """See `RolloutEngine`. Closing twice is fine.

        Raises:
            DeadlineError: the thread is stuck in one step or one stream.
        """
        if not self._worker.thread.is_closed:
            await self._call(self._worker.close)
        if not await asyncio.to_thread(self._worker.thread.join, CLOSE_DEADLINE_S):
            raise DeadlineError("rollout.close", "the worker thread", CLOSE_DEADLINE_S)

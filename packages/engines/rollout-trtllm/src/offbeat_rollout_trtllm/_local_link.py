"""An engine in this process: TensorRT-LLM's AsyncLLM, whose workers are Ray actors."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

from offbeat_core import (
    BackendError,
    ConfigError,
    DataError,
    DeadlineError,
    ModelError,
    ModelFolder,
    RolloutEngineConfig,
    WeightSyncError,
)
from offbeat_rollout_trtllm._images import PromptImages
from offbeat_rollout_trtllm._options import FP8_QUANTIZATION, TrtllmOptions
from offbeat_rollout_trtllm._versions import Release, find_release, import_engine


class Delta(NamedTuple):
    """Addition to one sample since the last one.

    Args:
        ids: new tokens.
        logprobs: of each.
        version: policy version that chose them.
        ended: empty while it runs, else the engine's word: stop, length, cancelled or timeout.
        stop_reason: token id that ended it, when one did.
    """

    ids: list[int]
    logprobs: list[float]
    version: int
    ended: str = ""
    stop_reason: int | None = None


WORKER: Final = "offbeat_rollout_trtllm.worker.WorkerExtension"


def engine_arguments(
    config: RolloutEngineConfig, options: TrtllmOptions, release: Release, *, has_vision: bool = False
) -> dict[str, Any]:
    """Arguments of AsyncLLM, but the cache's. A model with vision needs the tokenizer: it reads prompts with images.

    The sampler is TRTLLMSampler: it honours a request's seed, and its log-probabilities are those at the temperature
    used; those of 1.2's default sampler are at temperature 1.
    """
    sleep_name, sleep_value = release.sleep_argument
    arguments: dict[str, Any] = {
        "model": config.model_path,
        "dtype": config.dtype,
        "tensor_parallel_size": config.tensor_parallel,
        "trust_remote_code": config.trust_remote_code,
        "skip_tokenizer_init": not has_vision,
        "max_batch_size": config.max_running,
        "max_seq_len": config.max_model_len,
        "sampler_type": "TRTLLMSampler",
        "ray_worker_extension_cls": WORKER,
        sleep_name: sleep_value,
    }
    if options.weights == "fp8_blocks":
        # The folder's weights are not in FP8: the engine starts on none, and the first update brings them.
        arguments |= {"model_kwargs": {"quantization_config": dict(FP8_QUANTIZATION)}, "load_format": "dummy"}
    if ours := sorted(arguments.keys() & options.engine_args.keys() - {"max_batch_size", "max_seq_len"}):
        raise ConfigError(f"engine_args must leave {', '.join(ours)} to the adapter: set them by their own options")
    return arguments | options.engine_args


class LocalLink:
    """Generates and loads through an AsyncLLM that has been started. Make it with `start`.

    Args:
        llm: AsyncLLM.
        sampling_params: TensorRT-LLM's class SamplingParams.
        version: TensorRT-LLM's version.
        has_vision: the model takes images.
    """

    def __init__(self, llm: Any, sampling_params: Any, version: str, *, has_vision: bool = False) -> None:
        self.llm, self._sampling_params, self._engine_version = llm, sampling_params, version
        self._has_vision = has_vision
        self._running: dict[str, Any] = {}
        self.version = 0
        self.loading = False

    @classmethod
    async def start(cls, config: RolloutEngineConfig, options: TrtllmOptions) -> Self:
        """Start the engine and its workers.

        Raises:
            BackendError: TensorRT-LLM is not installed, or of a version that is not supported.
            DeadlineError: the workers do not come.
        """
        package = import_engine()
        release = find_release(str(package.__version__), allow_unlisted=options.allow_unlisted_version)
        llmapi = import_engine("tensorrt_llm.llmapi")
        cache = {
            "enable_block_reuse": options.reuse_blocks,
            "free_gpu_memory_fraction": options.kv_cache_fraction,
            **({"dtype": "fp8"} if options.fp8_kv_cache else {}),
        }
        has_vision = _has_vision(config.model_path)
        arguments = engine_arguments(config, options, release, has_vision=has_vision)
        llm = package.AsyncLLM(**arguments, kv_cache_config=llmapi.KvCacheConfig(**cache))
        try:
            async with asyncio.timeout(options.start_deadline_s):
                await llm
        except TimeoutError as error:
            llm.shutdown()
            raise DeadlineError(
                "AsyncLLM", "TensorRT-LLM's workers", options.start_deadline_s, "see Ray's log"
            ) from error
        link = cls(llm, llmapi.SamplingParams, str(package.__version__), has_vision=has_vision)
        link.loading = options.weights == "fp8_blocks"
        return link

    async def version_of_engine(self) -> str:
        return self._engine_version

    async def served_version(self) -> int | None:
        """Policy version it serves; None while it holds no whole set of weights."""
        return None if self.loading else self.version

    async def device_ids(self) -> list[str]:
        return [str(each) for each in await self._on_workers("weights_device")]

    async def stream(
        self, sample_id: str, prompt_ids: Sequence[int], params: Mapping[str, Any], images: PromptImages | None = None
    ) -> AsyncGenerator[Delta, None]:
        """Generate one sample; closing the stream ends it. `params` are arguments of TensorRT-LLM's SamplingParams.

        Raises:
            DataError: images that the model does not take, or around which the engine reads other tokens.
            WeightSyncError: it holds no whole set of weights.
            BackendError: the engine left out a log-probability.
        """
        if self.loading:
            raise WeightSyncError("the engine holds no whole set of weights: send a whole update")
        version, taken, ended = self.version, 0, ""
        result = self._begin(list(prompt_ids), self._sampling_params(**params), images)
        self._running[sample_id] = result
        try:
            async for step in result:
                output = step.outputs[0]
                ids = [int(token) for token in output.token_ids[taken:]]
                logprobs = _chosen_logprobs(ids, output.logprobs or [], taken)
                taken += len(ids)
                reason = output.stop_reason if isinstance(output.stop_reason, int) else None
                ended = output.finish_reason or ""
                yield Delta(ids, logprobs, version, ended, reason)
        finally:
            self._running.pop(sample_id, None)
            if not ended:  # the caller listens no more, and the engine would continue
                result.abort()

    def _begin(self, prompt_ids: list[int], params: Any, images: PromptImages | None) -> Any:
        """Hand a prompt to the engine. With images, what the engine reads is held to the ids before it counts."""
        if images is None:
            return self.llm.generate_async(prompt_ids, params, streaming=True)
        if not self._has_vision:
            raise DataError(
                f"the prompt has {len(images.images)} images, and this engine's model takes none (config.json has no "
                "vision_config): serve a vision-language model, or leave the images out"
            )
        prompt = images.engine_prompt(prompt_ids)
        try:
            result = self.llm.generate_async(prompt, params, streaming=True)
        except Exception as error:
            sizes = ", ".join(f"{image.shape[1]} x {image.shape[0]}" for image in images.images)
            raise DataError(f"TensorRT-LLM cannot prepare images of {sizes} pixels: {error}") from error
        try:
            images.check_read(result.prompt_token_ids, prompt_ids)
        except DataError:
            result.abort()
            raise
        return result

    async def abort(self, sample_id: str) -> None:
        """End a sample now; its stream ends with `cancelled`. Unknown ids are ignored."""
        if (result := self._running.get(sample_id)) is not None:
            result.abort()

    async def supports_partial_loading(self) -> bool:
        """Return whether every worker can load some of the model's tensors at a time."""
        return all(await self._on_workers("supports_partial_loading"))

    async def begin_weights(self) -> None:
        """Refuse to generate until `finish_weights`."""
        self.loading = True
        await self._on_workers("begin_weights")

    async def update_weights(self, handles: Mapping[str, str]) -> None:
        self.loading = True
        await self._on_workers("update_weights", dict(handles))

    async def weight_arrivals(self) -> dict[str, list[str]]:
        """Return, for each device, a checksum of each flush since `begin_weights`, as its worker opened it."""
        return {device: list(checksums) for device, checksums in await self._on_workers("weight_arrivals")}

    async def finish_weights(self, version: int) -> None:
        """Make the weights ready, forget cached keys and values, and serve `version`."""
        await self._on_workers("update_weights", None)  # which forgets cached keys and values too
        self.version, self.loading = version, False

    async def release(self, tags: Sequence[str]) -> None:
        await self.llm.release(list(tags))

    async def resume(self, tags: Sequence[str]) -> None:
        await self.llm.resume(list(tags))

    async def reset_prefix_cache(self) -> None:
        await self._on_workers("reset_prefix_cache")

    async def close(self) -> None:
        await asyncio.to_thread(self.llm.shutdown)

    async def _on_workers(self, method: str, *args: Any) -> list[Any]:
        answers: list[Any] = await self.llm.collective_rpc(method, args=args)
        return answers


def _has_vision(model_path: str) -> bool:
    """Return whether a folder's model takes images; false for a name that is no folder here."""
    try:
        return ModelFolder(model_path).has_vision
    except ModelError:
        return False


def _chosen_logprobs(ids: Sequence[int], entries: Sequence[Any], start: int) -> list[float]:
    """Return the log-probability of each token; the engine gives a number, or a table that must hold the token."""
    chosen = []
    for number, token in enumerate(ids, start):
        entry = entries[number] if number < len(entries) else None
        if isinstance(entry, Mapping):
            entry = entry.get(token)
        value = getattr(entry, "logprob", entry)
        if value is None:
            raise BackendError(
                f"TensorRT-LLM gave no log-probability for token {token} (number {number}): it must run with "
                "sampler_type TRTLLMSampler"
            )
        chosen.append(float(value))
    return chosen

"""Requests to an engine: to complete a prompt, or to score tokens, and the capabilities that it must declare.

Shapes: P prompt tokens; T tokens of a continuation; H, W height and width of an image in pixels.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from offbeat_core._errors import ConfigError, DataError

Floats = npt.NDArray[np.float32]
PauseMode = Literal["abort", "wait", "keep"]


@dataclass(frozen=True, kw_only=True)
class LoraAdapter:
    """A low-rank change of some of a model's matrices: each W becomes W + scale B A, A [rank, in], B [out, rank].

    Its tensors travel in a `WeightStream` under the names of Hugging Face PEFT, such as
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight".

    Source: arXiv:2106.09685; https://github.com/huggingface/peft, peft/tuners/lora/layer.py.

    Args:
        name: what requests call it; not "".
        scale: alpha / rank, or what another recipe makes of the two.
    """

    name: str
    scale: float

    def __post_init__(self) -> None:
        if not self.name or not np.isfinite(self.scale):
            raise ConfigError(f"an adapter needs a name and a finite scale, got {self.name!r} and {self.scale}")


Ids = npt.NDArray[np.int32]
Image = npt.NDArray[np.uint8]
"""[H, W, 3] uint8: red, green, blue, the top row first. Pixels and not a file: decoders of one JPEG may differ."""


def check_images(images: Sequence[Image], whose: str) -> None:
    """Refuse images of another form than `Image`.

    Raises:
        DataError: with the first that is, and `whose` it is.
    """
    for index, image in enumerate(images):
        found = np.asarray(image)
        if found.dtype != np.uint8 or found.ndim != 3 or found.shape[2] != 3 or not found.size:
            raise DataError(f"{whose}: image {index} must be [H, W, 3] uint8, got {found.shape} {found.dtype}")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters for choosing tokens.

    The sampled distribution is softmax(logits / temperature), cut by top_k, then top_p, then min_p, and
    renormalised; log-probabilities reported are those of that distribution. Temperature 0 means greedy, and
    reports the log-probability at temperature 1.

    With `whole_logprobs` those of softmax(logits / temperature) before the cut are reported, as a trainer needs them,
    which scores the whole softmax: p_new / p_old is then 1 where the policies are equal, whatever was cut, which is
    what clipping, truncation and rejection take for granted. Against the cut distribution, p_old / m with the mass m
    that was kept, it would be m p_new / p_old: a sequence's weight falls to the product of all m although no policy has
    changed. (The ratio of the two cut policies has the factor m_old / m_new besides, and needs the kept set at the
    trainer: "keep sampling mask" of DeepSeek-V3.2, arXiv:2512.02556.) vLLM's `logprobs_mode` knows the distribution
    after the cut (`processed_logprobs`) and that of temperature 1 (`raw_logprobs`), but not this one.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    whole_logprobs: bool = False

    @property
    def is_cut(self) -> bool:
        """Return whether some tokens are left out."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def first_seed(self) -> int:
        """Seed of sample 0 (sample i has i more); a random one where none was given: engines' own start alike."""
        return int.from_bytes(os.urandom(6), "little") if self.seed is None else self.seed

    def check(self) -> None:
        """Refuse parameters that would sample something unintended.

        Raises:
            ConfigError: a parameter is out of bounds.
        """
        required = {
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "temperature": (self.temperature >= 0, "at least 0"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "top_k": (self.top_k >= 0, "at least 0 (0: no limit)"),
            "min_p": (0 <= self.min_p <= 1, "in [0, 1]"),
            "stop": (all(self.stop), "strings that are not empty"),
        }
        for name, (is_fine, what) in required.items():
            if not is_fine:
                raise ConfigError(f"sampling parameter {name} must be {what}, got {getattr(self, name)!r}")


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One prompt, to be completed `num_samples` times.

    `prompt_ids` are the tokens that the model sees, and so those to train on. An image stands in them as all its
    placeholder tokens: what a Hugging Face processor returns as `input_ids` (of Qwen-VL `<|vision_start|>`, one
    `<|image_pad|>` for each square of merged patches, `<|vision_end|>`). An engine never adds to them or takes away:
    it works out how many tokens each image takes, and refuses a prompt that holds another number.

    A further turn of a conversation is a request like any other: its prompt is the first prompt, the tokens that were
    sampled, what was read since, and the images of all turns.

    Args:
        request_id: unique among requests in flight.
        prompt_ids: [P] int32, P >= 1.
        num_samples: completions wanted; sample i draws with seed `params.seed + i` when a seed is given.
        images: each [H, W, 3] uint8, in the order of their placeholders.
        adapter: name of the LoRA adapter to sample with; "" is the model itself.
    """

    request_id: str
    prompt_ids: Ids
    num_samples: int = 1
    params: SamplingParams = field(default_factory=SamplingParams)
    images: tuple[Image, ...] = ()
    adapter: str = ""

    def check(self, vocab_size: int, max_model_len: int) -> None:
        """Refuse what no model of this size can serve.

        Raises:
            ConfigError: a sampling parameter is out of bounds.
            DataError: the prompt is empty, holds unknown ids, or leaves no room.
        """
        self.params.check()
        name, ids = f"request {self.request_id!r}", np.asarray(self.prompt_ids)
        if ids.ndim != 1 or not len(ids):
            raise DataError(f"{name}: a prompt needs at least one token, in one dimension")
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise DataError(
                f"{name}: prompt ids must be in [0, {vocab_size}), got {ids.min()} to {ids.max()}; "
                "was it made with another tokenizer?"
            )
        if len(ids) >= max_model_len:
            raise DataError(
                f"{name}: the prompt has {len(ids)} tokens and max_model_len is {max_model_len}; "
                "raise max_model_len or filter long prompts"
            )


@dataclass(frozen=True, kw_only=True)
class RolloutCapabilities:
    """Capabilities of an engine, declared by it and never guessed from its name.

    It may depend on the model, the device and the options, so an instance says it and not its class.

    Args:
        pause_modes: modes that `pause` knows.
        sleep_levels: levels that `sleep` knows; a level is declared where it gives memory back.
        shares_prompt_prefix: samples of a group compute their prompt once.
        partial_update: an update may bring some of the tensors.
        multimodal: requests may hold images.
        lora: updates may bring an adapter, and requests name one.
        whole_logprobs: it reports log-probabilities before a cut (`SamplingParams.whole_logprobs`).
        fp8_weights: it takes and holds matrices as FP8 blocks (`RolloutEngineSettings.weight_format`).
        scores: it is a `ScoringEngine`: it gives log-probabilities of tokens that others have sampled.
        scores_images: of prompts with images, too.
        scores_any_temperature: at other temperatures than 1, too.
        traces: it is a `TracingEngine`: it traces itself, because it computes elsewhere than in its caller's process.
        receives: it is a `ReceivingEngine`: its workers take weights from the trainer by themselves.
        routes: completions say which experts their tokens took (`RolloutEngineConfig.return_routes`).
    """

    pause_modes: tuple[PauseMode, ...]
    sleep_levels: tuple[int, ...] = ()
    shares_prompt_prefix: bool = False
    partial_update: bool = False
    multimodal: bool = False
    lora: bool = False
    whole_logprobs: bool = False
    fp8_weights: bool = False
    scores: bool = False
    scores_images: bool = False
    scores_any_temperature: bool = False
    traces: bool = False
    receives: bool = False
    routes: bool = False

    def check(self, request: GenerateRequest, engine: str) -> None:
        """Refuse a request that asks for more than this.

        Args:
            request: as it came.
            engine: what to call the engine in the error, such as "rollout-torch".

        Raises:
            ConfigError: an image or an adapter, and the engine takes none; log-probabilities it does not give.
            DataError: an image that is not one.
        """
        name = f"request {request.request_id!r}"
        if request.adapter:
            self._check_lora(f"{name} wants the adapter {request.adapter!r}", engine)
        if request.images and not self.multimodal:
            raise ConfigError(
                f"{name} holds {len(request.images)} image{'s' * (len(request.images) > 1)}, and this {engine} is not "
                "multimodal: use an engine, and a model, that declare it"
            )
        if request.params.whole_logprobs and request.params.is_cut and not self.whole_logprobs:
            raise ConfigError(
                f"{name} cuts by top_p, top_k or min_p and wants log-probabilities before the cut, which this {engine} "
                "does not give: leave the cuts out, or use an engine that declares whole_logprobs"
            )
        check_images(request.images, name)

    def check_pause(self, mode: PauseMode) -> None:
        """Refuse a pause that is not declared.

        Raises:
            ConfigError: it is not.
        """
        if mode not in self.pause_modes:
            raise ConfigError(f"pause mode must be one of {', '.join(self.pause_modes)}, got {mode!r}")

    def check_sleep(self, level: int) -> None:
        """Refuse a level of sleep that is not declared.

        Raises:
            ConfigError: it is not.
        """
        if level not in self.sleep_levels:
            raise ConfigError(f"sleep level must be one of {self.sleep_levels}, got {level!r}")

    def check_adapter(self, adapter: LoraAdapter | None, engine: str) -> None:
        """Refuse an update that brings an adapter, where there can be none.

        Raises:
            ConfigError: there can be none.
        """
        if adapter is not None:
            self._check_lora(f"an update brings the adapter {adapter.name!r}", engine)

    def _check_lora(self, what: str, engine: str) -> None:
        if not self.lora:
            raise ConfigError(
                f"{what}, and this {engine} does not do lora: use an engine, or options, that declare it, or send "
                "merged weights"
            )


@dataclass(frozen=True, kw_only=True)
class ScoreRequest:
    """Continuations of one prompt, each to be scored token by token under the engine's own model.

    Args:
        request_id: unique among requests in flight.
        prompt_ids: [P] int32, P >= 1.
        continuations: each [T] int32; T may be 0.
        temperature: of the distribution, softmax(logits / temperature), > 0; nothing is cut from it.
        images: of the prompt, each [H, W, 3] uint8, in the order of their placeholders; see `GenerateRequest`.
    """

    request_id: str
    prompt_ids: Ids
    continuations: tuple[Ids, ...]
    temperature: float = 1.0
    images: tuple[Image, ...] = ()

    @property
    def longest(self) -> int:
        """Tokens of the prompt and the longest continuation."""
        return len(self.prompt_ids) + max((len(ids) for ids in self.continuations), default=0)

    def check(self, vocab_size: int, max_model_len: int) -> None:
        """Refuse what no model of this size can score.

        Raises:
            DataError: no prompt, unknown ids, a sequence that is too long, or a temperature that is none.
        """
        name = f"score request {self.request_id!r}"
        if not self.temperature > 0:
            raise DataError(f"{name}: temperature must be above 0, got {self.temperature}")
        check_images(self.images, name)
        if any(ids.ndim != 1 for ids in (self.prompt_ids, *self.continuations)) or not len(self.prompt_ids):
            raise DataError(f"{name}: needs a prompt of at least one token, and continuations, in one dimension each")
        low = min(int(ids.min()) for ids in (self.prompt_ids, *self.continuations) if len(ids))
        high = max(int(ids.max()) for ids in (self.prompt_ids, *self.continuations) if len(ids))
        if low < 0 or high >= vocab_size:
            raise DataError(
                f"{name}: ids must be in [0, {vocab_size}), got {low} to {high}; teacher and student need one tokenizer"
            )
        if self.longest > max_model_len:
            raise DataError(
                f"{name}: prompt and continuation have {self.longest} tokens and max_model_len is {max_model_len}; "
                "raise it"
            )

    def check_images(self, capabilities: RolloutCapabilities, engine: str) -> None:
        """Refuse images where the engine scores none.

        Raises:
            ConfigError: it scores none.
        """
        if self.images and not capabilities.scores_images:
            raise ConfigError(
                f"score request {self.request_id!r} holds images, and this {engine} scores text alone: take a "
                "vision-language model, with a backend that scores images, such as torch"
            )

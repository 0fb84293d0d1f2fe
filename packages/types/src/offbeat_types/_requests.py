"""What an engine is asked to complete: token ids, images, and how to choose tokens.

Shapes: P prompt tokens; H, W height and width of an image in pixels.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from offbeat_types._errors import ConfigError, DataError

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
    """How to choose tokens.

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
        """Whether some tokens are left out."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def first_seed(self) -> int:
        """Seed of sample 0 (sample i has i more); a random one where none was given: engines' own start alike."""
        return int.from_bytes(os.urandom(6), "little") if self.seed is None else self.seed

    def check(self) -> None:
        """Refuse what would sample something nobody meant.

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

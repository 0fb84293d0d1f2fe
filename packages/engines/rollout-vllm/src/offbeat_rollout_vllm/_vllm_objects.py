"""vLLM's words for requests, prompts with images, and samples. Imports vLLM when called, not before.

vLLM would replace one placeholder token by as many as an image takes. Here the prompt holds them all, because the
trainer sees the same, so their places are found instead, and every one must be accounted for.

Source: vllm 0.32.0, vllm/multimodal/processing/processor.py (BaseMultiModalProcessor.apply, find_mm_placeholders) and
vllm/renderers/base.py (_process_multimodal).
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from offbeat_core import ConfigError, DataError, GenerateRequest, Image, OffbeatError, SamplingParams
from offbeat_rollout_vllm._options import check_arguments

MIN_TEMPERATURE: Final = 0.01
"""vllm 0.32.0, vllm/sampling_params.py, _MAX_TEMP."""
BITS_64: Final = (1 << 64) - 1
AdapterUse = tuple[str, int]
"""Name and vLLM's number of an adapter."""


@dataclass(frozen=True, kw_only=True)
class Delta:
    """Addition of one step to a sample.

    Args:
        ids: new tokens.
        logprobs: of each.
        label: vLLM's, of what sampled them; None while it is not known.
        spans: with the last step, where `label` is None: (label, number of tokens) of the whole sample.
        finish_reason: vLLM's, when the sample has ended: "stop", "length", "abort".
        stop_string: the string that ended it, or "".
        prompt_logprobs: where they were asked for, of the prompt's tokens from the second on; else empty.
        routes_TLK: with the last step, experts of prompt and completion but for the last token; None where vLLM was not
            asked for them. It has a row for each decoder layer, of zeros where a layer has no experts.
    """

    ids: Sequence[int]
    logprobs: Sequence[float]
    label: int | None = None
    spans: tuple[tuple[int, int], ...] = ()
    finish_reason: str | None = None
    stop_string: str = ""
    prompt_logprobs: Sequence[float] = ()
    routes_TLK: npt.NDArray[np.integer[Any]] | None = None


def check_request(
    request: GenerateRequest, vocab_size: int, max_model_len: int, image_token_id: int | None = None
) -> None:
    request.check(vocab_size, max_model_len)
    _check_meaning(request.params)
    places = 0 if image_token_id is None else np.count_nonzero(np.asarray(request.prompt_ids) == image_token_id)
    if places and not request.images:
        raise DataError(
            f"request {request.request_id!r}: the prompt holds {places} placeholder tokens of images (id "
            f"{image_token_id}) and the request no image; put the images into it, or leave the tokens out"
        )


def _check_meaning(params: SamplingParams) -> None:
    if 0 < params.temperature < MIN_TEMPERATURE:
        raise ConfigError(
            f"sampling parameter temperature must be 0, or at least {MIN_TEMPERATURE}: vLLM raises what lies between "
            f"to that without a word, got {params.temperature!r}"
        )
    if params.min_p > 0 and params.top_p < 1 and params.temperature > 0:
        raise ConfigError(
            f"min_p = {params.min_p} and top_p = {params.top_p} together mean something else in vLLM, which cuts by "
            "min_p first; use one of them"
        )


def vllm_params(params: SamplingParams, seed: int, eos_ids: frozenset[int], room: int) -> dict[str, Any]:
    """Arguments for vLLM's SamplingParams, for one sample of a group.

    End-of-sequence ids are given as stop tokens, so that they are those of the model folder in every release of vLLM,
    and the last token shows why a sample ended.
    """
    stops = set(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_ids)
    found: dict[str, Any] = {
        "n": 1,
        "max_tokens": min(params.max_tokens, room),
        "temperature": params.temperature,
        "logprobs": 0,  # of the sampled token alone
        "ignore_eos": True,
        "stop_token_ids": sorted(stops),
        "detokenize": bool(params.stop),
        "seed": mix_seed(seed),
    }
    if params.temperature > 0:
        found |= {"top_p": params.top_p, "top_k": params.top_k, "min_p": params.min_p}
    if params.stop:
        # Special tokens count as text here, so that "<|im_end|>" can stop a sample.
        found |= {"stop": list(params.stop), "include_stop_str_in_output": True, "skip_special_tokens": False}
    return found


def mix_seed(seed: int) -> int:
    """Return a number in [0, 2^63) that differs in its low bits wherever `seed` differs.

    vLLM takes -1 for no seed, and torch's generator on a CPU starts from the low 32 bits only, so that seeds which
    differ by 2^32 would sample alike.

    Source: splitmix64, Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195; constants of variant 13.
    """
    mixed = (seed * 0x9E3779B97F4A7C15) & BITS_64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & BITS_64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & BITS_64
    return (mixed ^ (mixed >> 31)) >> 1


def make_arguments(name: str, arguments: Mapping[str, Any]) -> Any:
    kind: Any = getattr(import_module("vllm.engine.arg_utils"), name)
    check_arguments(arguments, [each.name for each in fields(kind)])
    return kind(**arguments)


def engine_prompt(prompt: Any) -> Any:
    """Return a prompt that needs no further preparation: of a list of ids, or one that was prepared already."""
    return import_module("vllm.inputs").tokens_input(prompt) if isinstance(prompt, list) else prompt


def adapter_request(adapter: AdapterUse | None) -> Any:
    """Make vLLM's LoRARequest for an adapter that its workers have; it names a folder because it must."""
    if adapter is None:
        return None
    name, number = adapter
    return import_module("vllm.lora.request").LoRARequest(lora_name=name, lora_int_id=number, lora_path=name)


def sampling_params(params: dict[str, Any]) -> Any:
    """Make vLLM's SamplingParams: each output holds only what is new, in the cheap format."""
    module: Any = import_module("vllm.sampling_params")
    return module.SamplingParams(**params, output_kind=module.RequestOutputKind.DELTA, flat_logprobs=True)


def read_output(output: Any, label: int | None) -> Delta:
    (completion,) = output.outputs
    ids = list(completion.token_ids)
    stopped_by = completion.stop_reason
    spans = completion.weight_versions if label is None else ()
    return Delta(
        ids=ids,
        # Of the sampled tokens: the only ones asked for, but vLLM may give the likeliest as well.
        logprobs=[float(completion.logprobs[place][token].logprob) for place, token in enumerate(ids)],
        label=label,
        spans=tuple((int(span.version), span.end - span.start) for span in spans or ()),
        finish_reason=completion.finish_reason,
        stop_string=stopped_by if isinstance(stopped_by, str) else "",
        prompt_logprobs=prompt_logprobs(output.prompt_logprobs, output.prompt_token_ids),
        routes_TLK=completion.routed_experts,
    )


def prompt_logprobs(logprobs: Any, ids: Sequence[int]) -> list[float]:
    """Return those of the prompt's tokens from the second on; vLLM has none of the first, and may add likelier ones."""
    return [float(logprobs[place][token].logprob) for place, token in enumerate(ids) if place] if logprobs else []


def prepare_images(renderer: Any, ids: list[int], images: Sequence[Image]) -> "Future[Any]":
    try:
        work: Future[Any] = renderer._mm_executor.submit(image_prompt, renderer.get_mm_processor(), ids, images)
    except RuntimeError as error:
        raise OffbeatError("the rollout engine is closed; make a new one") from error
    return work


def image_prompt(processor: Any, ids: list[int], images: Sequence[Image]) -> Any:
    """Return vLLM's form of a prompt with images; it can be added several times.

    Without vLLM's cache of prepared images: a request leaves out what is in it, which may be gone when it arrives.
    """
    processing: Any = import_module("vllm.multimodal.processing")
    try:
        items = processor.info.parse_mm_data({"image": list(images)})
        inputs = processing.ProcessorInputs(ids, items)
        found = processor._apply_hf_processor(inputs, processing.TimingContext(enabled=False))
    except Exception as error:
        sizes = ", ".join(f"{image.shape[1]} x {image.shape[0]}" for image in images)
        raise DataError(f"vLLM cannot prepare images of {sizes} pixels: {error}") from error
    wanted = [_embedded(updates[0].content) for updates in found.prompt_updates["image"]]
    placeholders = processor._find_mm_placeholders(ids, found.prompt_updates).get("image", [])
    kinds = set().union(*wanted)
    there = [token for token in ids if token in kinds]
    if len(placeholders) != len(images) or there != [token for tokens in wanted for token in tokens]:
        raise _miscounted(wanted, there)
    ranges = {"image": [placeholder.to_range() for placeholder in placeholders]}
    return import_module("vllm.inputs").mm_input(ids, found.kwargs, found.hashes, ranges)


def _embedded(content: Any) -> list[int]:
    """Return, of the tokens that stand for an image, those whose place its features take: not separators."""
    tokens = list(content.full)
    if content.is_embed is None:
        return tokens
    return [token for token, is_embedded in zip(tokens, content.is_embed(tokens).tolist(), strict=True) if is_embedded]


def _miscounted(wanted: Sequence[Sequence[int]], there: Sequence[int]) -> DataError:
    sizes = " and ".join(str(len(tokens)) for tokens in wanted)
    kinds = ", ".join(map(str, sorted({token for tokens in wanted for token in tokens})))
    return DataError(
        f"the prompt's images take {sizes} placeholder tokens (id {kinds}), and it holds {len(there)}, or not in their "
        "places: it must hold all of them, as the model's own processor gives them in input_ids"
    )

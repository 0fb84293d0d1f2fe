"""Images in a prompt whose tokens are whole already. Imports vLLM when called, not before.

vLLM would replace one placeholder token by as many as an image takes. Here the prompt holds them all, because the
trainer sees the same, so they are looked up instead, and every one must be accounted for.

Source: vllm 0.32.0, vllm/multimodal/processing/processor.py (BaseMultiModalProcessor.apply, find_mm_placeholders) and
vllm/renderers/base.py (_process_multimodal).
"""

from collections.abc import Sequence
from concurrent.futures import Future
from importlib import import_module
from typing import Any

from offbeat_types import DataError, Image, OffbeatError


def prepare_images(renderer: Any, ids: list[int], images: Sequence[Image]) -> "Future[Any]":
    """Prepare a prompt with images, in the thread that vLLM has for it.

    Args:
        renderer: vLLM's.
        ids: of the whole prompt.
        images: in the order of their placeholders.

    Raises:
        DataError: in the future; see `image_prompt`.
        OffbeatError: vLLM has ended.
    """
    try:
        work: Future[Any] = renderer._mm_executor.submit(image_prompt, renderer.get_mm_processor(), ids, images)
    except RuntimeError as error:
        raise OffbeatError("the rollout engine is closed; make a new one") from error
    return work


def image_prompt(processor: Any, ids: list[int], images: Sequence[Image]) -> Any:
    """Return vLLM's form of a prompt with images; it can be added several times.

    Without vLLM's cache of prepared images: a request leaves out what is in it, which may be gone when it arrives.

    Raises:
        DataError: vLLM cannot take these images, or they stand in the prompt as another number of tokens.
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
    """Of the tokens that stand for an image those that its features take the place of: not separators."""
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

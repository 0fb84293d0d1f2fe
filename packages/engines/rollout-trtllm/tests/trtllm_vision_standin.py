"""How the stand-in for TensorRT-LLM reads a prompt with images: as a text, which it encodes anew.

Names and ways are those of TensorRT-LLM 1.2: BaseLLM.generate_async in tensorrt_llm/llmapi/llm.py (stored 323158958)
and Qwen2VLInputProcessorBase in tensorrt_llm/_torch/models/modeling_qwen2vl.py (stored 2926488359).
"""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch


class InputProcessor:
    """The model's processor.

    Args:
        folder: of the model.
        tokenizer: the engine's.
    """

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        transformers: Any = import_module("transformers")
        self.config = transformers.AutoConfig.from_pretrained(folder)
        self.tokenizer = tokenizer
        self.image_processor = transformers.AutoImageProcessor.from_pretrained(folder)
        self.tllm_multimodal_token_id = self.config.text_config.vocab_size + 1

    def __call__(self, prompt: str, images: list[Any]) -> tuple[list[int], dict[str, Any]]:
        """Token ids, in which a number beyond the vocabulary stands for each place of an image; and pixels."""
        prepared = dict(self.image_processor(images=images, return_tensors="pt"))
        token, merged = self.tokenizer.decode([self.config.image_token_id]), self.image_processor.merge_size**2
        parts = prompt.split(token)
        counts = [int(grid.prod()) // merged for grid in prepared["image_grid_thw"]]
        if len(parts) != len(counts) + 1:
            raise IndexError(f"{len(parts) - 1} placeholders for {len(counts)} images")
        text = parts[0] + "".join(token * count + part for count, part in zip(counts, parts[1:], strict=True))
        ids = self.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]
        ids[ids == self.config.image_token_id] = self.tllm_multimodal_token_id
        return ids.tolist(), prepared

    def model_inputs(self, ids: torch.Tensor, prepared: dict[str, Any] | None) -> dict[str, Any]:
        """What transformers' model takes: [1, T] ids with placeholders again, and which they are."""
        if prepared is None:
            return {"input_ids": ids}
        is_place = ids == self.tllm_multimodal_token_id
        return {
            "input_ids": ids.masked_fill(is_place, self.config.image_token_id),
            "mm_token_type_ids": is_place.int(),
            **prepared,
        }


def read_prompt(llm: Any, inputs: Any) -> tuple[list[int], dict[str, Any] | None]:
    """Token ids that the model gets, and pixels; None for a prompt without images."""
    if isinstance(inputs, list):
        return inputs, None
    images = inputs.get("multi_modal_data", {}).get("image")
    if not images or llm.input_processor is None:  # a model of language alone drops them without a word
        return inputs["prompt_token_ids"], None
    return llm.input_processor(llm.tokenizer.decode(inputs["prompt_token_ids"]), images)

"""Prompts with images for a tiny vision-language model, and what transformers says of what was sampled after them."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from offbeat_core import Completion, GenerateRequest, SamplingParams

SIZES = ((40, 56), (32, 72), (24, 24))


class Sight:
    """What trains the model: transformers, with the folder's processor.

    Args:
        folder: of the model.
    """

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.image_processor = AutoImageProcessor.from_pretrained(folder)
        self.image_id = int(self.model.config.image_token_id)
        draw = np.random.default_rng(3)
        self.images = tuple(draw.integers(0, 256, (*size, 3), np.uint8) for size in SIZES)

    def request(self, num_images: int, request_id: str = "r", **params: object) -> GenerateRequest:
        """A prompt with all placeholders, as the trainer sees it."""
        images = self.images[:num_images]
        token, merged = self.tokenizer.decode([self.image_id]), self.image_processor.merge_size**2
        places = [self.image_processor.get_number_of_image_patches(*image.shape[:2]) // merged for image in images]
        shown = "".join(f"<|vision_start|>{token * count}<|vision_end|> and " for count in places)
        ids = self.tokenizer(f"look {shown}say:", add_special_tokens=False).input_ids
        settings = {"max_tokens": 6, "ignore_eos": True, "seed": 1, **params}
        num_samples = int(settings.pop("num_samples", 1))
        return GenerateRequest(
            request_id=request_id,
            prompt_ids=np.asarray(ids, np.int32),
            num_samples=num_samples,
            params=SamplingParams(**settings),
            images=images,
        )

    def error(self, request: GenerateRequest, completion: Completion, images: tuple[np.ndarray, ...] = ()) -> float:
        """Largest distance of a completion's log-probabilities from those of transformers, in nats."""
        ids = torch.from_numpy(np.concatenate([request.prompt_ids, completion.ids]).astype(np.int64))[None]
        given = {}
        if request.images:
            prepared = self.image_processor(
                images=list(images or request.images), input_data_format="channels_last", return_tensors="pt"
            )
            given = {**prepared, "mm_token_type_ids": (ids == self.image_id).int()}
        with torch.no_grad():
            logits = self.model(input_ids=ids, use_cache=False, **given).logits[0, :-1]
        chosen = torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0]
        return float(np.abs(chosen[len(request.prompt_ids) - 1 :].numpy() - completion.logprobs).max())

"""Images of a model: see `offbeat_training.ImageProcessor`."""

from functools import cache
from typing import Any, Final

import torch

from offbeat_training import ImageProcessor

_INSTALL: Final = 'pip install "offbeat-engine-megatron[vision]"'


def image_processor(hf_config: Any, model_path: str) -> ImageProcessor:
    """Of a vision-language model of the Qwen-VL families.

    Args:
        hf_config: of the model.
        model_path: its folder, with the configuration of its image processor.
    """

    @cache
    def outline() -> Any:
        """The model of transformers without memory: it computes positions from its configuration."""
        from transformers import AutoModel

        with torch.device("meta"):
            return AutoModel.from_config(hf_config)

    def rope_index(*args: Any, **kwargs: Any) -> Any:
        return outline().get_rope_index(*args, **kwargs)

    return ImageProcessor(hf_config, model_path, rope_index, _INSTALL)

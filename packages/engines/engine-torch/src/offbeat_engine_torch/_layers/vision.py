"""Families of vision-language models that the engine trains, a small class each.

A family says which of a model's modules turn pixels into embeddings, what they are given, what the language model is
given with images in it, and whether the tokens of one image see each other.

Shapes: T packed tokens here, M placeholder tokens of images in the pack, m of them here, E hidden size.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch
from torch import Tensor, nn

from offbeat_core import ModelError
from offbeat_engine_torch._layers.plan import to_device
from offbeat_training import Gemma3Images, Gemma4Images, ImageProcessor, Indices, VisionInputs

_INSTALL: Final = 'pip install "offbeat-engine-torch[vision]"'


@dataclass(frozen=True, kw_only=True)
class ImagePatches:
    """Inputs of the vision tower for one micro-batch.

    Args:
        pixels: arguments of transformers' `get_image_features`: see `VisionInputs.pixels`.
        place_M: packed index of each placeholder token; none where the pixels are of no image.
        run: first packed token that is here, and the one after the last; None for all.
    """

    pixels: tuple[Tensor, ...]
    place_M: Indices
    run: tuple[int, int] | None = None

    def here(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return, [m] each, which of the placeholder tokens are here, and their index among the tokens here."""
        first, stop = self.run or (0, int(self.place_M.max(initial=0)) + 1)
        which_m = np.flatnonzero((first <= self.place_M) & (self.place_M < stop))
        return to_device(which_m, device), to_device(self.place_M[which_m] - first, device)


class VisionFamily:
    """A vision-language model of transformers: what its family adds to a language model.

    Args:
        whole: the model; its backbone has a `language_model`.

    Attributes:
        tower_names: modules of the backbone that turn pixels into embeddings.
        unused_names: modules of the backbone that nothing here calls: they stay as they are.
        sees_both_ways: tokens of one image see each other, also those that come later.
        in_windows_alone: they do so in layers with a sliding window, and in no others.
    """

    tower_names: ClassVar[tuple[str, ...]] = ()
    unused_names: ClassVar[tuple[str, ...]] = ()
    sees_both_ways: bool = False
    in_windows_alone: bool = False

    def __init__(self, whole: Any) -> None:
        self._whole = whole
        self._backbone: Any = getattr(whole, whole.base_model_prefix)

    @property
    def tower(self) -> list[nn.Module]:
        """Modules that turn pixels into embeddings."""
        return _named(self._backbone, self.tower_names)

    @property
    def unused(self) -> list[nn.Module]:
        """Modules that nothing here calls."""
        return _named(self._backbone, self.unused_names)

    def inputs(self, model_path: str) -> VisionInputs:
        """Return what is known of the images of a model folder."""
        raise NotImplementedError

    def logits(self, ids_T: Tensor) -> Tensor:
        """Return the model's own logits [T, V] of one text."""
        logits_TV: Tensor = self._whole(input_ids=ids_T[None], use_cache=False).logits[0]
        return logits_TV

    def embed(self, ids_T: Tensor, patches: ImagePatches) -> dict[str, Any]:
        """Return what the language model is given: embeddings, with what the tower sees where images are.

        Pixels without a place in the text are not used, but they are part of the graph: the backward pass goes through
        the tower, with gradients of zero.
        """
        which_m, place_m = patches.here(ids_T.device)
        seen = self._backbone.get_image_features(*patches.pixels)
        embeds_TE = self._whole.get_input_embeddings()(ids_T)
        seen_mE = torch.cat(list(seen.pooler_output)).index_select(0, which_m).to(embeds_TE.dtype)
        given = {"inputs_embeds": embeds_TE.index_copy(0, place_m, seen_mE)[None]}
        return given | self._more(ids_T, which_m, place_m, seen)

    def _more(self, ids_T: Tensor, which_m: Tensor, place_m: Tensor, seen: Any) -> dict[str, Any]:
        """Return what the language model is given besides embeddings."""
        return {}


class QwenVision(VisionFamily):
    """Models of Qwen-VL and of Qwen3.5: positions with three axes, and features for deeper layers."""

    tower_names = ("visual",)

    def inputs(self, model_path: str) -> VisionInputs:
        """Return the image processor, with the model's own function of positions."""
        return ImageProcessor(self._backbone.config, model_path, self._backbone.get_rope_index, _INSTALL)

    def _more(self, ids_T: Tensor, which_m: Tensor, place_m: Tensor, seen: Any) -> dict[str, Any]:
        deeper = getattr(seen, "deepstack_features", None)
        if not deeper:
            return {}
        mask_T = torch.zeros_like(ids_T, dtype=torch.bool).index_fill(0, place_m, value=True)
        return {
            "visual_pos_masks": mask_T[None],
            "deepstack_visual_embeds": [torch.cat(list(layer)).index_select(0, which_m) for layer in deeper],
        }


class Gemma3Vision(VisionFamily):
    """Models of Gemma 3: SigLIP, pooled to so many tokens an image, which see each other in every layer."""

    tower_names = ("vision_tower", "multi_modal_projector")
    sees_both_ways = True

    def inputs(self, model_path: str) -> VisionInputs:
        """Return the image processor."""
        return Gemma3Images(self._backbone.config, model_path, _INSTALL)


class Gemma4Vision(VisionFamily):
    """Models of Gemma 4: images of as many tokens as their size asks for; embeddings for each layer beside the text's.

    The larger models let the tokens of an image see each other, in layers with a window alone.
    """

    tower_names = ("vision_tower", "embed_vision")
    unused_names = ("audio_tower", "embed_audio")
    in_windows_alone = True

    def __init__(self, whole: Any) -> None:
        super().__init__(whole)
        self._text_config = whole.config.get_text_config()
        self.sees_both_ways = self._text_config.use_bidirectional_attention == "vision"

    def inputs(self, model_path: str) -> VisionInputs:
        """Return the image processor."""
        return Gemma4Images(self._backbone.config, model_path, _INSTALL)

    def logits(self, ids_T: Tensor) -> Tensor:
        """Ask the language model: the whole reads a row of its embedding, which ranks have cut."""
        seen = self._backbone.language_model(input_ids=ids_T[None], use_cache=False).last_hidden_state[0]
        logits_TV: Tensor = self._whole.get_output_embeddings()(seen)
        cap = self._text_config.final_logit_softcapping
        return logits_TV if cap is None else cap * (logits_TV / cap).tanh()

    def _more(self, ids_T: Tensor, which_m: Tensor, place_m: Tensor, seen: Any) -> dict[str, Any]:
        # Where an image is, layers get what belongs to padding.
        ids_1T = ids_T.index_fill(0, place_m, self._text_config.pad_token_id)[None]
        if not self._text_config.hidden_size_per_layer_input:
            return {}
        return {"per_layer_inputs": self._backbone.language_model.get_per_layer_inputs(ids_1T, None)}


_FAMILIES: Final[dict[str, type[VisionFamily]]] = {"gemma3": Gemma3Vision, "gemma4": Gemma4Vision}


def find_vision(whole: Any, folder: Path) -> VisionFamily | None:
    """Return what a model's family adds to a language model; None for a model of text alone.

    Raises:
        ModelError: it takes images, and is of a family that the engine does not train.
    """
    if getattr(whole.config, "vision_config", None) is None:
        return None
    backbone = getattr(whole, whole.base_model_prefix)
    if family := _FAMILIES.get(whole.config.model_type):
        return family(whole)
    if all(hasattr(backbone, name) for name in ("visual", "language_model", "get_rope_index")):
        return QwenVision(whole)
    raise ModelError(
        f"{folder}: of models with images the engine trains those of Qwen-VL, Qwen3.5, Gemma 3 and Gemma 4, not "
        f"{type(whole).__name__}"
    )


def _named(backbone: nn.Module, names: tuple[str, ...]) -> list[nn.Module]:
    found = (getattr(backbone, name, None) for name in names)
    return [each for each in found if isinstance(each, nn.Module)]

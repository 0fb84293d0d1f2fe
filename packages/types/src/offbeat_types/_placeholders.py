"""Where images stand among the tokens of a sequence: as runs of one placeholder id, a run for each image."""

from collections.abc import Callable, Sequence

import numpy as np

from offbeat_types._errors import DataError
from offbeat_types._requests import Image
from offbeat_types._training import TrainSequence


def find_placeholders(sequence: TrainSequence, image_id: int) -> list[tuple[int, int]]:
    """(start, stop) of each run of placeholders. Those in the loss were sampled: they are tokens like others.

    Args:
        sequence: to look at.
        image_id: of the placeholder token.
    """
    marked = np.zeros(len(sequence.ids) + 2, bool)
    marked[1:-1] = (sequence.ids == image_id) & ~sequence.loss_mask
    edges = np.flatnonzero(marked[1:] != marked[:-1]).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def check_placeholders(
    sequences: Sequence[TrainSequence], image_id: int, num_tokens_of: Callable[[Image], int]
) -> None:
    """Refuse placeholders that are not those of the images.

    Args:
        sequences: of an update.
        image_id: of the placeholder token.
        num_tokens_of: how many of them an image takes.

    Raises:
        DataError: other runs of placeholder tokens than the images take.
    """
    for index, sequence in enumerate(sequences):
        wanted = [num_tokens_of(image) for image in sequence.images]
        found = [stop - start for start, stop in find_placeholders(sequence, image_id)]
        if wanted != found:
            raise DataError(
                f"sequence {index}: its images take {wanted} placeholder tokens (id {image_id}) one after the other, "
                f"and it holds runs of {found}; give the ids and images that the model was sampled with"
            )

"""4 GiB of weights between two processes through device memory, proved, with nothing else on the device.

On a CPU a few KiB go through shared host memory. It passes with 20 GB/s, in the fastest of four syncs.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.cuda_ipc import make_weights, sync
from gpu.piece import Figures, Place, main, reach

NUM_TENSORS, ROWS = 40, 35544
"""Rows of 2 KiB; the last tensor has 20 times as many."""
GOALS = {"gb_per_s_with_proof": 20.0}


def run(place: Place) -> Figures:
    """Send the weights, and count the bytes of the fastest sync."""
    slots = place.name if place.is_accelerator else None
    num_tensors, rows = place.pick(4, NUM_TENSORS), place.pick(8, ROWS)
    weights = make_weights(num_tensors, rows, 1, place.name)
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    fastest_s = sync(place, slots, weights, rows)
    figures = {"gib": num_bytes / 2**30, "sync_s": fastest_s, "gb_per_s_with_proof": num_bytes / fastest_s / 1e9}
    place.note(figures)
    return reach(place, figures, GOALS)


if __name__ == "__main__":
    main(run)

"""Parts of decoder layers that the engine computes itself or wraps: packed attention, recurrence, norms, recompute."""

"""Which tensors are handed over together. Pure; equal wherever it is computed."""

from offbeat_weightsync import BucketPlan


def plan_flushes(plan: BucketPlan, *, in_parts: bool) -> tuple[tuple[int, ...], ...]:
    """Group the plan's tensors.

    A handle is of a whole tensor, so a tensor goes with the bucket in which it begins; one larger than a bucket makes
    a flush larger than a bucket.

    Args:
        plan: names, shapes, dtypes and bucket size.
        in_parts: whether the engine can load some of the tensors at a time.

    Returns:
        For each flush the indices of its tensors in `plan.specs`; every tensor once, in order.
    """
    if not in_parts:
        return (tuple(range(len(plan.specs))),)
    begun = (tuple(piece.tensor for piece in bucket.pieces if not piece.tensor_offset) for bucket in plan.buckets)
    return tuple(flush for flush in begun if flush)

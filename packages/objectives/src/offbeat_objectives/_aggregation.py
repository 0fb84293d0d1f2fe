"""From a loss per token to one number for the update."""

from torch import Tensor

from offbeat_objectives._packing import segment_sum


def aggregate(
    losses_N: Tensor,
    sequence_N: Tensor,
    num_sequences: int,
    *,
    how: str,
    total_tokens: int,
    total_sequences: int,
    fixed_length: int | None = None,
) -> Tensor:
    """One micro-batch's share of the update's loss; the shares of all micro-batches and ranks add up to it.

    token_mean: Σ over all tokens / total_tokens (DAPO, 2503.14476, section 3.3).
    sequence_mean: mean over sequences of the mean over their tokens (GRPO, 2402.03300, equation 3).
    fixed_length: mean over sequences of their sum / fixed_length (Dr. GRPO, 2503.20783, section 3).
    A sequence lies in one micro-batch as a whole. Rejected tokens come as 0 and count in every divisor, so that a
    rejection takes weight away and never moves it to other tokens.

    Args:
        losses_N: [N], 0 for rejected tokens.
        sequence_N: [N] int64, sorted.
        num_sequences: S.
        how: token_mean, sequence_mean or fixed_length.
        total_tokens: loss tokens of the whole update.
        total_sequences: sequences with a loss token in the whole update.
        fixed_length: tokens, for fixed_length.

    Returns:
        A scalar; 0 when there is no token.
    """
    if how == "token_mean":
        return losses_N.sum() / max(total_tokens, 1)
    if how == "sequence_mean":
        length_S = segment_sum(losses_N.new_ones(len(losses_N)), sequence_N, num_sequences)
        return (losses_N / length_S[sequence_N]).sum() / max(total_sequences, 1)
    assert how == "fixed_length"
    assert fixed_length is not None, "check_algorithm asks for it"
    return losses_N.sum() / (max(total_sequences, 1) * fixed_length)

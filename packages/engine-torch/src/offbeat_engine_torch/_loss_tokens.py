"""What the loss function reads of one micro-batch, made by asking the policy."""

from collections.abc import Sequence

from torch import Tensor

from offbeat_engine_torch._packing import Pack
from offbeat_engine_torch._policy import Policy
from offbeat_types import LossTokens, TrainSequence, loss_extras


def ask_loss_tokens(
    policy: Policy,
    sequences: Sequence[TrainSequence],
    pack: Pack,
    totals: tuple[int, int],
    *,
    through_tower: bool = False,
) -> LossTokens[Tensor]:
    """Run the policy over a pack.

    Args:
        policy: carries the gradient.
        sequences: of the whole update.
        pack: some of them.
        totals: loss tokens and sequences of the whole update.
        through_tower: as `Policy.ask`.
    """
    logprobs, entropy = policy.ask(pack, through_tower=through_tower)
    extras = loss_extras([sequences[member] for member in pack.members])
    return LossTokens(
        logprobs_N=logprobs,
        entropy_N=entropy,
        sequence_N=policy.tensor(pack.sequence_N),
        num_sequences=len(pack.members),
        extras={name: policy.tensor(values) for name, values in extras.items()},
        total_tokens=totals[0],
        total_sequences=totals[1],
    )

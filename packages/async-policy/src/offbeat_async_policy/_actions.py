"""What the policy asks for. Whoever drives it starts each action once, and reports when it is done."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Submit:
    """Generate and score the group; answer with `group_finished`, `group_filtered` or `group_lost`.

    Args:
        group_id: in [0, num_groups), in data order.
    """

    group_id: int


@dataclass(frozen=True)
class Update:
    """Train on these groups; answer with `update_finished`.

    Args:
        group_ids: oldest tokens first, then data order.
        version: policy version the trainer holds now; it holds version + 1 afterwards.
        lags: updates between each group's oldest token and this update, in the order of `group_ids`.
    """

    group_ids: tuple[int, ...]
    version: int
    lags: tuple[int, ...]


@dataclass(frozen=True)
class Sync:
    """Bring the trainer's weights to every engine; answer with `sync_finished`.

    Args:
        version: policy version to publish.
        interrupt: groups are in flight; hold them while the weights change and go on with the tokens they have.
    """

    version: int
    interrupt: bool


@dataclass(frozen=True)
class Drop:
    """Forget this group: it grew older than `max_version_lag`. Needs no answer; if in flight, abort it.

    Args:
        group_id: finished or in flight; nothing may be reported about it any more.
    """

    group_id: int


@dataclass(frozen=True)
class Finish:
    """Every group has ended and the engines hold the final weights. The last action."""


Action = Submit | Update | Sync | Drop | Finish

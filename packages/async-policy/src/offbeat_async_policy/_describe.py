"""Says in one line who waits for whom."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PolicyStatus:
    """Where the policy stands.

    Args:
        version: updates done.
        engine_version: version of the last sync.
        groups_per_update: R.
        in_flight: groups generating or being scored.
        num_finished: groups finished and not yet in training.
        num_training: groups in the update that runs; 0 when none does.
        num_not_started: groups that are new, or to be issued again.
        syncing: a weight sync runs.
        sync_is_due: a weight sync runs next.
        rollouter_closed_because: the rule that keeps the rollouter from starting a group; empty when it is open.
        max_version_lag: M, or None.
        is_over: Finish was handed out.
    """

    version: int
    engine_version: int
    groups_per_update: int
    in_flight: tuple[int, ...]
    num_finished: int
    num_training: int
    num_not_started: int
    syncing: bool
    sync_is_due: bool
    rollouter_closed_because: str
    max_version_lag: int | None
    is_over: bool


def describe_wait(status: PolicyStatus, where: Callable[[int], str] | None = None) -> str:
    """Such as "trainer waits for 64 groups: 12 finished, 40 in flight on rollout-0; rollouter out of prompts".

    Args:
        status: of the policy.
        where: names the engine that holds a group in flight.
    """
    if status.is_over:
        return "nobody waits: the run is over"
    rollouter = f"rollouter {status.rollouter_closed_because or 'open'}"
    return f"{_describe_trainer(status, _describe_flight(status, where))}; {rollouter}"


def _describe_trainer(status: PolicyStatus, flight: str) -> str:
    if status.syncing:
        return f"trainer and engines are in sync {status.version}, {flight}"
    if status.num_training:
        return f"trainer is in update {status.version} of {status.num_training} groups, {flight}"
    if status.sync_is_due:
        return f"sync {status.version} waits for {flight}"
    wanted = min(status.groups_per_update, len(status.in_flight) + status.num_finished + status.num_not_started)
    text = f"trainer waits for {wanted} groups: {status.num_finished} finished, {flight}"
    if status.num_finished >= wanted and status.max_version_lag is not None:
        text += f", some of them so old that max_version_lag={status.max_version_lag} makes it wait for them"
    return text


def _describe_flight(status: PolicyStatus, where: Callable[[int], str] | None) -> str:
    """Such as "40 in flight on rollout-0", or "40 in flight: 25 on rollout-0, 15 on rollout-1"."""
    text = f"{len(status.in_flight)} in flight"
    if where is None or not status.in_flight:
        return text
    holders = Counter(where(group) for group in status.in_flight)
    if len(holders) == 1:
        return f"{text} on {next(iter(holders))}"
    return f"{text}: " + ", ".join(f"{count} on {holder}" for holder, count in sorted(holders.items()))

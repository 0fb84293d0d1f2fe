"""Who failed first, when a process fails and takes others with it. Pure."""

from collections.abc import Sequence
from typing import Final

from offbeat_liveness._diagnosis.graph import Absent, Scene
from offbeat_liveness._diagnosis.verdict import Verdict, join_names, name_of_group
from offbeat_liveness._diagnosis.wording import (
    absent_party,
    advice_for,
    fate_text,
    in_order,
    notes_of,
    party_of,
    why_in_flight,
)
from offbeat_liveness._process.head import Collective, GroupHead, Head

# The fate that explains the others: an exception comes before the exits it leads to.
FATE_ORDER: Final = ("raised", "crashed", "killed", "left", "exited")
CERTAIN: Final = ("raised", "crashed", "killed")
# What gloo, nccl's watchdog and torch's store say on a process whose peer went away: from an HTTP client or a queue the
# same words tell of something outside the run.
SIGNS_OF_A_LOST_PEER: Final = (
    "Broken pipe",
    "Connection closed by peer",
    "Connection refused",
    "Connection reset by peer",
    "Connection was likely closed",
    "Socket Timeout",
    "Timed out waiting",
    "failed to recv, got 0 bytes",
    "remote process exited",
)
OWN_SIGN: Final = "PeerFailedError"  # of offbeat's own groups
WORLD: Final = "0"  # torch's name of the default group
TORCH_ERRORS: Final = ("RuntimeError:", "torch.distributed.")


def find_failure(scene: Scene) -> Verdict | None:
    """Who failed first, when a process fails and others depend on it: no wait need have lasted long.

    Ranks of one torch world depend on each other; other processes on whom they wait for.

    None if every process failed on its own account, or nobody waited for one that did.
    """
    gone = _failed(scene)
    names = {each.name for each in gone}
    on_its_way_out = [each.head for each in scene.absent if each.fate == "raised" and each.head is not None]
    hurt = [head for head in [*scene.heads, *on_its_way_out] if head.name not in names and _is_hurt(head)]
    hurt = [head for head in hurt if any(_concerns(scene, each, head) for each in gone)]
    gone = [each for each in gone if any(_concerns(scene, each, head) for head in hurt)]
    if not gone:
        return None
    first = first_fate(gone)
    missing = in_order(each.name for each in first)
    _, group, entry = _newest_call(hurt)
    where = f" after {entry} on {name_of_group(group.name, group.axes)}" if entry and group else ""
    return Verdict(
        kind="dead-peer",
        certainty="proof",
        fate=first[0].fate,
        headline=f"{fate_text(first)}; {join_names(each.name for each in hurt)} cannot go on{where}",
        stalled_s=max((wait.age_s for each in scene.heads for wait in each.waits), default=0.0),
        time_s=scene.time_s,
        group=group.name if group else "",
        axes=group.axes if group else (),
        members=group.ranks if group else (),
        op=entry.op if entry else "",
        seq=entry.seq if entry else 0,
        missing=tuple(missing),
        arrived=tuple(in_order(each.name for each in hurt)),
        parties=(*(absent_party(each) for each in first), *(party_of(scene, each, None) for each in hurt)),
        advice=advice_for(first[0], scene),
        notes=notes_of(scene),
    )


def _failed(scene: Scene) -> list[Absent]:
    """Processes that failed on their own account; those that left in order only if others were cut off."""
    raised = [
        Absent(name=head.name, rank=head.rank, world=head.world, fate="raised", text=head.error, head=head)
        for head in scene.heads
        if head.state == "failed" and not is_secondary(head.error)
    ]
    cut_off = _cut_off_worlds(scene)
    gone = [each for each in scene.absent if not (each.fate == "raised" and is_secondary(each.text))]
    gone = [each for each in gone if each.fate in CERTAIN or (each.fate == "exited" and each.world in cut_off)]
    return [*raised, *_left(scene, cut_off), *gone]


def _cut_off_worlds(scene: Scene) -> set[str]:
    """Worlds in which a process says that a peer went away."""
    cut_off = {head.world for head in scene.heads if is_secondary(head.error)}
    cut_off |= {each.world for each in scene.absent if each.fate == "raised" and is_secondary(each.text)}
    return cut_off - {""}


def _left(scene: Scene, cut_off: set[str]) -> list[Absent]:
    """Processes that run and have destroyed the group of a world in which another was cut off."""
    return [
        Absent(name=head.name, rank=left.rank, world=left.world, fate="left", text=why_in_flight(head), head=head)
        for head in scene.heads
        for left in head.left_groups[-1:]
        if head.state == "running" and left.group.name == WORLD and left.world in cut_off
    ]


def _is_hurt(head: Head) -> bool:
    return is_secondary(head.error) or (head.state == "running" and bool(head.waits))


def _concerns(scene: Scene, gone: Absent, head: Head) -> bool:
    """Whether the end of one process is a matter for another: it waits for it, or has failed for a lost peer."""
    is_cut_off = gone.world == head.world != "" and is_secondary(head.error)
    return is_cut_off or gone.name in scene.needed_by(head)


def _newest_call(heads: Sequence[Head]) -> tuple[Head | None, GroupHead | None, Collective | None]:
    """The last collective that any of some processes entered."""
    calls = [(head, group, entry) for head in heads for group in head.groups for entry in group.recent]
    return max(calls, key=lambda call: call[2].created_ns, default=(None, None, None))


def is_secondary(error: str) -> bool:
    """Whether an exception only says that a peer or a connection went away."""
    if OWN_SIGN in error:
        return True
    return error.startswith(TORCH_ERRORS) and any(sign in error for sign in SIGNS_OF_A_LOST_PEER)


def first_fate(gone: Sequence[Absent]) -> list[Absent]:
    """Those whose fate explains the others, the earliest first."""
    first = min(_fate_order(each) for each in gone)
    same = [each for each in gone if _fate_order(each) == first]
    return sorted(same, key=lambda each: each.head.time_s if each.head else 0.0)


def _fate_order(absent: Absent) -> int:
    """An exception that only says that a peer went away explains least."""
    secondary = absent.fate == "raised" and is_secondary(absent.text)
    return len(FATE_ORDER) if secondary else FATE_ORDER.index(absent.fate)

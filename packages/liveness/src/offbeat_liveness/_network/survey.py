"""The leader's look around: asks everybody at once, and finds out about those who do not answer.

In a small run all tell everything. In a large one all tell in brief, and then the few tell everything whom a verdict
will be about.
"""

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from offbeat_liveness._diagnosis.graph import Absent, Fate, Scene
from offbeat_liveness._network.brief import brief_data, choose_few, read_brief
from offbeat_liveness._network.peers import Key, Peers
from offbeat_liveness._network.side_channel import Address, ask_all
from offbeat_liveness._network.silence import Silences, read_usage, witness
from offbeat_liveness._process.crash import read_crash
from offbeat_liveness._process.head import CallSite, Head, from_data, to_data
from offbeat_liveness._process.kernel.proc import HOST
from offbeat_liveness._process.kernel.tree_usage import TreeUsage

FIRST_CALL_S: Final = 0.7
SECOND_CALL_S: Final = 0.5
CALL_S_PER_PEER: Final = 0.001
FEW: Final = 64  # in a run of so many all tell everything at once
MAX_WITH_LEFT: Final = 16
FATE_BY_PID: Final[dict[str, Fate]] = {
    "runs": "silent",
    "stopped": "stopped",
    "gone": "killed",
    "unknown": "unreachable",
}


def tell_head(head: Head, *, in_brief: bool) -> dict[str, Any]:
    """What a process answers to a look."""
    return {"brief": brief_data(head)} if in_brief else {"head": to_data(head)}


class Survey:
    """Looks around, and remembers from look to look who was silent.

    Args:
        peers: the address book.
        directory: where the dead may have left their last words.
    """

    def __init__(self, peers: Peers, directory: Path | None) -> None:
        self._peers, self._directory = peers, directory
        self._silences = Silences()
        self._said: dict[Key, Head] = {}  # the last that each process said of itself

    def look(self, own: Head, left: dict[Key, Head], *, stall_after_s: float) -> Scene:
        """One scene of the whole run, in about 1.7 s, and 2 ms more for each process.

        Args:
            own: head of this process.
            left: processes that said goodbye to this one; filled up with what the others heard.
            stall_after_s: what counts as too long.
        """
        others = self._peers.others()
        heads = self._call(self._peers.running(), left, FIRST_CALL_S)
        quiet = {key: each for key, each in others.items() if key not in heads and key not in left}
        fates, before = self._ask_witnesses(quiet, heads)
        again = {key: each for key, each in quiet.items() if fates[key] in ("silent", "unreachable")}
        if again:
            heads |= self._call(again, left, SECOND_CALL_S)
            quiet = {key: each for key, each in again.items() if key not in heads}
            fates_now, after = self._ask_witnesses(quiet, heads)
            fates |= fates_now
            for key in quiet:
                self._silences.note(key, before.get(key), after.get(key))
        self._silences.heard(heads)
        self._said = {key: each for key, each in (self._said | heads).items() if key in others}
        heads |= self._stand_ins(quiet, fates, heads, left)
        if len(others) > FEW:
            heads |= self._few_in_full(own, heads, others, stall_after_s)
        return self._scene(own, heads, left, fates, others, stall_after_s)

    def _scene(
        self,
        own: Head,
        heads: Mapping[Key, Head],
        left: Mapping[Key, Head],
        fates: Mapping[Key, Fate],
        others: Mapping[Key, Address],
        stall_after_s: float,
    ) -> Scene:
        absent = [_absent(key, each, left, fates, self._directory) for key, each in others.items() if key not in heads]
        everybody = [own, *(head for key, head in heads.items() if key not in left)]
        absent += [_said_goodbye(left[key], others[key]) for key in heads if key in left]
        return Scene(
            heads=everybody,
            absent=[*absent, *_unknown(self._peers, everybody)],
            stall_after_s=stall_after_s,
            time_s=time.time(),
        )

    def _call(self, addresses: Mapping[Key, Address], left: dict[Key, Head], timeout_s: float) -> dict[Key, Head]:
        """Heads of those who answer, in brief where they are many; fills up `left`."""
        in_brief = len(addresses) > FEW
        message = {"ask": "head", "brief": in_brief, **self._peers.introduce()}
        replies = ask_all(addresses, message, self._peers.secret, timeout_s + CALL_S_PER_PEER * len(addresses))
        heads: dict[Key, Head] = {}
        with_left: dict[Key, Address] = {}
        for key, reply in replies.items():
            if "brief" in reply:
                heads[key], gone = read_brief(reply["brief"])
                if any(each not in left for each in gone) and len(with_left) < MAX_WITH_LEFT:
                    with_left[key] = addresses[key]
            elif "head" in reply:
                heads[key] = from_data(Head, reply["head"])
        if with_left:
            heads |= self._call(with_left, left, SECOND_CALL_S)
        _merge_left(left, heads.values())
        return {key: self._in_own_words(head) for key, head in heads.items()}

    def _in_own_words(self, head: Head) -> Head:
        """With the name that this process has for their world: the other may not have heard it yet."""
        left = tuple(dataclasses.replace(each, world=self._own_name_of(each.world)) for each in head.left_groups)
        return dataclasses.replace(head, world=self._own_name_of(head.world), left_groups=left)

    def _own_name_of(self, world: str) -> str:
        return self._peers.world if world and self._peers.is_own_world(world) else world

    def _few_in_full(
        self, own: Head, heads: Mapping[Key, Head], others: Mapping[Key, Address], stall_after_s: float
    ) -> dict[Key, Head]:
        """Second round of a large run: full heads of those whom a verdict may tell of."""
        scene = Scene(heads=[own, *heads.values()], stall_after_s=stall_after_s)
        keys = {told.name: key for key, told in zip(heads, scene.heads[1:], strict=True)}
        few = {keys[name]: others[keys[name]] for name in choose_few(scene) if name in keys}
        found: dict[Key, Head] = {}
        wanted = list(few)
        for first in range(0, len(wanted), FEW):
            found |= self._call({key: few[key] for key in wanted[first : first + FEW]}, {}, FIRST_CALL_S)
        return found

    def _stand_ins(
        self,
        quiet: Mapping[Key, Address],
        fates: Mapping[Key, Fate],
        heads: Mapping[Key, Head],
        left: Mapping[Key, Head],
    ) -> dict[Key, Head]:
        """Heads for those who have been silent in too few looks: who was in a wait of torch's has come so far."""
        still_s = max((wait.age_s for head in heads.values() for wait in head.waits), default=0.0)
        return {
            key: self._as_last_heard(key) or self._silences.stand_in(address, still_s)
            for key, address in quiet.items()
            if key not in left and not self._silences.is_over(key, fates[key])
        }

    def _as_last_heard(self, key: Key) -> Head | None:
        """A process that waited when it was last heard, which it does as long as it does not say something else."""
        head = self._said.get(key)
        if head is None or all(wait.kind == "outside" for wait in head.waits):
            return None
        return dataclasses.replace(head, is_heard=False)

    def _ask_witnesses(
        self, quiet: Mapping[Key, Address], heads: Mapping[Key, Head]
    ) -> tuple[dict[Key, Fate], dict[Key, TreeUsage]]:
        """Fates by pid, and what those that run have used: looked up here, or by who answers on the same machine."""
        fates: dict[Key, Fate] = {}
        usage: dict[Key, TreeUsage] = {}
        for machine in {each.machine for each in quiet.values()}:
            pids = {str(each.pid): each.born for each in quiet.values() if each.machine == machine}
            said = self._ask_witness(machine, pids, heads)
            states = said.get("states", {})
            fates |= {(machine, int(pid)): FATE_BY_PID[states.get(pid, "unknown")] for pid in pids}
            usage |= {(machine, int(pid)): used for pid, used in read_usage(said).items()}
        return fates, usage

    def _ask_witness(self, machine: str, pids: Mapping[str, int], heads: Mapping[Key, Head]) -> Mapping[str, Any]:
        if machine == HOST:
            return witness(pids)
        others = self._peers.others()
        someone = next((key for key in heads if key[0] == machine and key in others), None)
        if someone is None:
            return {}
        question = {"ask": "pids", "pids": dict(pids)}
        return ask_all({0: others[someone]}, question, self._peers.secret, SECOND_CALL_S).get(0, {})


def _merge_left(left: dict[Key, Head], heads: Iterable[Head]) -> None:
    for head in heads:
        for each in head.left:
            left.setdefault((each.host, each.pid), each)


def _absent(
    key: Key,
    address: Address,
    left: Mapping[Key, Head],
    fates: Mapping[Key, Fate],
    directory: Path | None,
) -> Absent:
    if key in left:
        return _said_goodbye(left[key], address)
    text = f"pid {address.pid} on {address.machine}"
    fate, head = fates[key], None
    reason, stack = read_crash(directory, address.machine, address.pid) if fate == "killed" else ("", ())
    if reason:
        fate, head = "crashed", _last_words(address, reason, stack)
        text += f", {reason}"
    return Absent(
        name=address.name,
        rank=address.rank,
        world=address.world,
        fate=fate,
        text=text,
        head=head,
    )


def _last_words(address: Address, reason: str, stack: tuple[CallSite, ...]) -> Head:
    return Head(
        key=f"{address.machine}:{address.pid}",
        name=address.name,
        rank=address.rank,
        world=address.world,
        pid=address.pid,
        host=address.machine,
        state="failed",
        error=reason,
        error_stack=stack,
    )


def _said_goodbye(head: Head, address: Address) -> Absent:
    fate: Fate = "raised" if head.state == "failed" else "exited"
    return Absent(
        name=address.name,
        rank=address.rank,
        world=address.world,
        fate=fate,
        text=head.error,
        head=head,
    )


def _unknown(peers: Peers, heads: Sequence[Head]) -> list[Absent]:
    """Ranks of the world without an address: the world cannot have formed without them, unless they run no monitor."""
    fate: Fate = "unwatched" if any(head.groups for head in heads) else "never-came"
    return [
        Absent(name=f"rank {rank}", rank=rank, world=peers.world, fate=fate) for rank in sorted(peers.unknown_ranks())
    ]

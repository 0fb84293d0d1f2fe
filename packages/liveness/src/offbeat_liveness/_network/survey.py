"""The leader's look around: asks everybody at once, and finds out about those who do not answer."""

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from offbeat_liveness._diagnosis.graph import BUSY, Absent, Fate, Scene
from offbeat_liveness._network.peers import Key, Peers
from offbeat_liveness._network.side_channel import Address, ask_all
from offbeat_liveness._process.crash import read_crash
from offbeat_liveness._process.head import CallSite, Head, from_data
from offbeat_liveness._process.proc import HOST, cpu_s, pid_state, threads_at_work

FIRST_CALL_S: Final = 0.7
SECOND_CALL_S: Final = 0.5
FATE_BY_PID: Final[dict[str, Fate]] = {
    "runs": "silent",
    "stopped": "stopped",
    "gone": "killed",
    "unknown": "unreachable",
}


def look_around(
    peers: Peers, own: Head, left: dict[Key, Head], *, stall_after_s: float, directory: Path | None
) -> Scene:
    """One scene of the whole run, in at most 1.7 s.

    Args:
        peers: the address book.
        own: head of this process.
        left: processes that said goodbye to this one; filled up with what the others heard.
        stall_after_s: what counts as too long.
        directory: where the dead may have left their last words.
    """
    others = peers.others()
    heads = _call(peers, peers.running(), FIRST_CALL_S)
    _merge_left(left, heads.values())
    quiet = {key: each for key, each in others.items() if key not in heads and key not in left}
    states = _states(peers, quiet, heads)
    again = {key: each for key, each in quiet.items() if states[key] in ("silent", "unreachable")}
    if again:
        before = {key: (cpu_s(key[1]), threads_at_work(key[1])) for key in again if key[0] == HOST}
        heads |= _call(peers, again, SECOND_CALL_S)
        _merge_left(left, heads.values())
        heads |= _computing(again, before, heads)
    absent = [_absent(key, each, left, states, directory) for key, each in others.items() if key not in heads]
    everybody = [own, *(head for key, head in heads.items() if key not in left)]
    absent += [_said_goodbye(left[key], others[key]) for key in heads if key in left]
    return Scene(
        heads=everybody,
        absent=[*absent, *_unknown(peers, everybody)],
        stall_after_s=stall_after_s,
        time_s=time.time(),
    )


def pid_states(pids: Mapping[str, int]) -> dict[str, str]:
    """States of processes of this machine: pid to birth in, pid to state out; both as they go through JSON."""
    return {pid: pid_state(int(pid), born) for pid, born in pids.items()}


def _call(peers: Peers, addresses: Mapping[Key, Address], timeout_s: float) -> dict[Key, Head]:
    replies = ask_all(addresses, {"ask": "head", **peers.introduce()}, peers.secret, timeout_s)
    return {key: from_data(Head, reply["head"]) for key, reply in replies.items() if "head" in reply}


def _computing(
    quiet: Mapping[Key, Address], before: Mapping[Key, tuple[dict[int, float], set[int]]], heads: Mapping[Key, Head]
) -> dict[Key, Head]:
    """Processes that hold the GIL too long to answer, but use a CPU: slow, not dead."""
    still_s = max((wait.age_s for head in heads.values() for wait in head.waits), default=0.0)
    found = {}
    for key, (cpu_before_s, at_work_before) in before.items():
        used_s = [now_s - cpu_before_s.get(thread, now_s) for thread, now_s in cpu_s(key[1]).items()]
        busy = max(used_s, default=0.0) / SECOND_CALL_S
        if at_work_before & threads_at_work(key[1]):  # waits for a core all the while: nothing is added up yet
            busy = 1.0
        if key not in heads and busy >= BUSY:
            address = quiet[key]
            found[key] = Head(
                key=f"{key[0]}:{key[1]}",
                name=address.name,
                rank=address.rank,
                world=address.world,
                pid=address.pid,
                host=address.machine,
                time_s=time.time(),
                still_s=still_s,
                busy=busy,
                notes=(f"{address.name} does not answer, but computes: native code in it holds the GIL",),
            )
    return found


def _merge_left(left: dict[Key, Head], heads: Iterable[Head]) -> None:
    for head in heads:
        for each in head.left:
            left.setdefault((each.host, each.pid), each)


def _states(peers: Peers, quiet: Mapping[Key, Address], heads: Mapping[Key, Head]) -> dict[Key, Fate]:
    """Fates by pid: looked up here, or by a process that answers on the same machine."""
    states: dict[Key, Fate] = {}
    for machine in {each.machine for each in quiet.values()}:
        pids = {str(each.pid): each.born for each in quiet.values() if each.machine == machine}
        found = pid_states(pids) if machine == HOST else {}
        witness = next((key for key in heads if key[0] == machine), None)
        if machine != HOST and witness is not None:
            question = {"ask": "pids", "pids": pids}
            replies = ask_all({0: peers.others()[witness]}, question, peers.secret, SECOND_CALL_S)
            found = replies.get(0, {}).get("states", {})
        states |= {(machine, int(pid)): FATE_BY_PID[found.get(pid, "unknown")] for pid in pids}
    return states


def _absent(
    key: Key, address: Address, left: Mapping[Key, Head], states: Mapping[Key, Fate], directory: Path | None
) -> Absent:
    if key in left:
        return _said_goodbye(left[key], address)
    text = f"pid {address.pid} on {address.machine}"
    fate, head = states[key], None
    reason, stack = read_crash(directory, address.pid) if fate == "killed" else ("", ())
    if reason:
        fate, head = "crashed", _last_words(address, reason, stack)
        text += f", {reason}"
    return Absent(name=address.name, rank=address.rank, world=address.world, fate=fate, text=text, head=head)


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
    return Absent(name=address.name, rank=address.rank, world=address.world, fate=fate, text=head.error, head=head)


def _unknown(peers: Peers, heads: Sequence[Head]) -> list[Absent]:
    """Ranks of the world without an address: the world cannot have formed without them, unless they run no monitor."""
    fate: Fate = "unwatched" if any(head.groups for head in heads) else "never-came"
    return [
        Absent(name=f"rank {rank}", rank=rank, world=peers.world, fate=fate) for rank in sorted(peers.unknown_ranks())
    ]

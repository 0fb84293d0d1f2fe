"""Heads in brief, for a look at thousands of processes: what the graph needs, without what only people read.

The leader reads all of them in brief, and in full those of the few that a verdict will tell of. Pure.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Final

from offbeat_liveness._diagnosis.graph import Scene
from offbeat_liveness._process.head import Collective, GroupHead, Head, ThreadHead, Wait, from_data, to_data

NEWEST: Final = 2
FRAMES: Final = 3
MAX_FEW: Final = 64
OLDEST_WAITS: Final = 4


def brief(head: Head) -> Head:
    """Without stacks but the innermost frames of the oldest wait, and without groups that were never used."""
    waiting = {wait.thread for wait in head.waits}
    return dataclasses.replace(
        head,
        waits=tuple(_brief_wait(wait, FRAMES if number == 0 else 0) for number, wait in enumerate(head.waits)),
        groups=tuple(_brief_group(each) for each in head.groups if each.entered != 0 or each.recent or each.transfers),
        threads=tuple(
            ThreadHead(name=each.name, still_s=each.still_s) for each in head.threads if each.name in waiting
        ),
        left=(),
    )


def _brief_wait(wait: Wait, num_frames: int) -> Wait:
    return dataclasses.replace(wait, stack=wait.stack[:num_frames])


def _brief_group(group: GroupHead) -> GroupHead:
    cut = max(0, len(group.recent) - NEWEST)
    kept = [*(each for each in group.recent[:cut] if not each.done), *group.recent[cut:]]
    return dataclasses.replace(group, recent=tuple(dataclasses.replace(each, call_site=None) for each in kept))


def brief_data(head: Head) -> dict[str, Any]:
    """A head in brief as it travels: defaults left out, ranks of a group as a range where they are one."""
    data = _without_defaults(brief(head))
    for group in data.get("groups", ()):
        ranks = group.get("ranks", ())
        if len(ranks) > NEWEST and (step := _step_of(tuple(ranks))):
            group["ranks"] = {"start": ranks[0], "step": step, "num": len(ranks)}
    data["left_keys"] = [[each.host, each.pid] for each in head.left]
    return data


def read_brief(data: Mapping[str, Any]) -> tuple[Head, list[tuple[str, int]]]:
    """The other way round; and the processes that have said goodbye to that one, by host and pid."""
    groups = [{**each, "ranks": _ranks(each.get("ranks", ()))} for each in data.get("groups", ())]
    left = [(str(host), int(pid)) for host, pid in data.get("left_keys", ())]
    return from_data(Head, {**data, "groups": groups}), left


def choose_few(scene: Scene) -> list[str]:
    """Whose heads are to be read in full: who has waited longest, whom they wait for, and who may have differed there.

    Args:
        scene: of heads in brief.
    """
    few: dict[str, None] = {}
    for head, wait in scene.stalled[:OLDEST_WAITS]:
        few[head.name] = None
        edges = [edge for edge in scene.edges_from(head.name) if edge.wait == wait]
        few.update(dict.fromkeys([name for edge in edges[:1] for name in scene.awaited(edge)][:MAX_FEW]))
        few.update(dict.fromkeys(_forgotten_by(scene, head, wait)[:MAX_FEW]))
    few.update(dict.fromkeys([head.name for head, _ in scene.stalled][:MAX_FEW]))
    return [name for name in few if name in scene.head_by_name]


def _forgotten_by(scene: Scene, head: Head, wait: Wait) -> list[str]:
    """Members that have entered the collective of a wait so long ago that its entry is not in their brief head."""
    group = next((each for each in head.groups if each.name == wait.group), None)
    if wait.kind != "collective" or group is None:
        return []
    names = [scene.name_by_rank.get((head.world, rank), "") for rank in group.ranks]
    members = [scene.head_by_name[name] for name in names if name in scene.head_by_name]
    views = [(each.name, each.group(group.key)) for each in members]
    return [name for name, view in views if view and (view.entered or 0) >= wait.seq and view.at(wait.seq) is None]


@functools.lru_cache(maxsize=4096)
def _step_of(ranks: tuple[int, ...]) -> int:
    """By how much each rank is above the one before, 0 where that differs."""
    step = ranks[1] - ranks[0]
    return step if step > 0 and ranks == tuple(range(ranks[0], ranks[0] + step * len(ranks), step)) else 0


def _ranks(said: Any) -> tuple[int, ...]:
    if isinstance(said, Mapping):
        return _range(int(said["start"]), int(said["step"]), int(said["num"]))
    return tuple(said)


@functools.lru_cache(maxsize=4096)
def _range(start: int, step: int, num: int) -> tuple[int, ...]:
    """One tuple for all heads that have that group."""
    return tuple(range(start, start + step * min(num, 1 << 20), step))


def _without_defaults(value: Any) -> dict[str, Any]:
    """A dataclass as dicts, without fields that hold what they hold anyway."""
    return {
        each.name: _plain(found)
        for each in dataclasses.fields(value)
        if (found := getattr(value, each.name)) != each.default
    }


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        if value and isinstance(value[0], Collective | GroupHead | Wait | ThreadHead):
            return [_without_defaults(each) for each in value]
        return [to_data(each) if dataclasses.is_dataclass(each) else each for each in value]
    return to_data(value) if dataclasses.is_dataclass(value) else value

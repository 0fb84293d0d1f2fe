"""Sampled groups: the n scored trajectories of one prompt, in memory and in a checkpoint."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from offbeat_core import Completion, Floats, Ids, Reply, Routes, Trajectory, VersionSegment
from offbeat_data import Picture
from offbeat_objectives import AlgorithmConfig
from offbeat_run import reading


@dataclass(frozen=True, kw_only=True)
class SampledGroup:
    """One prompt with its trajectories and their rewards.

    Args:
        group_id: position in the training order.
        item: index of the prompt in its data set.
        prompt_ids: [P] int32.
        trajectories: of n samples, or of fewer where the environment of some has failed; sample by sample.
        rewards: one per sample, shaping included.
        parts: the reward's parts per sample, for the log.
        sizes: how many trajectories each sample has, more than one where an agent has branched; empty: one each.
        greedy_reward: reward of the prompt's greedy completion; None where the advantage did not need it.
        teacher_logprobs: [N] float32 per trajectory, nats, of its sampled tokens; empty without a teacher.
        pictures: images of the prompt, as the files they came in: smaller than their pixels on the way to every rank.
    """

    group_id: int
    item: int
    prompt_ids: Ids
    trajectories: list[Trajectory]
    rewards: list[float]
    parts: list[dict[str, float]]
    greedy_reward: float | None = None
    teacher_logprobs: list[Floats] = field(default_factory=list)
    pictures: tuple[Picture, ...] = ()
    sizes: list[int] = field(default_factory=list)

    @property
    def sample_sizes(self) -> list[int]:
        """Return how many trajectories each sample has."""
        return self.sizes or [1] * len(self.trajectories)

    @property
    def samples(self) -> list[list[Trajectory]]:
        """The trajectories of each sample."""
        trajectories = iter(self.trajectories)
        return [[next(trajectories) for _ in range(size)] for size in self.sample_sizes]

    @property
    def oldest_version(self) -> int:
        """Policy version of its oldest token."""
        return min(trajectory.oldest_version for trajectory in self.trajectories)

    @property
    def num_tokens(self) -> int:
        return sum(trajectory.num_tokens for trajectory in self.trajectories)

    @property
    def flaw(self) -> str:
        """Why it cannot be trained on; empty when it can."""
        numbers = [*self.rewards, *([] if self.greedy_reward is None else [self.greedy_reward])]
        if not all(map(math.isfinite, numbers)):
            return f"a reward that is no finite number: {numbers}"
        logprobs = [*(turn.logprobs for each in self.trajectories for turn in each.turns), *self.teacher_logprobs]
        if not all(np.isfinite(each).all() for each in logprobs):
            return "a log-probability that is no finite number"
        if not all(each.num_tokens for each in self.trajectories):
            return "a trajectory without a token"
        return ""

    def lack(self, config: AlgorithmConfig, reward_names: Iterable[str]) -> str:
        """Return what the objective reads and the group does not have; empty where it has all.

        A group lacks something where it was sampled for another objective, before the run was resumed with this one.
        """
        if config.needs_greedy_reward and self.greedy_reward is None:
            return f"no greedy reward, which algorithm.advantage = {config.advantage} subtracts"
        if config.needs_teacher and len(self.teacher_logprobs) < len(self.trajectories):
            return "no log-probabilities of the teacher"
        named = {name for parts in self.parts for name in parts}
        if config.advantage == "gdpo" and (missing := sorted(set(reward_names) - named)):
            return f"no reward {missing[0]}, which algorithm.advantage = gdpo looks at by itself"
        return ""


_INDEX: Final = "buffer.json"
_ARRAYS: Final = "buffer.safetensors"


def save_groups(folder: Path, groups: Iterable[SampledGroup]) -> None:
    """Write groups as `buffer.json` and `buffer.safetensors`."""
    index: list[dict[str, object]] = []
    arrays: dict[str, NDArray[Any]] = {}
    for group in groups:
        arrays[f"{group.group_id}.prompt"] = group.prompt_ids
        entry: dict[str, object] = {
            "group_id": group.group_id,
            "item": group.item,
            "rewards": group.rewards,
            "parts": group.parts,
            "greedy_reward": group.greedy_reward,
            "sizes": group.sizes,
            "pictures": [(picture.height, picture.width) for picture in group.pictures],
            "trajectories": [_describe(trajectory) for trajectory in group.trajectories],
        }
        for number, trajectory in enumerate(group.trajectories):
            arrays.update(_arrays(f"{group.group_id}.{number}", trajectory))
        for number, logprobs in enumerate(group.teacher_logprobs):
            arrays[f"{group.group_id}.{number}.teacher"] = logprobs
        for number, picture in enumerate(group.pictures):
            arrays[f"{group.group_id}.picture.{number}"] = np.frombuffer(picture.data, np.uint8)
        index.append(entry)
    folder.mkdir(exist_ok=True)
    (folder / _INDEX).write_text(json.dumps(index))
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, folder / _ARRAYS)


def load_groups(folder: Path) -> dict[int, SampledGroup]:
    """Read what `save_groups` wrote, by group id.

    Raises:
        RunFolderError: it is damaged; the text names the file.
    """
    with reading(f"{folder.name}/{_ARRAYS}"):
        arrays = load_file(folder / _ARRAYS)
    with reading(f"{folder.name}/{_INDEX}"):
        return {entry["group_id"]: _read_group(entry, arrays) for entry in json.loads((folder / _INDEX).read_bytes())}


def _read_group(entry: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> SampledGroup:
    group_id = entry["group_id"]
    trajectories = [
        _read_trajectory(described, f"{group_id}.{number}", arrays)
        for number, described in enumerate(entry["trajectories"])
    ]
    pictures = [
        Picture(data=arrays[f"{group_id}.picture.{number}"].tobytes(), height=height, width=width)
        for number, (height, width) in enumerate(entry.get("pictures", []))  # older checkpoints have none
    ]
    return SampledGroup(
        group_id=group_id,
        item=entry["item"],
        prompt_ids=arrays[f"{group_id}.prompt"],
        trajectories=trajectories,
        rewards=entry["rewards"],
        parts=entry["parts"],
        greedy_reward=entry["greedy_reward"],
        teacher_logprobs=_read_teacher(group_id, len(trajectories), arrays),
        pictures=tuple(pictures),
        sizes=entry.get("sizes", []),
    )


def _read_teacher(group_id: int, num_trajectories: int, arrays: dict[str, NDArray[Any]]) -> list[Floats]:
    names = [f"{group_id}.{number}.teacher" for number in range(num_trajectories)]
    return [arrays[name] for name in names if name in arrays]


def _describe(trajectory: Trajectory) -> dict[str, object]:
    turns = [
        {
            "segments": [(segment.version, segment.num_tokens) for segment in turn.segments],
            "stop_reason": turn.stop_reason,
            "text": turn.text,
            "routes": turn.routes and (turn.routes.shape, turn.routes.highest, turn.routes.start),
        }
        for turn in trajectory.turns
    ]
    replies = [{"text": reply.text, "num_images": len(reply.images)} for reply in trajectory.replies]
    return {"ended": trajectory.ended, "turns": turns, "replies": replies}


def _arrays(name: str, trajectory: Trajectory) -> dict[str, NDArray[Any]]:
    arrays: dict[str, NDArray[Any]] = {}
    if trajectory.prompt_ids is not None:
        arrays[f"{name}.prompt"] = trajectory.prompt_ids
    for number, turn in enumerate(trajectory.turns):
        arrays[f"{name}.{number}.ids"] = turn.ids
        arrays[f"{name}.{number}.logprobs"] = turn.logprobs
        if turn.routes is not None:
            arrays[f"{name}.{number}.routes"] = turn.routes.packed
    for number, reply in enumerate(trajectory.replies):
        arrays[f"{name}.{number}.reply"] = reply.ids
        for place, image in enumerate(reply.images):
            arrays[f"{name}.{number}.reply.{place}"] = image
    return arrays


def _read_trajectory(described: dict[str, Any], name: str, arrays: dict[str, NDArray[Any]]) -> Trajectory:
    turns = [
        Completion(
            ids=arrays[f"{name}.{number}.ids"],
            logprobs=arrays[f"{name}.{number}.logprobs"],
            segments=tuple(VersionSegment(version=v, num_tokens=count) for v, count in turn["segments"]),
            stop_reason=turn["stop_reason"],
            text=turn["text"],
            routes=_read_routes(turn.get("routes"), arrays.get(f"{name}.{number}.routes")),
        )
        for number, turn in enumerate(described["turns"])
    ]
    replies = [
        _read_reply(reply, f"{name}.{number}.reply", arrays) for number, reply in enumerate(described["replies"])
    ]
    own = arrays.get(f"{name}.prompt")
    return Trajectory(turns=tuple(turns), replies=tuple(replies), ended=described["ended"], prompt_ids=own)


def _read_routes(described: tuple[list[int], int, int] | None, packed: NDArray[Any] | None) -> Routes | None:
    if described is None or packed is None:  # older checkpoints have none
        return None
    (num_tokens, num_layers, top_k), highest, start = described
    return Routes(packed=packed, shape=(num_tokens, num_layers, top_k), highest=highest, start=start)


def _read_reply(described: str | dict[str, Any], name: str, arrays: dict[str, NDArray[Any]]) -> Reply:
    if isinstance(described, str):  # as older checkpoints have it, from before replies had images
        return Reply(ids=arrays[name], text=described)
    images = tuple(arrays[f"{name}.{place}"] for place in range(described["num_images"]))
    return Reply(ids=arrays[name], text=described["text"], images=images)

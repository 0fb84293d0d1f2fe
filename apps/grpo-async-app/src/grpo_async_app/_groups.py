"""Sampled groups: the n scored completions of one prompt, in memory and in a checkpoint."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from offbeat_types import Completion, Ids, VersionSegment


@dataclass(frozen=True, kw_only=True)
class SampledGroup:
    """One prompt with its completions and their rewards.

    Args:
        group_id: position in the training order.
        item: index of the prompt in its data set.
        prompt_ids: [P] int32.
        completions: n of them.
        rewards: one per completion, shaping included.
        parts: the reward's parts per completion, for the log.
        greedy_reward: reward of the prompt's greedy completion, where the advantage needs it.
    """

    group_id: int
    item: int
    prompt_ids: Ids
    completions: list[Completion]
    rewards: list[float]
    parts: list[dict[str, float]]
    greedy_reward: float = 0.0

    @property
    def oldest_version(self) -> int:
        """Version of the oldest token in the group."""
        return min(completion.oldest_version for completion in self.completions)

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of all completions."""
        return sum(len(completion.ids) for completion in self.completions)


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
            "completions": [_describe(completion) for completion in group.completions],
        }
        for number, completion in enumerate(group.completions):
            arrays[f"{group.group_id}.{number}.ids"] = completion.ids
            arrays[f"{group.group_id}.{number}.logprobs"] = completion.logprobs
        index.append(entry)
    folder.mkdir(exist_ok=True)
    (folder / "buffer.json").write_text(json.dumps(index))
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, folder / "buffer.safetensors")


def load_groups(folder: Path) -> dict[int, SampledGroup]:
    """Read what `save_groups` wrote, by group id."""
    arrays = load_file(folder / "buffer.safetensors")
    groups = {}
    for entry in json.loads((folder / "buffer.json").read_text()):
        group_id = entry["group_id"]
        completions = [
            Completion(
                ids=arrays[f"{group_id}.{number}.ids"],
                logprobs=arrays[f"{group_id}.{number}.logprobs"],
                segments=tuple(VersionSegment(version=v, num_tokens=count) for v, count in described["segments"]),
                stop_reason=described["stop_reason"],
                text=described["text"],
            )
            for number, described in enumerate(entry["completions"])
        ]
        groups[group_id] = SampledGroup(
            group_id=group_id,
            item=entry["item"],
            prompt_ids=arrays[f"{group_id}.prompt"],
            completions=completions,
            rewards=entry["rewards"],
            parts=entry["parts"],
            greedy_reward=entry["greedy_reward"],
        )
    return groups


def _describe(completion: Completion) -> dict[str, object]:
    segments = [(segment.version, segment.num_tokens) for segment in completion.segments]
    return {"segments": segments, "stop_reason": completion.stop_reason, "text": completion.text}

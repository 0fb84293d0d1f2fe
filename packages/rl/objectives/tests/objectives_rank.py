"""One rank of a batch that several processes share: `python objectives_rank.py RANK WORLD_SIZE STORE ANSWER`.

With a world size of 1 it holds the whole batch, without a group.
"""

import json
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from offbeat_objectives import AlgorithmConfig, compute_advantages, correct_rollouts, sequence_of_tokens

LENGTHS = ([2, 3], [4], [])
CONFIGS = (
    AlgorithmConfig(correction="token_tis_token_rs", normalise_weights=True),
    AlgorithmConfig(correction="sequence_tis_token_rs", normalise_weights=True, tis_cap=1.2),
)


def part(rank, world_size):
    """Logprobs of trainer and rollout, rewards and lengths of one rank; the last of three has no token."""
    generator = torch.Generator().manual_seed(3)
    sizes = [sum(lengths) for lengths in LENGTHS]
    rollout_N = -torch.rand(sum(sizes), generator=generator, dtype=torch.float64)
    train_N = rollout_N + 0.6 * torch.randn(sum(sizes), generator=generator, dtype=torch.float64)
    if world_size == 1:
        lengths = [length for lengths in LENGTHS for length in lengths]
        return train_N, rollout_N, torch.tensor([0.0, 1.0, 5.0]), torch.tensor(lengths)
    counts = [len(lengths) for lengths in LENGTHS]
    return (
        train_N.split(sizes)[rank],
        rollout_N.split(sizes)[rank],
        torch.tensor([0.0, 1.0, 5.0]).split(counts)[rank],
        torch.tensor(LENGTHS[rank], dtype=torch.long),
    )


def main(rank, world_size, store, answer):
    """Correct and compare, and write what came out as JSON."""
    group = None
    if world_size > 1:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        group = dist.new_group(list(range(world_size)))
    train_N, rollout_N, rewards_S, lengths_S = part(rank, world_size)
    corrections = [
        correct_rollouts(train_N, rollout_N, sequence_of_tokens(lengths_S), len(lengths_S), config, group)
        for config in CONFIGS
    ]
    advantages_N, _ = compute_advantages(
        AlgorithmConfig(advantage="reinforce_plus_plus"),
        rewards_S,
        torch.arange(len(rewards_S)),
        lengths_S,
        group=group,
    )
    prompts_S = torch.tensor([0, 0, 1])[: len(rewards_S)] if rank == 0 else torch.ones_like(lengths_S)
    over_prompts = {
        name: compute_advantages(
            AlgorithmConfig(advantage=name),
            rewards_S,
            prompts_S,
            lengths_S,
            parts_S={"right": rewards_S},
            weights={"right": 1.0},
            group=group,
        )[0].tolist()
        for name in ("gpg", "gdpo")
    }
    written = {
        "over_prompts": over_prompts,
        "weights": [correction.weights_N.tolist() for correction in corrections],
        "metrics": [{k: asdict(v) for k, v in correction.metrics.items()} for correction in corrections],
        "advantages": advantages_N.tolist(),
    }
    Path(answer).write_text(json.dumps(written), encoding="utf-8")
    if group is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])

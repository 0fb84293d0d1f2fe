"""HL030: a list of ranks that each rank computes for itself is no new group of all; the lists of all groups are."""

import pytest

from offbeat_hanglint import Settings, analyse

PROGRAM = """import os
import torch.distributed as dist
from megatron.core import parallel_state

def setup(size, tiers, config):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    {0}
"""


def confidences(folder, text):
    (folder / "main.py").write_text(text)
    return [each.confidence for each in analyse([folder], Settings()).findings if each.rule == "HL030"]


def found(folder, lines):
    return confidences(folder, PROGRAM.format("\n    ".join(lines)))


@pytest.mark.parametrize(
    "lines",
    [
        ("first = rank // size * size", "dist.new_group(list(range(first, first + size)))"),
        (
            "first = (rank // size) * size",
            "members = [first + i for i in range(size)]",
            "dist.new_group(ranks=members)",
        ),
        ("members = [i for i in range(world_size) if i // size == rank // size]", "dist.new_group(members)"),
        ("dist.new_group(ranks=range(rank % size, world_size, size), backend='gloo')",),
        ("dist.new_group([rank, (rank + 1) % world_size])",),
        ("tier = tiers.get(rank)", "dist.new_group(sorted(r for r in tiers if tiers[r] == tier))"),
        ("mine = tiers[rank]", "members = config.members[mine]", "dist.new_group(members)"),
        ("node = int(os.environ['GROUP_RANK'])", "dist.new_group([node * size + i for i in range(size)])"),
        ("members = dist.get_process_group_ranks(parallel_state.get_data_parallel_group())", "dist.new_group(members)"),
        ("if rank % 2:", "    members = [1, 3]", "else:", "    members = [0, 2]", "dist.new_group(members)"),
        ("for each in tiers:", "    if rank in each:", "        members = each", "dist.new_group(members)"),
    ],
)
def test_a_group_of_ranks_that_each_rank_computes_for_itself_is_found(tmp_path, lines):
    assert found(tmp_path, lines) == ["high"]


def test_the_ranks_may_be_kept_by_the_object_that_makes_the_group(tmp_path):
    text = """import torch.distributed as dist

class Context:
    def __init__(self, size):
        first = dist.get_rank() // size * size
        self.ranks = list(range(first, first + size))

    def group(self):
        return dist.new_group(self.ranks)
"""
    assert confidences(tmp_path, text) == ["high"]


@pytest.mark.parametrize(
    "lines",
    [
        ("for first in range(0, world_size, size):", "    members = list(range(first, first + size))",
         "    group = dist.new_group(members)", "    if rank in members:", "        mine = group"),
        ("number = rank // size", "for number in range(world_size // size):",
         "    group = dist.new_group([number * size + i for i in range(size)])"),
        ("groups = [dist.new_group([rank]) for rank in range(world_size)]",),
        ("dist.new_group([rank for rank in range(world_size)])",),
        ("dist.new_group(list(range(world_size)))",),
        ("dist.new_group(dist.get_process_group_ranks(dist.group.WORLD))",),
        ("for members in parallel_state.get_all_ranks('dp'):", "    dist.new_group(members)"),
        ("for members in config.decoder_rank_generator.get_ranks('dp'):", "    dist.new_group(members)"),
        ("for members in config.grid.get_rank_enum('pp'):", "    dist.new_group([members[0], members[-1]])"),
        ("members = tuple(range(rank % size, world_size, size))", "if members in tiers:", "    return tiers[members]",
         "lists = [None] * world_size", "dist.all_gather_object(lists, members)",
         "tiers[members], _ = dist.new_subgroups_by_enumeration(sorted(set(lists)))"),
        ("if rank in tiers:", "    dist.new_group(tiers, use_local_synchronization=True)"),
        ("first = rank // size * size",
         "dist.new_group(list(range(first, first + size)), use_local_synchronization=True)"),
        ("group, groups = dist.new_subgroups(size)",),
        ("mesh = dist.init_device_mesh('cuda', (world_size // size, size))",),
        ("members = [None] * world_size", "dist.all_gather_object(members, rank)", "dist.new_group(sorted(members))"),
    ],
)  # fmt: skip
def test_groups_that_all_ranks_list_alike_are_no_finding(tmp_path, lines):
    assert found(tmp_path, lines) == []


def test_a_group_of_the_rank_alone_works_and_is_no_sure_finding(tmp_path):
    assert set(found(tmp_path, ["dist.new_group(ranks=[dist.get_rank()])"])) <= {"low"}


BRANCHES = ("if rank % 2 == 0:", "    dist.new_group({0})", "else:", "    dist.new_group({1})")


def test_two_sides_of_a_condition_on_the_rank_must_list_the_same_ranks(tmp_path):
    differing = [line.format("range(0, world_size, 2)", "range(1, world_size, 2)") for line in BRANCHES]
    assert found(tmp_path, differing) == ["high"]
    alike = [line.format("range(world_size)", "range(world_size)") for line in BRANCHES]
    assert found(tmp_path, alike) == []

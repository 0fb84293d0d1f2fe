"""Conditions that part no member of a group from the others: each beside one that does."""

import pytest

from offbeat_hanglint import Settings, analyse


def findings(folder, text):
    (folder / "main.py").write_text(text)
    return [(each.rule, each.confidence) for each in analyse([folder], Settings()).findings]


def high(folder, text):
    return [rule for rule, confidence in findings(folder, text) if confidence == "high"]


UNPACKED = """import torch.distributed as dist
from megatron.core import parallel_state as mpu

def context():
    size = mpu.get_context_parallel_world_size()
    if size <= 1:
        return 1, 0, None
    return size, mpu.get_context_parallel_rank(), mpu.get_context_parallel_group()

def convolve(value):
    size, rank, group = context()
    if {0}:
        dist.all_reduce(value, group=mpu.get_context_parallel_group())
"""


@pytest.mark.parametrize(
    ("test", "rules"), [("size > 1", []), ("rank == 0", ["HL001"]), ("context()[1] == 0", ["HL001"])]
)
def test_of_several_values_that_a_function_returns_only_the_rank_is_a_rank(tmp_path, test, rules):
    assert high(tmp_path, UNPACKED.format(test)) == rules


def test_a_function_may_pass_on_one_of_the_values(tmp_path):
    code = (
        UNPACKED.format("is_split()")
        + """
def is_split():
    size, rank, group = context()
    return {0}
"""
    )
    assert high(tmp_path, code.format("size > 1")) == []
    assert high(tmp_path, code.format("rank > 0")) == ["HL001"]


KNOWN_BY_NAME = """import torch.distributed as dist
from mmengine.dist import get_dist_info

def report(value):
    {0} = get_dist_info()
    if {1}:
        dist.all_reduce(value)
"""


@pytest.mark.parametrize(
    ("names", "test", "rules"),
    [
        ("rank, world_size", "rank == 0", ["HL001"]),
        ("rank, world_size", "world_size > 1", []),
        ("matrix_rank, shape", "matrix_rank == 0", []),
    ],
)
def test_a_rank_among_the_values_of_a_function_elsewhere_is_known_by_its_name(tmp_path, names, test, rules):
    assert high(tmp_path, KNOWN_BY_NAME.format(names, test)) == rules


READER = """import torch.distributed as dist
from megatron.core import parallel_state as mpu

class Worker:
    def __init__(self):
        self.is_data_io_rank = (
            mpu.get_tensor_model_parallel_rank() == 0
            and mpu.get_context_parallel_rank() == 0
            and mpu.get_pipeline_model_parallel_rank() == 0
        )

    def count(self, value):
        if self.is_data_io_rank:
            dist.all_reduce(value, group=mpu.get_{0}_parallel_group())
"""


@pytest.mark.parametrize(("axis", "rules"), [("data", []), ("tensor_model", ["HL001"]), ("context", ["HL001"])])
def test_what_a_predicate_is_computed_from_counts_before_the_words_of_its_name(tmp_path, axis, rules):
    assert high(tmp_path, READER.format(axis)) == rules


EXCLUDED = """import torch.distributed as dist

class Scale:
    def share(self, value):
        {0}
            dist.all_reduce(value)
        return value

    def measure(self, value):
        return self.share(value)

    def update(self, value):
        {1}
            if dist.get_rank() == 0:
                self.measure(value)
"""


@pytest.mark.parametrize(
    ("inner", "outer", "rules"),
    [
        ("if self.args.is_pipe:", "if not self.args.is_pipe:", []),
        ("if not self.args.is_pipe:", "if self.args.is_pipe:", []),
        ("if self.args.is_pipe:", "if self.args.is_pipe:\n            self.measure(value)\n        else:", []),
        ("if self.args.is_pipe:", "if self.args.is_pipe:\n            return\n        if True:", []),
        ("if not self.args.is_pipe:\n            return value\n        if True:", "if not self.args.is_pipe:", []),
        ("if self.args.mode != 'pipe':", "if self.args.mode == 'pipe':", []),
        ("if self.args.is_pipe:", "if self.args.is_pipe:", ["HL002"]),
        ("if self.args.is_pipe:", "if not self.args.is_zero:", ["HL002"]),
        ("if self.args.is_pipe or value:", "if not self.args.is_pipe:", ["HL002"]),
    ],
)
def test_conditions_that_exclude_one_another_are_never_both_passed(tmp_path, inner, outer, rules):
    assert high(tmp_path, EXCLUDED.format(inner, outer)) == rules


def test_a_second_way_to_the_collective_without_the_condition_counts(tmp_path):
    code = EXCLUDED.format("if self.args.is_pipe:", "if not self.args.is_pipe:")
    code = code.replace("        return self.share(value)", "        self.share(value)\n        dist.all_reduce(value)")
    assert high(tmp_path, code) == ["HL002"]


SHARDED = """import torch.distributed as dist
from torch.distributed.tensor import DTensor

def save(state):
    for name, value in state.items():
        {0}
            value.full_tensor()

def export(state):
    if dist.get_rank() == 0:
        save(state)
"""


@pytest.mark.parametrize("test", ["if hasattr(value, 'full_tensor'):", "if isinstance(value, DTensor):"])
def test_a_gather_of_what_is_sharded_only_is_at_most_of_medium_confidence_behind_a_call(tmp_path, test):
    assert ("HL002", "medium") in findings(tmp_path, SHARDED.format(test))
    assert high(tmp_path, SHARDED.format(test)) == []
    assert high(tmp_path, SHARDED.format("if name:")) == ["HL002"]


ALONE = """import torch.distributed as dist

def send(parameters, rank):
    if rank != 0:
        return
    for each in parameters:
        if {0}:
            each.full_tensor()

def gather(value):
    if {0}:
        dist.all_gather_object([], value)

def report(value, rank):
    if rank == 0:
        gather(value)
"""


@pytest.mark.parametrize(
    "test", ["dist.get_world_size() == 1", "not dist.get_world_size() > 1", "each.world_size <= 1 and each.is_whole"]
)
def test_a_collective_of_one_process_waits_for_no_other(tmp_path, test):
    assert high(tmp_path, ALONE.format(test)) == []


@pytest.mark.parametrize(
    "test",
    [
        "dist.get_world_size() > 1",
        "not dist.get_world_size() == 1",
        "each.world_size == 1 or each.is_whole",
        "dist.get_world_size(each.group) == 1",
    ],
)
def test_a_collective_of_several_processes_does(tmp_path, test):
    assert set(high(tmp_path, ALONE.format(test))) == {"HL010", "HL002"}


FREED = """import torch.distributed as dist
from contextlib import contextmanager

@contextmanager
def main_first(is_main_process):
    try:
        {0}
        yield
    finally:
        {1}
"""


@pytest.mark.parametrize(
    ("before", "after", "rules"),
    [
        ("if not is_main_process:\n            dist.barrier()", "if is_main_process:\n            dist.barrier()", []),
        ("if is_main_process:\n            pass", "if is_main_process:\n            dist.barrier()", ["HL013"]),
        ("if not is_main_process:\n            dist.barrier()", "dist.barrier()", ["HL013"]),
    ],
)
def test_a_barrier_in_finally_that_the_others_wait_in_frees_them(tmp_path, before, after, rules):
    assert [rule for rule in high(tmp_path, FREED.format(before, after)) if rule == "HL013"] == rules


WRITES = """import torch.distributed as dist

def export(path, weights, rank):
    try:
        if rank == 0:
            path.write_bytes(weights)
        {0}
    finally:
        dist.barrier()
"""


@pytest.mark.parametrize(("also", "rules"), [("", []), ("weights.shard()", ["HL013"]), ("dist.barrier()", ["HL013"])])
def test_a_barrier_in_finally_after_work_of_one_rank_frees_the_others(tmp_path, also, rules):
    assert [rule for rule in high(tmp_path, WRITES.format(also)) if rule == "HL013"] == rules


RAISED = """import torch.distributed as dist

def make_groups(groups, value):
    rank = dist.get_rank()
    {0}
    for number, each in enumerate(groups):
        if number == rank:
            mine = {1}
    if {2}:
        raise RuntimeError("no group")
    dist.all_reduce(value)
"""


def test_an_assertion_that_each_rank_has_found_its_own_is_no_sure_finding(tmp_path):
    assert "HL011" not in high(tmp_path, RAISED.format("mine = None", "each", "mine is None"))
    assert "HL011" in high(tmp_path, RAISED.format("mine = True", "each.check()", "not mine"))


NAMED = """import torch.distributed as dist
from megatron.core import parallel_state as mpu

def log(value, groups):
    if mpu.get_tensor_model_parallel_rank() == 0 and mpu.is_pipeline_last_stage():
        Groups.gather_object(value, {0})
"""


@pytest.mark.parametrize(
    ("group", "rules"),
    [
        ("inner_to_outer_groups=groups", []),
        ("gather_group=mpu.get_data_parallel_group()", []),
        ("gather_group=mpu.get_tensor_model_parallel_group()", ["HL001"]),
        ("async_op=False", ["HL032"]),
    ],
)
def test_a_librarys_collective_spans_the_group_that_it_is_given(tmp_path, group, rules):
    assert high(tmp_path, NAMED.format(group)) == rules


LEFT = """import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

def norm(parameters, grads, args):
    for _ in range(2):
        if {0}:
            {1}
    total = torch.stack(grads).sum()
    dist.all_reduce(total, group=mpu.get_data_parallel_group())
"""


@pytest.mark.parametrize(
    ("test", "leave", "confidence"),
    [
        ("not grads", "return 0.0", "medium"),
        ("grads.numel() == 0", "return 0.0", "medium"),
        ("parameters[0].grad is None", "return 0.0", "low"),
        ("args.skip", "return 0.0", None),
    ],
)
def test_a_return_by_this_ranks_data_before_a_collective_is_said_by_default(tmp_path, test, leave, confidence):
    found = [each for rule, each in findings(tmp_path, LEFT.format(test, leave)) if rule == "HL010"]
    assert found == ([confidence] if confidence else [])

"""A collective is found behind calls, wherever the functions are."""

from pathlib import Path

import pytest

from offbeat_hanglint import Finding, Settings, analyse

GUARDED = """import torch.distributed as dist
{imports}

def report(value, trainer=None):
    if dist.get_rank() == 0:
        {call}
"""


def findings(folder: Path, **files: str) -> list[Finding]:
    for name, text in files.items():
        path = folder / (name.replace("_in_", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return [
        f
        for f in analyse([folder], Settings()).findings
        if f.rule in ("HL001", "HL002") and f.function.startswith("report")
    ]


REDUCE = (
    "import torch.distributed as dist\n\ndef reduce_all(value, group=None):\n    dist.all_reduce(value, group=group)\n"
)


@pytest.mark.parametrize(
    ("imports", "call"),
    [
        ("from project.sums import reduce_all", "reduce_all(value)"),
        ("from project import sums", "sums.reduce_all(value)"),
        ("import project.sums as s", "s.reduce_all(value)"),
        ("from project import reduce_all", "reduce_all(value)"),
        ("from project.sums import reduce_all as total", "total(value)"),
        ("import asyncio\nfrom project.sums import reduce_all", "asyncio.to_thread(reduce_all, value)"),
    ],
)
def test_through_imports_and_re_exports(tmp_path, imports, call):
    files = {"project_in___init__": "from .sums import reduce_all\n", "project_in_sums": REDUCE}
    (found,) = findings(tmp_path, **files, project_in_main=GUARDED.format(imports=imports, call=call))
    assert found.confidence in ("high", "medium")
    assert found.steps[-1].path == "project/sums.py"


def test_through_a_method_of_a_base_class(tmp_path):
    base = (
        "import torch.distributed as dist\n\nclass Base:\n    def total(self, value):\n        dist.all_reduce(value)\n"
    )
    code = """import torch.distributed as dist
from base import Base

class Child(Base):
    def report(self, value):
        if dist.get_rank() == 0:
            self.total(value)
"""
    for name, text in (("base", base), ("child", code)):
        (tmp_path / f"{name}.py").write_text(text)
    assert [f.rule for f in analyse([tmp_path], Settings()).findings if f.confidence == "high"] == ["HL002"]


def test_a_group_that_the_caller_gives_counts_with_its_axes(tmp_path):
    call = "if mpu.is_pipeline_last_stage():\n            reduce_all(value, {group})"
    code = (
        "from megatron.core import mpu\nfrom sums import reduce_all\n\ndef report(value):\n    if True:\n        "
        + call
    )
    assert findings(tmp_path, sums=REDUCE, main=code.format(group="mpu.get_data_parallel_group()")) == []
    assert findings(tmp_path, sums=REDUCE, main=code.format(group="mpu.get_pipeline_model_parallel_group()")) != []


def test_a_collective_behind_a_parameter_that_the_call_leaves_off_is_not_reached(tmp_path):
    sums = """import torch.distributed as dist

def log(value, sync=False):
    if sync:
        dist.all_reduce(value)
"""
    code = GUARDED.format(imports="from sums import log", call="log(value{more})")
    assert findings(tmp_path, sums=sums, main=code.format(more="")) == []
    assert findings(tmp_path, sums=sums, main=code.format(more=", sync=True")) != []


def test_both_sides_of_a_condition_that_call_the_same_are_clean(tmp_path):
    code = """import torch.distributed as dist

def report(value):
    if dist.get_rank() == 0:
        dist.broadcast(value, 0)
    else:
        dist.broadcast(value * 0, 0)
"""
    assert findings(tmp_path, main=code) == []


def test_a_barrier_before_and_after_the_leaders_work_is_clean(tmp_path):
    code = """import torch.distributed as dist

def report(load):
    if dist.get_rank() != 0:
        dist.barrier()
    load()
    if dist.get_rank() == 0:
        dist.barrier()
"""
    assert findings(tmp_path, main=code) == []


def test_the_members_of_a_group_may_use_it(tmp_path):
    code = """import torch.distributed as dist

def report(value, ranks, group):
    if dist.get_rank() in ranks:
        dist.all_reduce(value, group=group)
"""
    assert findings(tmp_path, main=code) == []


def test_a_value_that_all_ranks_agreed_on_decides_for_all(tmp_path):
    code = """import torch.distributed as dist

def report(flag, value):
    flag = flag if dist.get_rank() == 0 else flag * 0
    dist.broadcast(flag, 0)
    if flag.item():
        dist.all_reduce(value)
"""
    assert findings(tmp_path, main=code) == []


def test_a_function_that_a_decorator_lets_one_rank_run_reaches_no_collective(tmp_path):
    code = """import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_only

@rank_zero_only
def report(value):
    dist.all_reduce(value)
"""
    assert [(f.rule, f.confidence) for f in findings(tmp_path, main=code)] == [("HL001", "high")]


def test_a_context_manager_with_a_barrier_is_a_collective(tmp_path):
    code = """import torch.distributed as dist

class InTurn:
    def __enter__(self):
        dist.barrier()

    def __exit__(self, *error):
        pass

def report(download):
    if dist.get_rank() == 0:
        with InTurn():
            download()
"""
    assert [(f.rule, f.confidence) for f in findings(tmp_path, main=code)] == [("HL002", "high")]


def test_methods_of_a_group_count_with_its_axes(tmp_path):
    code = """from vllm.distributed import get_tp_group, get_pp_group

def report(value, is_last, tp_rank):
    if tp_rank == 0:
        get_{group}_group().all_reduce(value)
"""
    assert findings(tmp_path, main=code.format(group="pp")) == []
    assert [f.confidence for f in findings(tmp_path, main=code.format(group="tp"))] == ["high"]


def test_every_file_is_read_or_named_however_deep_its_code_is_nested(tmp_path):
    (tmp_path / "deep.py").write_text("x = " + "+".join(["1"] * 3000) + "\n")
    chain = "if a == 0:\n    pass\n" + "".join(f"elif a == {n}:\n    pass\n" for n in range(1500))
    (tmp_path / "chain.py").write_text(chain)
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "fine.py").write_text(
        "import torch.distributed as dist\n\ndef report():\n    if dist.get_rank() == 0:\n        dist.barrier()\n"
    )
    analysis = analyse([tmp_path], Settings())
    assert "broken.py" in {u.path for u in analysis.unreadable}
    assert [f.path for f in analysis.findings] == ["fine.py"]


def test_a_parameter_with_a_default_of_its_own_gates_nothing(tmp_path):
    sums = """import torch.distributed as dist

def log(value, group=None):
    group = find_group() if group is None else group
    if not group:
        return
    dist.all_reduce(value)
"""
    code = GUARDED.format(imports="from sums import log", call="log(value)")
    assert findings(tmp_path, sums=sums, main=code) != []


ASKED = """import os
import torch.distributed as dist

def setting():
    return int(os.environ.get("RANK", -1)), int(os.environ.get("LOCAL_RANK", -1))

def is_dist():
    rank, local_rank = setting()
    return rank >= 0 and local_rank != -1

def is_first():
    rank, local_rank = setting()
    return rank {0}

def report(value):
    if is_dist():
        dist.all_reduce(value)

def report_first(value):
    if is_first():
        dist.all_reduce(value)
"""


def test_whether_there_is_a_rank_is_the_same_on_all_ranks(tmp_path):
    (found,) = findings(tmp_path, main=ASKED.format("in (-1, 0)"))
    assert found.function == "report_first"
    assert findings(tmp_path, main=ASKED.format("is not None")) == []


HALVES = """import torch.distributed as dist

class report_first:
    def __enter__(self):
        self.first = dist.get_rank() == 0
        if not self.first:
            dist.barrier()

    def __exit__(self, *error):
        if self.first:
            {0}
"""


def test_a_context_manager_whose_other_half_makes_the_call_is_no_sure_finding(tmp_path):
    found = findings(tmp_path, main=HALVES.format("dist.barrier()"))
    assert {finding.confidence for finding in found} <= {"low"}
    assert "high" in {finding.confidence for finding in findings(tmp_path, main=HALVES.format("pass"))}


PASSED = """import torch.distributed as dist

def append(rows, gather=False):
    if gather and dist.is_initialized():
        dist.all_gather_object([], rows)

def write(rows, gather=False):
    append(rows, gather={0})

def report(rows):
    if dist.get_rank() == 0:
        write(rows)
"""


def test_a_parameter_that_is_passed_on_gates_what_it_gates_there(tmp_path):
    assert findings(tmp_path, main=PASSED.format("gather")) == []
    assert findings(tmp_path, main=PASSED.format("True")) != []

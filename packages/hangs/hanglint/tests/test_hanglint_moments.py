"""Code that runs at a moment of its own on each rank, and ranks that a module keeps: each beside what is no finding."""

import pytest

from offbeat_hanglint import Settings, analyse


def said(folder, text):
    """What the command prints by default."""
    (folder / "main.py").write_text(text)
    return [each.rule for each in analyse([folder], Settings()).findings if each.confidence != "low"]


HANDLER = """import signal
import torch.distributed as dist

class Trainer:
    def __init__(self):
        signal.signal(signal.SIGUSR1, self.on_warning)
        self.is_over = False

    def on_warning(self, number, frame):
        self.{0}

    def save(self):
        dist.barrier()
"""


@pytest.mark.parametrize(("does", "rules"), [("save()", ["HL042"]), ("is_over = True", [])])
def test_a_signal_handler_sets_a_flag_and_calls_no_collective(tmp_path, does, rules):
    assert said(tmp_path, HANDLER.format(does)) == rules


def test_a_handler_of_an_event_loop_is_one_too(tmp_path):
    code = HANDLER.replace("signal.signal(signal.SIGUSR1", "asyncio.get_event_loop().add_signal_handler(15")
    assert said(tmp_path, code.format("save()")) == ["HL042"]


DELETED = """import torch.distributed as dist

class Engine:
    def __del__(self):
        {0}
"""


@pytest.mark.parametrize(("does", "rules"), [("dist.barrier()", ["HL042"]), ("dist.destroy_process_group()", [])])
def test_the_garbage_collector_comes_at_another_moment_on_each_rank(tmp_path, does, rules):
    assert said(tmp_path, DELETED.format(does)) == rules


HOOK = """import sys
import torch.distributed as dist

def notify(kind, error, trace):
    found = [None] * dist.get_world_size()
    {0}

sys.excepthook = notify
"""


@pytest.mark.parametrize(("does", "rules"), [("dist.all_gather_object(found, error)", ["HL013"]), ("print(error)", [])])
def test_a_hook_for_exceptions_gathers_nothing(tmp_path, does, rules):
    assert said(tmp_path, HOOK.format(does)) == rules


KEPT = """import os
import torch.distributed as dist

{0}

def log(loss):
    if {1}:
        dist.all_reduce(loss)
"""


@pytest.mark.parametrize(
    ("line", "test", "rules"),
    [
        ('RANK = int(os.environ["RANK"])', "RANK == 0", ["HL001"]),
        ('LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))', "LOCAL_RANK == 0", ["HL001"]),
        ("IS_MAIN = dist.get_rank() == 0", "IS_MAIN", ["HL001"]),
        ("LORA_RANK = 16", "LORA_RANK > 8", []),
        ('MAX_RANK = int(os.environ["MAX_RANK_OF_LORA"])', "MAX_RANK > 8", []),
        ('WORLD_SIZE = int(os.environ["WORLD_SIZE"])', "WORLD_SIZE > 1", []),
        ('IS_MAIN = os.environ["MODE"] == "main"', "IS_MAIN", []),
    ],
)
def test_a_rank_that_a_module_keeps_as_a_constant(tmp_path, line, test, rules):
    assert said(tmp_path, KEPT.format(line, test)) == rules


MADE = """import torch.distributed as dist
from {0} import init_device_mesh

def set_up():
    if dist.get_rank() < 4:
        return {1}
"""


@pytest.mark.parametrize(
    ("module", "call"),
    [
        ("torch.distributed.device_mesh", 'init_device_mesh("cuda", (2, 2))'),
        ("torch.distributed", 'init_device_mesh("cuda", (2, 2))'),
        ("torch.distributed.device_mesh", "dist.split_group(split_ranks=[[0, 1], [2, 3]])"),
    ],
)
def test_every_rank_makes_the_mesh_and_the_parts_of_a_group(tmp_path, module, call):
    assert said(tmp_path, MADE.format(module, call)) == ["HL030"]
    assert said(tmp_path, MADE.format(module, call).replace("if dist.get_rank() < 4:", "if True:")) == []

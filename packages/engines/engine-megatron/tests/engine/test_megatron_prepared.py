"""The device gets to patch megatron-core before any of it is imported; later, what holds the old functions keeps them.

In a process of its own: this one has imported megatron-core for the other tests.
"""

import os
import subprocess
import sys

from offbeat_testing import tiny_model

DEVICE = """
import sys
import torch

class Reached(Exception):
    pass

class Device:
    kind, preference, torch_device, shapes_masks = "patched", -1, torch.device("meta"), False

    def __init__(self, index):
        pass

    @classmethod
    def count(cls):
        return 1

    def prepare(self, library, settings):
        imported = [name for name in sys.modules if name.startswith("megatron.")]  # "megatron" is a folder
        raise Reached(f"{library} for tp {settings['tensor_model_parallel_size']}, imported: {imported}")
"""
CREATE = """
import sys
from offbeat_engine_megatron import MegatronTrainEngine
from offbeat_core import TrainEngineConfig

MegatronTrainEngine.create(TrainEngineConfig(model_path=sys.argv[1], device="patched"))
"""


def test_a_device_prepares_megatron_before_it_is_imported(tmp_path):
    model = tiny_model(tmp_path / "model")
    (tmp_path / "patched_device.py").write_text(DEVICE)
    metadata = tmp_path / "patched_device-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: patched-device\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text("[offbeat.device]\npatched = patched_device:Device\n")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-c", CREATE, str(model)]
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=110, check=False
    )
    assert ended.stderr.splitlines()[-1] == "patched_device.Reached: megatron for tp 1, imported: []", ended.stderr

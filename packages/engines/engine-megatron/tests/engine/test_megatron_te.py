"""Layers of TransformerEngine, by megatron-core's own wrappers; its kernels need a GPU, and are torch's here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOLERANCE = 1e-5
KERNELS = {
    "experts grouped": ("layers of TransformerEngine, experts grouped by TransformerEngine", True, True),
    "experts one by one, our attention": (
        "layers of TransformerEngine, attention by runs, experts one by one (asked for)",
        False,
        False,
    ),
    "biases": ("layers of TransformerEngine", True, False),
    "adapters": ("layers of TransformerEngine", True, False),
}


@pytest.fixture(scope="module")
def results():
    """What one process has found for every case."""
    here = Path(__file__)
    paths = [str(here.parents[5] / "tools"), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-W", "ignore", str(here.parent / "te_in_torch.py")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert found.returncode == 0, found.stderr[-4000:]
    return json.loads(found.stdout.splitlines()[-1])


@pytest.mark.parametrize(("case", "kernels", "attends", "groups"), [(case, *uses) for case, uses in KERNELS.items()])
def test_layers_of_transformer_engine_train_as_transformers_does(results, case, kernels, attends, groups):
    found = results[case]
    assert found["error"] < TOLERANCE
    assert found["kernels"] == kernels
    assert found["Linear"] > 0
    assert (found["DotProductAttention"] > 0, found["GroupedLinear"] > 0) == (attends, groups)

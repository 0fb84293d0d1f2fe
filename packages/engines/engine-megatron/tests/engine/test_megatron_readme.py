"""The README's example runs on real ranks."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from offbeat_testing import tiny_model

README = (Path(__file__).parents[2] / "README.md").read_text()
[EXAMPLE] = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("readme") / "model", num_layers=4)


@pytest.mark.ranks(4, deadline_s=120, compare=False)
def test_the_example_trains_and_hands_out_weights(ranks, folder):
    """On ranks that have joined already."""
    assert EXAMPLE.count("~/models/Qwen3-0.6B") == EXAMPLE.count("with join_world():") == 1
    text = EXAMPLE.replace("~/models/Qwen3-0.6B", str(folder)).replace("with join_world():", "if True:")
    found = {}
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(text, "README.md", "exec"), found)
    assert found["norm"] > 0
    assert ("model.layers.3.mlp.down_proj.weight (64, 128)" in output.getvalue()) == (ranks.rank == 0)

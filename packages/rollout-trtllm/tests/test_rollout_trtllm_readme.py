"""The README's example runs, over the stand-in engine."""

import asyncio
import re
import sys
from pathlib import Path

import pytest
import trtllm_standin

from offbeat_testing import tiny_model

README = (Path(__file__).parents[1] / "README.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.fixture
def standin(monkeypatch):
    for name in ("uvicorn", *(each for each in sys.modules if each.startswith("tensorrt_llm"))):
        monkeypatch.delitem(sys.modules, name, raising=False)
    before = set(sys.modules)
    trtllm_standin.install()
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("tensorrt_llm", "uvicorn", "offbeat_rollout_trtllm.worker")):
            del sys.modules[name]


def test_the_first_example_prints_what_was_sampled(standin, tmp_path, capsys):
    folder = tiny_model(tmp_path / "model")
    source = EXAMPLES[0].replace("504, 3575, 282", "10, 44, 81").replace("num_samples=8", "num_samples=2")
    names = {}
    exec(compile(source, "README.md", "exec"), names)
    asyncio.run(names["main"](str(folder)))
    printed = capsys.readouterr().out.splitlines()
    assert sum("VersionSegment(version=0" in line for line in printed) == 2


def test_the_second_example_names_what_there_is():
    names = {}
    exec(compile(EXAMPLES[1], "README.md", "exec"), names)
    assert callable(names["publish"])

"""What the package promises before an engine is asked: light imports, its public names, and the README's examples."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat_testing import tiny_model

LOOK = """
import sys
import offbeat_rollout_trtllm as package
package.find_release("1.2.0")
assert len(package.USES) > 10
sys.exit(", ".join(name for name in ("torch", "tensorrt_llm", "ray", "transformers") if name in sys.modules) or 0)
"""


SERVE = """
import sys
sys.modules |= dict.fromkeys(["offbeat_mesh", "offbeat_weightsync"])  # as if they were not installed
import offbeat_rollout_trtllm.serve
import offbeat_rollout_trtllm._handles
"""


@pytest.mark.nightly
def test_the_server_needs_nothing_that_wants_another_torch_than_the_container_s():
    done = subprocess.run([sys.executable, "-c", SERVE], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_is_light():
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there():
    import offbeat_rollout_trtllm

    assert offbeat_rollout_trtllm.__all__ == sorted(offbeat_rollout_trtllm.__all__, key=_constants_first)
    assert all(getattr(offbeat_rollout_trtllm, name) for name in offbeat_rollout_trtllm.__all__)


def _constants_first(name):
    """The order that ruff keeps: constants, classes, functions."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


README = (Path(__file__).parents[1] / "README.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_first_example_prints_what_was_sampled(start_engine, tmp_path, capsys):
    folder = tiny_model(tmp_path / "model")
    source = EXAMPLES[0].replace("504, 3575, 282", "10, 44, 81").replace("num_samples=8", "num_samples=2")
    source = source.replace("127.0.0.1:8000", start_engine(folder).address)
    names = {}
    exec(compile(source, "README.md", "exec"), names)
    asyncio.run(names["main"](str(folder)))
    printed = capsys.readouterr().out.splitlines()
    assert sum("VersionSegment(version=0" in line for line in printed) == 2


def test_the_second_example_names_what_there_is():
    names = {}
    exec(compile(EXAMPLES[1], "README.md", "exec"), names)
    assert callable(names["publish"])

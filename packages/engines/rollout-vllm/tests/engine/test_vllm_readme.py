import re
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat_testing import tiny_model

pytestmark = [pytest.mark.timeout(300), pytest.mark.nightly]

README = Path(__file__).parents[2] / "README.md"


def test_the_example_runs(tmp_path):
    """As a program of its own, the way a reader would run it, on a tiny model."""
    (source,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    folder = tiny_model(tmp_path / "model", "qwen3")
    program = tmp_path / "example.py"
    program.write_text(source.replace("SmolLM2-135M-Instruct", str(folder)))
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"VersionSegment\(version=0, num_tokens=\d+\)", done.stdout)) == 4

"""The wheel alone, in an environment with nothing else: the wrapper runs, and says that there is no torch."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 110
PACKAGE = Path(__file__).parents[1]
SCRIPT = """
import sys, time
from offbeat_liveness import current_monitor, waiting

with waiting("samples.get", on="nobody"):
    end_s = time.monotonic() + 60
    while current_monitor().verdict is None and time.monotonic() < end_s:
        time.sleep(0.05)
print(current_monitor().verdict.kind, "torch" in sys.modules)
"""


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV", "RANK")
    }
    return subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=True
    )


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv, to build the wheel and the environment")
def test_without_torch_the_wrapper_says_so_once_and_watches_declared_waits(tmp_path: Path) -> None:
    python = tmp_path / "empty" / "bin" / "python"
    run("uv", "build", "--quiet", "--wheel", "--out-dir", tmp_path, PACKAGE)
    run("uv", "venv", "--quiet", "--python", sys.executable, tmp_path / "empty")
    run("uv", "pip", "install", "--quiet", "--no-deps", "--python", python, next(tmp_path.glob("*.whl")))
    (tmp_path / "script.py").write_text(SCRIPT)
    wrapper = [python, "-m", "offbeat_liveness", "run", "--policy", "report", "--stall-after-s", "1"]
    ended = run(*wrapper, tmp_path / "script.py")
    assert ended.stdout == "starved False\n"
    assert ended.stderr.count("torch is not installed in this interpreter") == 1

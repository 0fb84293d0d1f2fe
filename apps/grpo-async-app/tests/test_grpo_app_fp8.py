"""FP8 weights from trainer to engine, in a real run, and the mismatch that the correction then sees."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._preflight.preflight import check_run
from offbeat_core import load_config
from offbeat_run import read_metrics
from offbeat_testing import RunningCommand, tiny_model

Main = Callable[[], object]


@pytest.mark.nightly
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_fp8_weights_are_sampled_from_and_corrected_for(
    forked_main: Main, config: Path, tmp_path: Path, num_ranks: int
) -> None:
    model = tiny_model(tmp_path / "wide", hidden_size=192)  # matrices of more than a block
    differs = {}
    for weights in ("dtype", "fp8"):
        run = tmp_path / weights
        words = [
            f"--model.path={model}",
            f"--rollout.weight_format={weights}",
            "--algorithm.correction=token_tis",
            f"--engine.num_ranks={num_ranks}",
            "--engine.max_updates=2",
            "--eval.every_updates=0",
            "--async.staleness_threshold=0",
            "--async.partial_rollout=false",
        ]
        with RunningCommand(forked_main, "train", config, "--out", run, *words) as process:
            assert process.wait() == 0, process.output
        lines = [line.values for line in read_metrics(run / "metrics.jsonl")]
        differs[weights] = float(np.mean([values["correction/kl_rollout_train"] for values in lines]))
    assert differs["dtype"] < 1e-7
    assert differs["fp8"] > 1e-5, differs


def test_coarser_weights_without_a_correction_are_told(config: Path) -> None:
    def notices(*words: str) -> str:
        return " ".join(check_run(load_config(config, GrpoConfig, words)).notices)

    assert "token_tis is usual" in notices("--rollout.weight_format=fp8", "--algorithm.correction=none")
    assert "fp8" not in notices("--rollout.weight_format=fp8")
    assert "fp8" not in notices("--rollout.weight_format=fp8", "--algorithm.correction=token_tis")

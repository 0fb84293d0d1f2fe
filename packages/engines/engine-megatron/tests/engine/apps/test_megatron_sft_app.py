"""Four ranks that share the model as megatron-core does train as the torch engine does in one process."""

import random
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from role_faults import signal_role
from safetensors.numpy import load_file

from offbeat_run import RunFolder, read_metrics
from offbeat_testing import CommandLine, RunningCommand, wait_until_gone

Main = Callable[[], object]
# Adam's first steps turn a rounding difference into a multiple of the learning rate: the smaller, the closer.
WORDS = ["--engine.schedule=constant", "--engine.learning_rate=1e-3"]
MEGATRON = [*WORDS, "--engine.backend=megatron", "--engine.num_ranks=4", "--engine.max_tokens_per_microbatch=128"]
LAYOUTS = {
    "tp 2 × cp 2": ["--engine.options", "{tensor_parallel = 2, context_parallel = 2}"],
    "pp 2 × dp 2": ["--engine.options", "{pipeline_parallel = 2}"],
}


def values(run: Path, name: str) -> dict[int, float]:
    return {line.step: line.values[name] for line in read_metrics(run / "metrics.jsonl") if name in line.values}


def last_weights(run: Path) -> dict[str, np.ndarray]:
    latest = RunFolder.open(run, write=False).checkpoints.latest()
    assert latest is not None
    assert latest.step == 8
    return load_file(latest.path / "model.safetensors")


def run_to_its_end(main: Main, *words: object) -> None:
    with RunningCommand(main, *words) as process:
        assert process.wait() == 0, process.output


def assert_same(run: Path, undisturbed: Path) -> None:
    """Every update once, to the same losses and weights."""
    for name in ("train/loss", "eval/loss", "engine/grad_norm"):
        expected = values(undisturbed, name)
        assert len(expected) > 1
        assert values(run, name) == pytest.approx(expected, abs=2e-5)
    got, wanted = last_weights(run), last_weights(undisturbed)
    assert got.keys() == wanted.keys()
    for name, array in wanted.items():
        # Adam divides by the root of the second moment: an element whose gradient is rounding alone moves by a share of
        # the learning rate. There is one in all, on one kind of processor: 3e-5, where the next differs by 3e-6.
        *others, largest = np.sort(abs(got[name] - array), axis=None)
        assert max(others) <= 1e-5, name
        assert largest <= 1e-4, name


@pytest.fixture
def undisturbed(sft_main: Main, sft_config: Path, tmp_path: Path) -> Path:
    """A run of the torch engine in one process."""
    run_to_its_end(sft_main, "train", sft_config, "--out", tmp_path / "undisturbed", *WORDS)
    return tmp_path / "undisturbed"


@pytest.mark.parametrize(
    "layout",
    [pytest.param(LAYOUTS["tp 2 × cp 2"], marks=pytest.mark.nightly), LAYOUTS["pp 2 × dp 2"]],
    ids=LAYOUTS,
)
def test_four_ranks_train_as_the_torch_engine_does(
    sft_main: Main, sft_config: Path, undisturbed: Path, layout: list[str], tmp_path: Path
) -> None:
    run_to_its_end(sft_main, "train", sft_config, "--out", tmp_path / "run", *MEGATRON, *layout)
    assert_same(tmp_path / "run", undisturbed)


@pytest.mark.nightly
def test_a_run_killed_at_a_random_moment_goes_on_in_another_layout(
    sft_main: Main, sft_config: Path, undisturbed: Path, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    first, then = random.Random(seed).sample(list(LAYOUTS.values()), 2)
    num_updates, run = random.Random(seed).randrange(2, 7), tmp_path / "run"
    with RunningCommand(sft_main, "train", sft_config, "--out", run, *MEGATRON, *first) as process:
        process.wait_until(run.joinpath("config.toml").exists, "there is a run")
        process.wait_until(lambda: len(values(run, "train/loss")) >= num_updates, f"{num_updates} updates")
        started = process.descendants()
        process.kill()
        process.wait()
        wait_until_gone(started, deadline_s=20)  # the ranks get no message: they see that rank 0 is gone
    run_to_its_end(sft_main, "resume", run, *then)
    assert_same(run, undisturbed)


def test_a_rank_that_is_killed_is_named_and_one_rank_goes_on(
    sft_main: Main, sft_config: Path, undisturbed: Path, tmp_path: Path
) -> None:
    run, words = tmp_path / "run", ["--data.epochs=3000", "--cluster.max_restarts=0"]
    with RunningCommand(
        sft_main, "train", sft_config, "--out", run, *MEGATRON, *LAYOUTS["tp 2 × cp 2"], *words
    ) as process:
        process.wait_until((run / "checkpoints" / "step-000002").is_dir, "a checkpoint")
        started = process.descendants()
        signal_role(process, "trainer-2", signal.SIGKILL)
        assert process.wait() == 3, process.output
        assert "trainer-2 failed: its process was killed by SIGKILL" in process.output
        assert f"resume {run}" in process.output
        wait_until_gone(started, deadline_s=20)
    done = RunFolder.open(run, write=False).checkpoints.latest()
    assert done is not None
    words = ["--engine.num_ranks=1", "--engine.options", "{}", f"--engine.max_updates={done.step + 2}"]
    run_to_its_end(sft_main, "resume", run, *words)
    assert list(values(run, "train/loss")) == list(range(1, done.step + 3))
    expected = list(values(undisturbed, "train/loss").values())[:7]  # the last update of the shorter run is smaller
    assert list(values(run, "train/loss").values())[:7] == pytest.approx(expected[: done.step + 2], abs=2e-5)


@pytest.mark.nightly
def test_a_run_in_bfloat16_goes_on_from_its_checkpoint_bit_for_bit(
    sft_main: Main, sft_config: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """And is near the one in float32, though not the same."""
    words = [*WORDS, "--engine.backend=megatron", "--engine.dtype=bfloat16", "--engine.num_ranks=2"]
    words += ["--engine.options", "{tensor_parallel = 2}"]
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    run_to_its_end(sft_main, "train", sft_config, "--out", whole, *words)
    # The end evaluates, as the whole run does there.
    run_to_its_end(sft_main, "train", sft_config, "--out", parted, *words, "--engine.max_updates=6")
    run_to_its_end(sft_main, "resume", parted, "--engine.max_updates=0")
    for name in ("train/loss", "eval/loss", "engine/grad_norm"):
        assert values(parted, name) == values(whole, name)
        assert values(whole, name) != values(undisturbed, name)
        assert values(whole, name) == pytest.approx(values(undisturbed, name), rel=0.01)
    got, wanted = last_weights(parted), last_weights(whole)
    assert got.keys() == wanted.keys()
    assert all((got[name] == array).all() for name, array in wanted.items())
    assert any((array.view(np.uint32) & 0xFFFF).any() for array in got.values()), "the float32 weights were lost"


@pytest.mark.parametrize(
    ("options", "said"),
    {
        "ranks that do not divide": ("{tensor_parallel = 3}", "engine.num_ranks = 3 or a multiple of it"),
        "experts of a model without": ("{expert_parallel = 2}", "has no experts"),
        "what megatron-core gets wrong": (
            "{pipeline_parallel = 2, virtual_pipeline = 2, batch_p2p = true}",
            "batch_p2p = false",
        ),
    }.values(),
)
def test_a_layout_that_cannot_be_is_refused_by_the_plan(
    sft_command: CommandLine, sft_config: Path, options: str, said: str
) -> None:
    ended = sft_command("plan", sft_config, *MEGATRON, "--engine.options", options)
    assert ended.code == 2
    assert said in ended.err


@pytest.mark.parametrize(("name", "layout"), LAYOUTS.items())
def test_the_plan_shows_the_layout(sft_command: CommandLine, sft_config: Path, name: str, layout: list[str]) -> None:
    ended = sft_command("plan", sft_config, *MEGATRON, *layout)
    assert ended.code == 0, ended.err
    assert f"4 that train together as {name}" in " ".join(ended.out.split())

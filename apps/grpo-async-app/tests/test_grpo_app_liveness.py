"""Every process of a run is watched: one that makes no progress is named by its role, with its current line."""

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from role_faults import accounting_complaints, last_value, listening_addresses, role_pids, updates

import offbeat_liveness as liveness
from grpo_async_app._roles.trainer import TrainerRole
from offbeat_rollout_torch import TorchRolloutEngine
from offbeat_testing import RunningCommand

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes meet through /proc")

Main = Callable[[], object]


def hang_here(marker: Path) -> None:
    """Wait for what never comes, in the thread that answers all calls; once."""
    marker.touch()
    threading.Event().wait()


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_an_engine_that_stands_still_is_named_with_the_line_it_stands_in_and_started_again(
    forked_main: Main, config: Path, tmp_path: Path
) -> None:
    run, marker = tmp_path / "run", tmp_path / "stood"
    generate = TorchRolloutEngine.generate

    async def generate_or_stand(engine: TorchRolloutEngine, request: Any) -> Any:
        if os.environ.get("OFFBEAT_ROLE") == "rollout-1" and updates(run) and not marker.exists():
            hang_here(marker)
        return await generate(engine, request)

    def main() -> None:
        TorchRolloutEngine.generate = generate_or_stand  # type: ignore[method-assign]
        forked_main()

    words = ["--rollout.num_engines=2", "--data.epochs=8", "--liveness.stall_after_s=3", "--cluster.silent_after_s=20"]
    log = run / "logs" / "liveness.log"
    with RunningCommand(main, "train", config, "--out", run, *words) as process:
        process.wait_until(marker.exists, "an engine that hangs")
        stuck = role_pids(process)["rollout-1"]
        process.wait_until(lambda: log.exists() and "rollout-1" in log.read_text(), "its name")
        assert role_pids(process)["rollout-1"] == stuck, "that is its supervisor's to end"
        assert process.wait() == 0, process.output
    report = log.read_text()
    assert "driver waits in rollout-1." in report or "driver waits for rollout-1" in report, report
    assert "hang_here" in report, report
    assert accounting_complaints(run, 20, 8, per_update=4) == []
    assert last_value(run, "engines/restarts") >= 1.0


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_ranks_that_cannot_go_on_end_themselves_and_neither_driver_nor_engines(
    forked_main: Main, config: Path, tmp_path: Path
) -> None:
    run, marker = tmp_path / "run", tmp_path / "strayed"
    update = TrainerRole._update

    def update_or_stray(role: TrainerRole, *arguments: Any) -> Any:
        if os.environ.get("OFFBEAT_ROLE") == "trainer-1" and updates(run) and not marker.exists():
            marker.touch()
            last = liveness.recent_collectives()[-1].group
            names = torch.distributed.distributed_c10d._world.pg_names
            group = next(each for each, name in names.items() if name == last)
            torch.distributed.barrier(group=group)  # where the other rank calls something else
        return update(role, *arguments)

    def main() -> None:
        TrainerRole._update = update_or_stray  # type: ignore[method-assign]
        forked_main()

    words = ["--engine.num_ranks=2", "--data.epochs=8", "--liveness.stall_after_s=3"]
    with RunningCommand(main, "train", config, "--out", run, *words) as process:
        process.wait_until(marker.exists, "a rank that strays")
        engine = role_pids(process)["rollout-0"]
        process.wait_until(lambda: "trainer: trainer-" in process.output, "the end of the ranks")
        assert role_pids(process)["rollout-0"] == engine
        assert process.wait() == 0, process.output
    assert "different-" in (run / "logs" / "liveness.log").read_text()
    assert accounting_complaints(run, 20, 8, per_update=4) == []


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_of_a_run_that_goes_well_nothing_is_said(forked_main: Main, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with RunningCommand(
        forked_main, "train", config, "--out", run, "--data.epochs=4", "--liveness.stall_after_s=5"
    ) as process:
        process.wait_until(lambda: len(updates(run)) >= 1, "an update")
        watched = {role for role, pid in role_pids(process).items() if listening_addresses(pid)}
        assert process.wait() == 0, process.output
        assert "liveness" not in process.output
    assert {"trainer-0", "rollout-0", "scorer"} <= watched, "a monitor listens"
    assert [path.name for path in run.rglob("*liveness*")] == []

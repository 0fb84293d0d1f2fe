"""A rank of the trainer that dies is replaced, and the run ends as an undisturbed one: real processes, killed."""

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from grpo_runs import Main, latest_checkpoint, run_to_its_end, trained_prompts, values_of
from role_faults import last_value, role_pids, updates

from grpo_async_app._roles.rollout import RolloutRole
from grpo_async_app._roles.trainer import TrainerRole
from offbeat_core import Completion, GenerateRequest
from offbeat_engine_torch import TorchTrainEngine
from offbeat_engine_torch._state.copies import PeerCopies
from offbeat_testing import CommandLine, RunningCommand
from offbeat_training import ClippedAdamW

NUM_TRAIN, NUM_EPOCHS, NUM_UPDATES = 20, 2, 10
HEALS = ("--engine.num_ranks=2", "--engine.options.peer_copies=true", "--eval.every_updates=0")
SYNCHRONOUS = ("--async.staleness_threshold=0", "--async.partial_rollout=false")
WORDS = (*HEALS, *SYNCHRONOUS, f"--data.epochs={NUM_EPOCHS}")

PLACES: dict[str, tuple[Any, str, bool]] = {
    "backward": (TorchTrainEngine, "_backward", False),
    "step": (ClippedAdamW, "step", True),
    "copied": (PeerCopies, "keep", True),
    "sync": (TrainerRole, "push_weights", False),
    "checkpoint": (TrainerRole, "save", False),
}
"""A method, and whether a rank dies after it or in its place."""


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, int, int], Path]:
    """Have a rank die once, at a place, in an update or after it; roles are forks of this process."""
    now = [-1, -1]
    update, begin = TrainerRole._update, TrainerRole._join

    def noting(role: TrainerRole, groups: Any, num_batches: int, number: int) -> Any:
        now[1] = number + 1
        return update(role, groups, num_batches, number)

    def joining(role: TrainerRole, rendezvous: Any) -> Any:
        now[0] = rendezvous.rank
        return begin(role, rendezvous)

    monkeypatch.setattr(TrainerRole, "_update", noting)
    monkeypatch.setattr(TrainerRole, "_join", joining)

    def die_at(place: str, rank: int, number: int) -> Path:
        owner, name, after = PLACES[place]
        method, flag = getattr(owner, name), tmp_path / f"{place}-{rank}-{number}"

        def call(*args: Any, **named: Any) -> Any:
            # Copies are kept in a thread, while the next update may have begun.
            update = args[1] if owner is PeerCopies else now[1]
            is_due = [now[0], update] == [rank, number] and not flag.exists()
            if is_due and after:
                method(*args, **named)
            if is_due:
                flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return method(*args, **named)

        monkeypatch.setattr(owner, name, call)
        return flag

    return die_at


def files_of(run: Path) -> dict[str, bytes]:
    """Weights and moments at the end."""
    folder = latest_checkpoint(run).path
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))}


def assert_ends_as_undisturbed(run: Path, main: Main, config: Path) -> None:
    undisturbed = run.with_name("undisturbed")
    run_to_its_end(main, "train", config, "--out", undisturbed, *WORDS)
    assert files_of(run) == files_of(undisturbed)
    assert list(values_of(run, "train/reward")) == list(range(1, NUM_UPDATES + 1))
    assert values_of(run, "train/loss") == values_of(undisturbed, "train/loss")
    assert sorted(trained_prompts(run).values()) == [NUM_EPOCHS] * NUM_TRAIN


@pytest.mark.timeout(240)
def test_an_update_that_has_ended_is_done_again_where_no_copy_of_it_was_sent(
    forked_main: Main,
    config: Path,
    tmp_path: Path,
    dying: Callable[[str, int, int], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the update after it, and in a sync, to which the engines come again; its metrics are written once."""
    run, keep = tmp_path / "run", PeerCopies.keep
    flags = [dying("backward", 1, 4), dying("sync", 0, 7)]

    def keep_late(copies: PeerCopies, version: int, own: Any, ranks: Any) -> None:
        if (version, ranks.rank) in ((3, 1), (7, 0)) and not flags[version == 7].exists():
            time.sleep(60)  # the process dies meanwhile
        keep(copies, version, own, ranks)

    monkeypatch.setattr(PeerCopies, "keep", keep_late)
    said = run_to_its_end(forked_main, "train", config, "--out", run, *WORDS, deadline_s=200)
    assert all(flag.exists() for flag in flags)
    assert "started from the last checkpoint" not in said
    log = "".join(path.read_text() for path in (run / "logs").glob("trainer-*.log"))
    assert "goes on from the state of update 2," in log
    assert "goes on from the state of update 6," in log
    assert_ends_as_undisturbed(run, forked_main, config)


@pytest.mark.timeout(420)
def test_ranks_that_die_are_replaced_and_the_run_ends_with_the_bits_of_an_undisturbed_one(
    forked_main: Main, config: Path, tmp_path: Path, dying: Callable[[str, int, int], Path]
) -> None:
    """In the same update twice, with a spare that has taken a place, in a sync, and when all have the next state."""
    run = tmp_path / "run"
    flags = [dying("backward", 1, 2), dying("step", 0, 2), dying("sync", 1, 3), dying("copied", 0, 5)]
    flags.append(dying("checkpoint", 1, 6))
    said = run_to_its_end(
        forked_main, "train", config, "--out", run, *WORDS, "--cluster.max_restarts=9", deadline_s=400
    )
    assert all(flag.exists() for flag in flags)
    assert len(re.findall(r"trainer-\d+ \(by trainer-\d+\) replaced after [\d.]+ s", " ".join(said.split()))) == 5, said
    assert "started from the last checkpoint" not in said
    assert last_value(run, "trainer/restarts") == 5.0
    assert_ends_as_undisturbed(run, forked_main, config)


@pytest.mark.nightly
@pytest.mark.timeout(180)
def test_the_others_stay_and_engines_go_on_sampling(
    forked_main: Main,
    config: Path,
    tmp_path: Path,
    dying: Callable[[str, int, int], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests end between the death of a rank, which takes a while to replace here, and its return."""
    run, flag, noted = tmp_path / "run", dying("backward", 0, 3), tmp_path / "noted"
    generate, rejoin = RolloutRole.generate, TrainerRole.rejoin

    def note(what: str) -> None:
        with noted.open("a") as file:
            file.write(f"{time.time()} {what}\n")

    @wraps(generate)
    async def slowly(role: RolloutRole, request: GenerateRequest) -> list[Completion]:
        await asyncio.sleep(0.2)
        completions = await generate(role, request)
        note("sampled")
        return completions

    @wraps(rejoin)  # by its annotations the actor decodes arguments
    def rejoin_late(role: TrainerRole, *args: Any) -> None:
        time.sleep(2)
        rejoin(role, *args)
        note("rejoined")

    monkeypatch.setattr(RolloutRole, "generate", slowly)
    monkeypatch.setattr(TrainerRole, "rejoin", rejoin_late)
    words = (*HEALS, "--data.epochs=2", "--async.staleness_threshold=1")
    with RunningCommand(forked_main, "train", config, "--out", run, *words) as process:
        process.wait_until(lambda: len(updates(run)) >= 2, "2 updates")
        before = role_pids(process)
        process.wait_until(lambda: "replaced after" in process.output, "another rank")
        after = role_pids(process)
        assert process.wait() == 0, process.output
    kept = ("trainer-1", "rollout-0")
    assert {role: after.get(role) for role in kept} == {role: before[role] for role in kept}
    assert "trainer-0" not in after
    events = [line.split() for line in noted.read_text().splitlines()]
    end_s = max(float(when) for when, what in events if what == "rejoined")
    assert [when for when, what in events if what == "sampled" and flag.stat().st_mtime < float(when) < end_s], events
    assert sorted(trained_prompts(run).values()) == [2] * NUM_TRAIN


@pytest.mark.nightly
def test_two_that_die_at_once_are_started_from_the_checkpoint_which_is_said(
    forked_main: Main, config: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with RunningCommand(forked_main, "train", config, "--out", run, *HEALS, "--data.epochs=8") as process:
        process.wait_until(lambda: len(updates(run)) >= 3, "3 updates")
        for pid in [role_pids(process)[role] for role in ("trainer-0", "trainer-1")]:
            os.killpg(pid, signal.SIGKILL)
        assert process.wait() == 0, process.output
        said = " ".join(process.output.split())
    assert "no rank could be replaced, so all are started from the last checkpoint" in said
    assert "has died together with" in said
    assert sorted(trained_prompts(run).values()) == [8] * NUM_TRAIN


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--engine.num_ranks=1",), "peer_copies needs a second rank"),
        (("--algorithm.advantage=gae",), "not beside a critic"),
    ],
)
def test_copies_that_would_replace_no_rank_are_refused(
    command: CommandLine, config: Path, words: tuple[str, ...], problem: str
) -> None:
    ended = command("plan", config, *HEALS, *words)
    assert ended.code == 2
    assert problem in " ".join(ended.err.split())

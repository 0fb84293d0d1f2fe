"""Faults of the processes of a run in progress, for real: each ends with every prompt trained once per epoch."""

import contextlib
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from grpo_runs import Main, latest_checkpoint, statistics_of
from role_faults import accounting_complaints, last_value, listening_addresses, role_pids, signal_role, slowed, updates

from offbeat_actors._actor import ActorHandle
from offbeat_rollout_torch._model_runner import ModelRunner
from offbeat_run import read_timeline
from offbeat_testing import RunningCommand, wait_until_gone

OwnModule = Callable[[str, str], None]
NUM_TRAIN, NUM_EPOCHS = 20, 8
COMMON = (f"--data.epochs={NUM_EPOCHS}", "--eval.every_updates=10")


@contextmanager
def begun(main: Main, config: Path, run: Path, *words: str, after: int = 3) -> Iterator[RunningCommand]:
    """A run that has done some updates."""
    with RunningCommand(main, "train", config, "--out", run, *COMMON, *words) as process:
        process.wait_until(lambda: len(updates(run)) >= after, f"{after} updates")
        yield process


def assert_ends_well(process: RunningCommand, run: Path) -> None:
    assert process.wait() == 0, process.output
    assert accounting_complaints(run, NUM_TRAIN, NUM_EPOCHS, per_update=4) == []


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGSTOP, id="stopped", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("role", ["rollout-1", "trainer-0"])
def test_a_role_that_dies_or_stops_answering_is_started_again(
    forked_main: Main, config: Path, tmp_path: Path, role: str, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    silence = ["--cluster.silent_after_s=2"] if number == signal.SIGSTOP else []
    with begun(forked_main, config, run, "--rollout.num_engines=2", *silence) as process:
        gone = signal_role(process, role, number)
        process.wait_until(lambda: role_pids(process).get(role, gone) != gone, f"a new {role}")
        assert_ends_well(process, run)
        assert "SIGKILL" in process.output if number == signal.SIGKILL else "answered nothing for 2 s" in process.output
    assert last_value(run, "trainer/restarts" if role == "trainer-0" else "engines/restarts") >= 1.0


@pytest.mark.nightly
def test_a_rank_that_dies_takes_the_others_along_and_all_go_on(forked_main: Main, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with begun(forked_main, config, run, "--engine.num_ranks=2") as process:
        before = role_pids(process)
        signal_role(process, "trainer-1", signal.SIGKILL)
        process.wait_until(lambda: role_pids(process).get("trainer-0", 0) not in (0, before["trainer-0"]), "new ranks")
        wait_until_gone([before["trainer-0"], before["trainer-1"]], deadline_s=20)
        assert_ends_well(process, run)
        assert "trainer: trainer-1 failed: its process was killed by SIGKILL" in process.output
        assert role_pids(process) == {}


@pytest.mark.nightly
@pytest.mark.parametrize("role", ["trainer-0", "rollout-1"])
def test_a_role_that_dies_again_and_again_ends_the_run_with_its_cause(
    forked_main: Main, config: Path, tmp_path: Path, role: str
) -> None:
    run = tmp_path / "run"
    with begun(forked_main, config, run, "--cluster.max_restarts=1", "--rollout.num_engines=2") as process:
        first = signal_role(process, role, signal.SIGKILL)
        process.wait_until(lambda: role_pids(process).get(role, first) != first, f"another {role}")
        signal_role(process, role, signal.SIGKILL)
        assert process.wait() == 3, process.output
        assert "started again 1 times within 3600 s, and cluster.max_restarts = 1 allows no more" in process.output
        assert f"resume with: grpo-async-app resume {run}" in process.output
    with RunningCommand(forked_main, "resume", run) as process:
        assert_ends_well(process, run)


@pytest.mark.nightly
def test_an_engine_without_memory_is_started_again(forked_main: Main, config: Path, tmp_path: Path) -> None:
    """Whatever cannot be had first: it ends by itself, answers with errors alone, or not at all."""
    run = tmp_path / "run"
    with begun(forked_main, config, run, "--rollout.num_engines=2", "--cluster.silent_after_s=5") as process:
        starved = role_pids(process)["rollout-1"]
        resource.prlimit(starved, resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))
        process.wait_until(lambda: role_pids(process).get("rollout-1", starved) != starved, "a new engine")
        assert_ends_well(process, run)


def test_an_engine_that_answers_and_decodes_nothing_is_replaced(
    forked_main: Main, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose kernel never ends; engines are forks of this process."""
    run, once, decode, silent_after_s = tmp_path / "run", tmp_path / "once", ModelRunner._decode, 3.0

    def without_end(runner: ModelRunner) -> None:
        if runner.version >= 2:
            with contextlib.suppress(FileExistsError):
                once.touch(exist_ok=False)
                threading.Event().wait()
        decode(runner)

    monkeypatch.setattr(ModelRunner, "_decode", without_end)
    words = (*COMMON, "--rollout.num_engines=2", f"--cluster.silent_after_s={silent_after_s}")
    with RunningCommand(forked_main, "train", config, "--out", run, *words) as process:
        process.wait_until(once.exists, "an engine that is stuck")
        stuck_s = time.monotonic()
        process.wait_until(lambda: "and no token came" in process.output, "that it is found")
        found_s = time.monotonic() - stuck_s
        assert_ends_well(process, run)
        said = " ".join(process.output.split())
    assert silent_after_s < found_s < 2 * silent_after_s + 5
    assert said.count("no token came for 3 s (cluster.silent_after_s) and was killed") == 1
    assert said.count("it is started again") == 1, "the other engine continues"
    assert last_value(run, "engines/restarts") == 1.0
    assert statistics_of(run)["reissued"] >= 1


@pytest.mark.nightly
def test_an_engine_whose_step_raises_is_started_again(
    forked_main: Main, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose device has no memory left for a long batch; engines are forks of this process."""
    run, once, step = tmp_path / "run", tmp_path / "once", ModelRunner.step

    def without_memory(runner: ModelRunner) -> None:
        if runner.version >= 2:
            with contextlib.suppress(FileExistsError):
                once.touch(exist_ok=False)
                raise MemoryError("cannot allocate 1 GiB")
        step(runner)

    monkeypatch.setattr(ModelRunner, "step", without_memory)
    with RunningCommand(forked_main, "train", config, "--out", run, *COMMON, "--rollout.num_engines=2") as process:
        assert_ends_well(process, run)
        assert "raised MemoryError: cannot allocate 1 GiB" in " ".join(process.output.split())
    assert once.exists()
    assert last_value(run, "engines/restarts") == 1.0


REWARD = """
from pathlib import Path

SEEN = Path(__file__).with_name("seen")

def reward(prompt, completion):
    SEEN.touch()
    with SEEN.open("a") as file:
        file.write(".")
    if SEEN.stat().st_size > 1 + 4 + 40:  # tried once, the first validation, and all that is trained
        raise ValueError("the judge is away")
    return float(len(completion))
"""


@pytest.mark.nightly
def test_a_last_validation_that_fails_costs_no_update(
    forked_main: Main, config: Path, tmp_path: Path, own_module: OwnModule
) -> None:
    run = tmp_path / "run"
    own_module("own_reward", REWARD)
    words = ["--reward.name=own_reward:reward", "--checkpoint.every=0", "--eval.every_updates=1000"]
    words += ["--reward.on_error=fail"]
    with RunningCommand(forked_main, "train", config, "--out", run, *words) as process:
        assert process.wait() != 0
        assert "the judge is away" in process.output
    assert latest_checkpoint(run).step == 5


MOODY = """
import os, sys, time

def reward(prompt, completion):
    if os.fork() == 0:
        time.sleep(600)
    if prompt.index % 5 == 1 and len(completion) % 2:
        raise ValueError("no bread today")
    if prompt.index % 5 == 2:
        return float("nan")
    if prompt.index == 3:
        sys.exit(3)
    return float(len(completion))
"""


@pytest.mark.nightly
def test_a_reward_that_fails_costs_its_completions_and_the_run_ends(
    forked_main: Main, config: Path, tmp_path: Path, own_module: OwnModule
) -> None:
    run = tmp_path / "run"
    own_module("moody_reward", MOODY)
    words = ["--reward.name=moody_reward:reward", "--checkpoint.every=1", "--eval.every_updates=0"]
    with RunningCommand(forked_main, "train", config, "--out", run, *words) as process:
        assert process.wait() == 0, process.output
        assert "reward/dropped" in process.output
    statistics = statistics_of(run)
    assert statistics["filtered"] >= 5
    assert statistics["filtered"] + statistics["trained"] == NUM_TRAIN
    assert last_value(run, "reward/dropped") >= 10
    assert "no bread today" in (run / "logs" / "reward_errors.log").read_text()


JUDGE = """
import time

def reward(prompt, completion):
    time.sleep(0.4)
    return float(len(completion))
"""


@pytest.mark.nightly
def test_a_slow_judge_is_no_stall(forked_main: Main, config: Path, tmp_path: Path, own_module: OwnModule) -> None:
    """All wait for it for far longer than `async.stall_after_s`, and it gets on."""
    run = tmp_path / "run"
    own_module("slow_judge", JUDGE)
    words = ["--reward.name=slow_judge:reward", "--reward.num_processes=1", "--async.stall_after_s=1.5"]
    with RunningCommand(
        forked_main, "train", config, "--out", run, *words, "--rollout.samples_per_prompt=4"
    ) as process:
        assert process.wait() == 0, process.output
    assert accounting_complaints(run, NUM_TRAIN, 1, per_update=4) == []


@pytest.mark.nightly
def test_a_scorer_that_dies_is_started_again(forked_main: Main, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with begun(forked_main, config, run) as process:
        gone = signal_role(process, "scorer", signal.SIGKILL)
        process.wait_until(lambda: role_pids(process).get("scorer", gone) != gone, "a new scorer")
        assert_ends_well(process, run)


@pytest.mark.nightly
def test_a_trainer_that_rests_holds_back_the_engines_and_nothing_is_lost(
    forked_main: Main, config: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with begun(forked_main, config, run) as process:
        signal_role(process, "trainer-0", signal.SIGSTOP)
        done = len(updates(run))
        threading.Event().wait(2.0)
        held = len(updates(run))
        signal_role(process, "trainer-0", signal.SIGCONT)
        assert_ends_well(process, run)
    assert held <= done + 1
    assert last_value(run, "trainer/restarts") == 0.0
    # The buffer was full: nothing was sampled more than the staleness bound ahead.
    assert last_value(run, "train/lag_max") <= 2.0


@pytest.mark.nightly
def test_a_disk_that_is_full_ends_the_run_and_leaves_the_last_checkpoint(
    forked_main: Main, config: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with begun(forked_main, config, run) as process:
        trainer = role_pids(process)["trainer-0"]
        resource.prlimit(trainer, resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
        assert process.wait() == 2, process.output
        assert "no space left to write it" in process.output
        assert "Traceback" not in process.output
    latest = latest_checkpoint(run)
    assert sorted(path.name for path in (run / "checkpoints").iterdir() if path.is_dir())[-1] == latest.path.name
    with RunningCommand(forked_main, "resume", run) as process:
        assert_ends_well(process, run)


def busy_s(run: Path, role: str) -> float:
    """Time in which a role had work to do, in the timeline."""
    events = read_timeline(run / "timeline.json")
    track = {event["args"]["name"]: event["tid"] for event in events if event["ph"] == "M"}[role]
    return sum(event["dur"] for event in events if event["ph"] == "X" and event["tid"] == track) / 1e6


@pytest.mark.nightly
def test_a_slow_engine_is_named_and_not_ended(forked_main: Main, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["--rollout.num_engines=2", "--rollout.max_tokens=64", "--rollout.max_model_len=128"]
    with begun(forked_main, config, run, *words, after=1) as process:
        slow = role_pids(process)["rollout-1"]
        with slowed(slow, share=0.1):
            process.wait_until(lambda: "rollout-1 is a straggler" in process.output, "it is named")
        assert role_pids(process)["rollout-1"] == slow
        assert_ends_well(process, run)
    assert last_value(run, "engines/restarts") == 0.0


@pytest.mark.nightly
def test_engines_join_and_leave_while_the_run_goes_on(forked_main: Main, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with begun(forked_main, config, run, "--data.epochs=20") as process:
        for number in (3, 1):
            with RunningCommand(forked_main, "scale", run, "--engines", number) as asking:
                assert asking.wait() == 0, asking.output
            wanted = {f"rollout-{each}" for each in range(number)}
            process.wait_until(
                lambda wanted=wanted: {role for role in role_pids(process) if role.startswith("rollout")} == wanted,  # type: ignore[misc]
                f"{number} engines",
            )
        assert process.wait() == 0, process.output
        assert "rollout-2 has joined" in process.output
        assert "has joined: 3 rollout engines" in process.output
        assert "rollout-1 has left: 1 rollout engine" in process.output
    assert accounting_complaints(run, NUM_TRAIN, 20, per_update=4) == []
    assert last_value(run, "groups/reissued") == 0.0


@pytest.mark.nightly
def test_an_engine_of_another_machine_gets_its_weights_over_tcp_also_from_the_next_trainer(
    forked_main: Main, config: Path, tmp_path: Path
) -> None:
    def main() -> None:
        # In the driver alone: the addresses it gets of its roles are all that makes one machine differ from another.
        ActorHandle.address = property(lambda actor: f"127.0.0.{2 if actor.name == 'rollout-1' else 1}")  # type: ignore[assignment,method-assign]
        forked_main()

    run = tmp_path / "run"
    with begun(main, config, run, "--rollout.num_engines=2") as process:
        first = role_pids(process)["trainer-0"]
        assert listening_addresses(first)
        signal_role(process, "trainer-0", signal.SIGKILL)
        process.wait_until(lambda: role_pids(process).get("trainer-0", first) != first, "another trainer")
        assert_ends_well(process, run)
        assert "tcp://" not in process.output  # the address opens the trainer to every process that reads it

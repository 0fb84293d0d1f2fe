"""A small job of grpo-async-app to inject faults into: its roles by name, random kills, and the final accounting."""

import json
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from offbeat_run import read_metrics
from offbeat_testing import RunningCommand, tiny_model

NUM_TRAIN: Final = 20
GROUPS_PER_UPDATE: Final = 4
DRIVER: Final = "driver"
_ROLE_LOG: Final = re.compile(r"(trainer|rollout|teacher|reward_model|environment)-\d+\.log")

CONFIG: Final = """
[model]
path = "{folder}/model"
[data]
path = "{folder}/sums.jsonl"
eval_size = 4
max_prompt_tokens = 64
[reward]
name = "slow_reward:judge"
[rollout]
num_engines = 2
samples_per_prompt = 2
max_tokens = 8
max_model_len = 96
[engine]
learning_rate = 1e-2
[async]
mini_batch_size = {groups}
partial_rollout = true
max_group_retries = 100
[eval]
every_updates = 20
[checkpoint]
every = 2
[cluster]
trainer_threads = 1
rollout_threads = 1
silent_after_s = 10.0
max_restarts = 100
[log]
train_generations = 100
"""

REWARD: Final = """
import time

# A model with random weights learns in 30 updates to write nothing else. All letters: with half of them "the" gets
# two thirds, and a model that has learned to write nothing but "the" learns no more.
WANTED = "abcdefghijklmnopqrstuvwxyz "

def judge(prompt, completion):
    time.sleep({seconds})  # the run takes its time, and not the processor's
    return sum(letter in WANTED for letter in completion) / max(len(completion), 1)
"""


@dataclass(frozen=True)
class Job:
    """A run of seconds or minutes.

    Args:
        folder: holds model, data, reward and the run.
        num_epochs: of its 20 prompts.
    """

    folder: Path
    num_epochs: int

    @classmethod
    def make(cls, folder: Path, num_epochs: int, *, score_s: float = 0.05) -> "Job":
        """Write what it needs; `score_s` for each of its 40 completions an epoch is what it takes at least."""
        folder.mkdir(parents=True, exist_ok=True)
        tiny_model(folder / "model")
        rows = [{"prompt": f"what is {n} and one?", "answer": str(n + 1)} for n in range(NUM_TRAIN + 4)]
        (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "slow_reward.py").write_text(REWARD.format(seconds=score_s))
        (folder / "job.toml").write_text(CONFIG.format(folder=folder, groups=GROUPS_PER_UPDATE))
        return cls(folder, num_epochs)

    @property
    def run(self) -> Path:
        """Return its run folder."""
        return self.folder / "run"

    def train(self, *words: str) -> RunningCommand:
        """Return the command that starts it."""
        self._let_reward_be_found()
        epochs = f"--data.epochs={self.num_epochs}"
        return RunningCommand("grpo_async_app", "train", self.folder / "job.toml", "--out", self.run, epochs, *words)

    def resume(self) -> RunningCommand:
        """Return the command that resumes it."""
        self._let_reward_be_found()
        return RunningCommand("grpo_async_app", "resume", self.run)

    def _let_reward_be_found(self) -> None:
        path = os.environ.get("PYTHONPATH", "")
        if str(self.folder) not in path.split(os.pathsep):
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (path, str(self.folder))))

    def complaints(self) -> list[str]:
        """Return what is wrong in its accounting: a group trained twice or never, an update missing or doubled."""
        return accounting_complaints(self.run, NUM_TRAIN, self.num_epochs, GROUPS_PER_UPDATE)


def role_pids(process: RunningCommand) -> dict[str, int]:
    """Return process ids of the roles of a run by name; a role is identified by the log that it writes.

    A scorer has none: its command line holds its name, or is the driver's where roles are forks of it.
    """
    roles: dict[str, int] = {}
    for pid in process.descendants():
        try:
            output = Path(os.readlink(f"/proc/{pid}/fd/1"))
            command, driver = (Path(f"/proc/{each}/cmdline").read_text() for each in (pid, process.pid))
        except OSError:
            continue  # gone meanwhile
        if _ROLE_LOG.fullmatch(output.name):
            roles.setdefault(output.stem, pid)
        elif "\0scorer-" in command or command == driver:
            roles.setdefault("scorer", pid)
    return roles


def listening_addresses(pid: int) -> set[str]:
    """Return where a process listens, in the words of /proc/net."""
    held = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            held.add(os.readlink(entry.path))
    tables = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    columns = [line.split() for table in tables for line in table]
    return {each[1].partition(":")[0] for each in columns if each[3] == "0A" and f"socket:[{each[9]}]" in held}


def signal_role(process: RunningCommand, role: str, number: signal.Signals) -> int:
    """Send a signal to a role, and return its process id."""
    pid = role_pids(process)[role]
    os.kill(pid, number)
    return pid


@contextmanager
def slowed(pid: int, share: float, period_s: float = 0.2) -> Iterator[None]:
    """Let a process run for only a share of the time."""
    ended = threading.Event()

    def work() -> None:
        with suppress(ProcessLookupError):
            while not ended.wait(period_s * share):
                os.kill(pid, signal.SIGSTOP)
                ended.wait(period_s * (1 - share))
                os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def kill_one(process: RunningCommand, draw: random.Random, *, may_be_driver: bool) -> str:
    """Kill a random process with `kill -9`; every second time the driver, where that is allowed.

    Returns:
        Its role, "" where a run that ends has none left.
    """
    roles = role_pids(process)
    if may_be_driver and draw.random() < 0.5:
        roles = {DRIVER: process.pid}
    if not roles:
        return ""
    role = draw.choice(sorted(roles))
    with suppress(ProcessLookupError):
        os.kill(roles[role], signal.SIGKILL)
    return role


def has_ended(process: RunningCommand) -> bool:
    """Return whether the command is over."""
    with suppress(AssertionError):
        process.wait(deadline_s=0.0)
        return True
    return False


def disturb(
    process: RunningCommand, draw: random.Random, *, every_s: float, num_kills: int, may_be_driver: bool
) -> list[str]:
    """Kill a process every so often, until there were enough kills, the run has ended, or its driver is killed.

    Args:
        process: a run that has begun to train.
        draw: which.
        every_s: time between two kills.
        num_kills: enough.
        may_be_driver: also the driver.

    Returns:
        The roles killed, in order.
    """
    killed: list[str] = []
    while len(killed) < num_kills and DRIVER not in killed:
        end_s = time.monotonic() + every_s
        while time.monotonic() < end_s:
            if has_ended(process):
                return killed
            time.sleep(0.1)
        killed += filter(None, [kill_one(process, draw, may_be_driver=may_be_driver)])
    return killed


def updates(run: Path) -> list[int]:
    """Return the steps of the recorded updates."""
    path = run / "metrics.jsonl"
    return [line.step for line in read_metrics(path) if "train/reward" in line.values] if path.exists() else []


def last_value(run: Path, metric: str) -> float:
    """Return the latest value of a metric; 0 when there is none."""
    values = [line.values[metric] for line in read_metrics(run / "metrics.jsonl") if metric in line.values]
    value = values[-1] if values else 0.0
    assert isinstance(value, float)
    return value


def final_reward(run: Path, num_updates: int = 10) -> float:
    """Return the mean reward of the samples of the last updates: how well the policy has learned its task."""
    lines = [line.values for line in read_metrics(run / "metrics.jsonl") if "train/reward" in line.values]
    return float(np.mean([values["train/reward"] for values in lines[-num_updates:]]))


def trained_prompts(run: Path) -> Counter[str]:
    """Return how often each prompt was trained."""
    with (run / "generations" / "train.jsonl").open("rb") as lines:  # what a model says may hold line ends of Unicode
        return Counter(json.loads(line)["prompt"] for line in lines)


def accounting_complaints(run: Path, num_prompts: int, num_epochs: int, per_update: int) -> list[str]:
    """Return what is wrong with the accounting of a run that has ended.

    Empty when every prompt was trained once an epoch.
    """
    times, steps = Counter(trained_prompts(run).values()), updates(run)
    expected = list(range(1, num_epochs * num_prompts // per_update + 1))
    complaints = []
    if times != {num_epochs: num_prompts}:
        complaints.append(f"{num_prompts} prompts {num_epochs} times each required, got (times: prompts) {dict(times)}")
    if steps != expected:
        complaints.append(f"updates 1 to {len(expected)} once each required, got {steps}")
    return complaints

"""A run whose processes are killed at random, for real: every prompt is trained exactly once per epoch all the same.

OFFBEAT_CHAOS_S says how long it is disturbed; the long form is 300 s with a kill every 20 s. OFFBEAT_CHAOS_LAUNCHER=ray
puts the roles on a Ray cluster of this machine.
"""

import os
import random
from pathlib import Path

import pytest
from role_faults import DRIVER, Job, disturb, final_reward, has_ended, last_value, updates

CHAOS_S = float(os.environ.get("OFFBEAT_CHAOS_S", "16"))
KILL_EVERY_S = 20.0 if CHAOS_S >= 120 else 6.0
NUM_KILLS = round(CHAOS_S / KILL_EVERY_S)
NUM_SCORERS = 2
SCORE_S = 0.05 * NUM_SCORERS
# Scoring alone takes as long as a short run is disturbed. In a long one half of the time goes to what was killed.
NUM_EPOCHS = round(CHAOS_S * NUM_SCORERS / (40 * SCORE_S) * (0.5 if CHAOS_S >= 120 else 1))
LAUNCHER = os.environ.get("OFFBEAT_CHAOS_LAUNCHER", "local")
SEED = int(os.environ.get("OFFBEAT_CHAOS_SEED", "0"))
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1500 + 5 * CHAOS_S)]


@pytest.mark.parametrize("may_be_driver", [False, True], ids=["roles", "roles and driver"])
def test_random_kills_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_be_driver: bool) -> None:
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # the job adds to it
    job, draw, killed = Job.make(tmp_path, NUM_EPOCHS, score_s=SCORE_S), random.Random(SEED), []
    words = [
        f"--cluster.launcher={LAUNCHER}",
        "--cluster.connect_timeout_s=600",
        f"--reward.num_processes={NUM_SCORERS}",
    ]
    command, code = job.train(*words), None
    while code is None:
        done = len(updates(job.run))
        with command as process:
            # A run whose driver was killed after the last update has none left to do.
            process.wait_until(lambda done=done: len(updates(job.run)) > done or has_ended(process), "an update", 600)  # type: ignore[misc]
            new = disturb(
                process, draw, every_s=KILL_EVERY_S, num_kills=NUM_KILLS - len(killed), may_be_driver=may_be_driver
            )
            killed += new
            ended = process.wait(60 + 4 * CHAOS_S)
            output = process.output
        if ended == -9:
            assert DRIVER in new, output
            command = job.resume()
        else:
            code = ended
    print(f"seed {SEED}: killed {', '.join(killed)}")
    assert code == 0, output
    assert job.complaints() == [], output
    assert final_reward(job.run) > 0.9, "what it had learned was lost"  # 1.0 undisturbed, below 0.5 untrained
    assert len(killed) >= NUM_KILLS // 2, f"the run was over after {killed}"
    if not may_be_driver:
        others = [role for role in killed if role != "scorer"]
        counted = last_value(job.run, "engines/restarts") + last_value(job.run, "trainer/restarts")
        assert counted >= len(others) - 1, f"{killed}\n{output}"  # the last one may have come after the last update

"""Watching and restarting, without a run around it: what is pure, and what a launcher that starts nothing can show."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._run.engines import EngineSpeeds
from grpo_async_app._run.fleet import Fleet
from offbeat_actors import RestartBudget
from offbeat_run import load_config
from offbeat_types import EngineHealth, PeerFailedError, PlacementError


class BrokenLauncher:
    """Starts nothing: the seam of `offbeat_actors.Launcher`."""

    reserves = False

    async def start(self, spec: Any) -> Any:
        raise PeerFailedError(spec.name, "no memory left")

    async def close(self, deadline_s: float | None = None) -> None:
        pass


class DeadHandle:
    """As much of an `ActorHandle` as is left of a process that is gone."""

    name, alive, reason = "rollout-0", False, "its process was killed by SIGKILL"

    async def wait_dead(self) -> str:
        return self.reason

    async def call(self, method: str, **_: Any) -> Any:
        raise PeerFailedError(self.name, self.reason)


def test_a_restart_that_fails_again_and_again_is_raised_with_its_cause(
    config: Path, model: Path, tmp_path: Path
) -> None:
    async def scenario() -> None:
        fleet = Fleet(load_config(config, GrpoConfig, ["--cluster.max_restarts=3"]), str(model), tmp_path)
        told: list[str] = []
        fleet._launcher, fleet.tell = BrokenLauncher(), told.append
        async with fleet:
            fleet.engines._add("rollout-0", DeadHandle())  # type: ignore[arg-type]
            async with asyncio.timeout(10):
                while fleet.engines.num_restarts < 3:
                    await asyncio.sleep(0.01)
            with pytest.raises(PeerFailedError, match=r"no memory left.*started again 3 times within 3600 s"):
                fleet.engines.raise_if_failed()
        assert "SIGKILL" in told[0]
        assert len(told) == 3

    asyncio.run(scenario())


class LivingHandle:
    """An engine that answers and never ends."""

    name, alive = "rollout-1", True

    async def wait_dead(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError

    async def call(self, method: str, **_: Any) -> Any:
        return EngineHealth(version=0, num_running=1, num_waiting=0, num_tokens=7, busy_s=0.0, uptime_s=1.0)


@pytest.mark.parametrize("others", [0, 1])
def test_an_engine_whose_node_is_gone_leaves_while_there_are_others(
    config: Path, model: Path, tmp_path: Path, others: int
) -> None:
    class FullLauncher(BrokenLauncher):
        async def start(self, spec: Any) -> Any:
            raise PlacementError("no node has room for it")

    async def scenario() -> None:
        fleet = Fleet(load_config(config, GrpoConfig, []), str(model), tmp_path)
        told: list[str] = []
        fleet._launcher, fleet.tell = FullLauncher(), told.append
        async with fleet:
            fleet.engines._wanted = 1 + others
            for _ in range(others):
                fleet.engines._add("rollout-1", LivingHandle())  # type: ignore[arg-type]
            gone = fleet.engines._add("rollout-0", DeadHandle())  # type: ignore[arg-type]
            await asyncio.wait(set(fleet.engines._tasks), timeout=10, return_when="FIRST_COMPLETED")
            if not others:
                with pytest.raises(PlacementError, match="no node has room"):
                    fleet.engines.raise_if_failed()
                return
            fleet.engines.raise_if_failed()
            assert fleet.engines.names == ["rollout-1"]
            assert gone.has_left
            assert told[-2:] == [
                "rollout-0 has no place any more, and the others go on: no node has room for it",
                "rollout-0 has left: 1 rollout engine",
            ]

    asyncio.run(scenario())


def test_restarts_long_ago_are_forgotten_and_each_role_has_its_own() -> None:
    budget = RestartBudget(max_restarts=2, window_s=100.0)
    for role, now_s in (("rollout-0", 0.0), ("rollout-0", 50.0), ("trainer", 60.0), ("rollout-0", 100.0)):
        budget.spend(role, "killed", now_s)
    with pytest.raises(PeerFailedError, match=r"rollout-0.*killed; it was started again 2 times within 100 s"):
        budget.spend("rollout-0", "killed", 149.0)
    budget.spend("rollout-0", "killed", 150.0)
    assert budget.spent == {"rollout-0": 4, "trainer": 1}


def test_a_slow_engine_is_named_and_one_that_recovers_is_not() -> None:
    speeds, names = EngineSpeeds(), ["rollout-0", "rollout-1", "rollout-2"]
    for number in range(4):
        assert speeds.stragglers(names) == {}, f"after {number} answers"
        for name, seconds in zip(names, (1.0, 1.1, 10.0), strict=True):
            speeds.took(name, 100, seconds)
    assert speeds.stragglers(names) == {"rollout-2": pytest.approx(9.55, abs=0.01)}
    assert speeds.stragglers(["rollout-2"]) == {}  # nobody to compare with
    for _ in range(12):
        speeds.took("rollout-2", 100, 1.0)
    assert speeds.stragglers(names) == {}
    speeds.forget("rollout-0")
    assert speeds.stragglers(names) == {}

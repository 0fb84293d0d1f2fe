"""A rollout engine that cannot be started again ends the run with its own error, instead of leaving it to wait."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_async_app._config import GrpoConfig
from grpo_async_app._fleet import Fleet, _Rollout
from offbeat_run import load_config
from offbeat_types import PeerFailedError


class BrokenLauncher:
    """Starts nothing: the seam of `offbeat_cluster.Launcher`."""

    async def start(self, spec: Any) -> Any:
        raise PeerFailedError(spec.name, "no memory left")

    async def close(self, deadline_s: float | None = None) -> None:
        pass


def test_a_restart_that_fails_is_raised(config: Path, model: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        fleet = Fleet(load_config(config, GrpoConfig, []), str(model), tmp_path)
        fleet._launcher = BrokenLauncher()
        fleet.trainer = SimpleNamespace(alive=True)  # type: ignore[assignment]
        dead = SimpleNamespace(alive=False)
        fleet._rollouts["rollout-0"] = _Rollout(spec=SimpleNamespace(name="rollout-0"), handle=dead)  # type: ignore[arg-type]
        async with fleet:
            fleet.restart_if_dead("rollout-0", lambda name: asyncio.sleep(0))
            await asyncio.sleep(0.05)
            with pytest.raises(PeerFailedError, match="no memory left"):
                fleet.raise_if_dead()

    asyncio.run(scenario())

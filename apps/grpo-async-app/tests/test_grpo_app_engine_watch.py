"""Engines that are slow, engines that decode in vain, by their answers; and what an engine is started with."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from test_grpo_app_engines import Handle, add, open_engines, run, settings

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._fleet.engine_watch import EngineSpeeds, TokenWatch
from grpo_async_app._fleet.role_specs import RoleSpecs
from offbeat_actors import StuckError
from offbeat_core import EngineHealth, RoleName, load_config


def test_a_slow_engine_is_named_and_one_that_recovers_is_not() -> None:
    speeds, names = EngineSpeeds(), ["rollout-0", "rollout-1", "rollout-2"]
    for number in range(4):
        assert speeds.stragglers(names) == {}, f"after {number} answers"
        for name, seconds in zip(names, (1.0, 1.1, 10.0), strict=True):
            speeds.took(name, 100, seconds)
    assert speeds.stragglers(names) == {"rollout-2": pytest.approx(9.55, abs=0.01)}
    assert speeds.stragglers(["rollout-2"]) == {}  # no engine to compare with
    for _ in range(12):
        speeds.took("rollout-2", 100, 1.0)
    assert speeds.stragglers(names) == {}
    speeds.forget("rollout-0")
    assert speeds.stragglers(names) == {}


def test_an_engine_that_has_become_slow_is_named_however_fast_it_was() -> None:
    """Also beside others that have just been started again."""
    speeds, names = EngineSpeeds(), ["rollout-0", "rollout-1", "rollout-2"]
    for _ in range(40):
        for name in names:
            speeds.took(name, 100, 1.0)
    for _ in range(12):
        speeds.took("rollout-2", 100, 10.0)
    for name in names[:2]:
        speeds.forget(name)
        for _ in range(4):
            speeds.took(name, 100, 1.0)
    assert speeds.stragglers(names) == {"rollout-2": pytest.approx(9.4, abs=0.1)}


def test_a_straggler_is_told_of_once_and_its_next_process_begins_anew(config: Path) -> None:
    async def scenario() -> None:
        notices: list[str] = []

        async def start(role: RoleName) -> Any:
            return Handle(str(role))

        engines = open_engines(settings(config), start, notices)
        for name in ("rollout-0", "rollout-1"):
            add(engines, Handle(name))  # type: ignore[arg-type]
        for _ in range(8):
            engines._note_speed("rollout-0", 100, 1.0)
            engines._note_speed("rollout-1", 100, 10.0)
        assert notices == ["rollout-1 is a straggler: 10.0 times slower than the others; it gets less to do"]
        assert list(engines.stragglers) == ["rollout-1"]
        engines.members["rollout-1"].actor.kill()
        assert await anext(engines.late_engines()) == "rollout-1"
        engines._note_speed("rollout-0", 100, 1.0)
        assert engines.stragglers == {}
        await engines.close()

    run(scenario)


def answers(*pairs: tuple[int, int], every_s: float = 2.5) -> list[tuple[EngineHealth, float]]:
    """Health of an engine at regular times, from (samples being decoded, tokens so far)."""
    health = partial(EngineHealth, version=0, num_running=9, num_waiting=9, busy_s=0.0, uptime_s=1.0)
    return [
        (health(num_decoding=decoding, num_tokens=tokens), number * every_s)
        for number, (decoding, tokens) in enumerate(pairs)
    ]


def found_stuck(*pairs: tuple[int, int], every_s: float = 2.5) -> int | None:
    """Number of the answer at which a watch of 10 s finds the engine stuck; None: it does not."""
    watch = TokenWatch(10.0)
    for number, answer in enumerate(answers(*pairs, every_s=every_s)):
        try:
            watch.look(*answer)
        except StuckError:
            return number
    return None


def test_an_engine_is_stuck_where_it_decodes_for_so_long_and_no_token_comes() -> None:
    assert found_stuck((0, 5), (3, 7), *[(3, 8)] * 20) == 6, "10 s after the first answer with the last token"


@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param([(0, 8)] * 20, id="idle, asleep, or in a prompt"),
        pytest.param([(3, 8)] * 4 + [(0, 8)] + [(3, 8)] * 4, id="paused between"),
        pytest.param([(3, number // 4) for number in range(40)], id="slow"),
    ],
)
def test_an_engine_that_has_a_reason_to_be_still_is_not_stuck(pairs: list[tuple[int, int]]) -> None:
    assert found_stuck(*pairs) is None


def test_a_machine_that_slept_has_not_shown_an_engine_to_be_stuck() -> None:
    assert found_stuck((3, 8), (3, 8), (3, 9), every_s=3600.0) is None


def test_an_engine_is_started_without_the_settings_that_its_backend_refuses(config: Path, model: Path) -> None:
    words = [
        "--rollout.backend=vllm",
        f"--teacher.path={model}",
        "--teacher.backend=torch",
        "--algorithm.distillation_coefficient=1",
    ]
    specs = RoleSpecs(load_config(config, GrpoConfig, words), str(model), config.parent / "logs")
    assert specs.rollout(RoleName("rollout")).dropped_settings == {
        "PYTORCH_ALLOC_CONF": ("expandable_segments",),
        "PYTORCH_CUDA_ALLOC_CONF": ("expandable_segments",),
    }
    assert specs.replica(RoleName("teacher")).dropped_settings == {}, "its backend is torch"
    assert specs.trainer("s", 0, None).dropped_settings == {}


@pytest.mark.parametrize("colocate", [False, True])
def test_an_engine_hears_that_it_shares_its_device(config: Path, colocate: bool) -> None:
    words = [f"--cluster.colocate={str(colocate).lower()}"]
    assert load_config(config, GrpoConfig, words).rollout_engine("m", 1).shares_device is colocate

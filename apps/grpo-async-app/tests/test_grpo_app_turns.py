"""Colocated roles give back the least that makes room in each turn."""

from pathlib import Path

import pytest

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._preflight.estimates import estimate_if_known
from grpo_async_app._preflight.placement import place_run
from grpo_async_app._preflight.turns import FILLED_SHARE, choose_parking, with_parked
from offbeat_core import load_config
from offbeat_placement import ClusterView, MemoryEstimate, read_shape
from offbeat_recipes import RunMemory

COLOCATED = ("--cluster.colocate=true", "--async.staleness_threshold=0", "--async.partial_rollout=false")
ON_ACCELERATORS = ("--engine.device=auto", "--rollout.device=auto")
BUDGET = ("--engine.max_tokens_per_microbatch=8192", "--engine.activation_checkpointing=false")
SETTLED = ("--engine.dtype=bfloat16", "--rollout.dtype=bfloat16", "--rollout.max_running=64", *BUDGET)


def choose(config: Path, tmp_path: Path, gib: float, *words: str) -> tuple[int, tuple[str, ...]]:
    """Return the level, and what is said, on a node of two accelerators of this size; 0: it is not known."""
    nodes = tmp_path / "nodes.toml"
    size = f"accelerator_memory_gib = {gib}" if gib else ""
    nodes.write_text(f'[[nodes]]\nname = "one"\naccelerators = 2\n{size}\n')
    parsed = load_config(config, GrpoConfig, [*SETTLED, *ON_ACCELERATORS, *words])
    placement = place_run(parsed, ClusterView.named(str(nodes), parsed.devices.values()))
    settled, _, said = choose_parking(parsed, estimate_if_known(parsed, None, placement), placement)
    return settled.cluster.sleep_level, said


def test_memory_stays_where_all_roles_of_a_device_fit(config: Path, tmp_path: Path) -> None:
    level, said = choose(config, tmp_path, 80, *COLOCATED)
    assert level == 0
    assert said[0].startswith("cluster.sleep_level = 0: nothing is parked (the roles of a device need ")
    assert said[0].endswith(" of its 80 GiB together)")


TRAINER = {"weights": 2, "optimizer": 4, "activations": 2}
ENGINE = {"weights": 1, "KV cache": 3}


@pytest.mark.parametrize(
    ("gib", "trainer", "engine", "levels", "parked"),
    [
        (12, TRAINER, ENGINE, (0, 0), "nothing is parked"),
        (11, TRAINER, ENGINE, (1, 1), "engines park KV cache, the trainer all but its weights"),
        (9, TRAINER, ENGINE, (1, 1), "engines park KV cache, the trainer all but its weights"),
        (8, TRAINER, ENGINE, (2, 1), "engines park KV cache and weights, the trainer all but its weights"),
        (9, TRAINER, {"weights": 1, "KV cache": 7}, (1, 2), "engines park KV cache, the trainer all its memory"),
        (8, TRAINER, {"weights": 1, "KV cache": 6}, (2, 2), "engines park KV cache and weights, the trainer all its"),
        (8, {**TRAINER, "critic": 3}, ENGINE, (2, 2), "engines park KV cache and weights, the trainer all its memory"),
        (5, TRAINER, {"weights": 1, "KV cache": 6}, (2, 2), "engines park KV cache and weights, the trainer all its"),
    ],
)
def test_the_least_is_parked_that_makes_room_in_each_turn(
    config: Path,
    tmp_path: Path,
    gib: float,
    trainer: dict[str, int],
    engine: dict[str, int],
    levels: tuple[int, int],
    parked: str,
) -> None:
    """An engine and a rank of the trainer on the one accelerator, by numbers that are made up: both in full, one and
    a half, and just one."""
    for backend in ("torch", "vllm"):
        parsed = load_config(
            config, GrpoConfig, [*SETTLED, *ON_ACCELERATORS, *COLOCATED, f"--rollout.backend={backend}"]
        )
        shares = {
            role: MemoryEstimate({name: size << 30 for name, size in parts.items()})
            for role, parts in {"trainer": trainer, "rollout": engine}.items()
        }
        memory = RunMemory(read_shape(parsed.model.path), shares, {}, {})
        nodes = tmp_path / "nodes.toml"
        size = gib / FILLED_SHARE + 0.01
        nodes.write_text(f'[[nodes]]\nname = "one"\naccelerators = 1\naccelerator_memory_gib = {size}\n')
        placement = place_run(parsed, ClusterView.named(str(nodes), ["auto"]))
        assert {rank.device for rank in placement.plan.ranks} == {0}
        settled, parking, (said,) = choose_parking(parsed, memory, placement)
        assert settled.cluster.sleep_level == parking.engines
        in_main = with_parked(memory, parking, placement).roles["trainer"].main_bytes >> 30
        assert in_main == (0, 4, 6 + trainer.get("critic", 0))[parking.trainer]
        if backend == "torch":
            assert (parking.engines, parking.trainer) == levels
            assert said.startswith(f"cluster.sleep_level = {levels[0]}: {parked}")
            if (gib, engine) == (9, ENGINE):
                assert said.endswith(
                    "(of 10.6 GiB a device then needs 9 GiB in the trainer's turn, 6 GiB in the engines')"
                )
        else:  # whose level 1 copies the weights, which come anew
            assert (parking.engines, parking.trainer) == (2 * bool(levels[0]), levels[1])


@pytest.mark.parametrize(
    ("words", "gib", "level", "reason"),
    [
        (COLOCATED, 0, 2, "the memory of the devices is not known"),
        ((*COLOCATED, "--engine.device=cpu", "--rollout.device=cpu"), 80, 2, "trains on CPUs"),
    ],
)
def test_everything_goes_where_nothing_is_known(
    config: Path, tmp_path: Path, words: tuple[str, ...], gib: float, level: int, reason: str
) -> None:
    parked = "engines park KV cache and weights, the trainer all its memory"
    assert choose(config, tmp_path, gib, *words) == (level, (f"cluster.sleep_level = {level}: {parked} ({reason})",))


def test_what_is_asked_for_is_done_and_without_turns_nothing_is_chosen(config: Path, tmp_path: Path) -> None:
    assert choose(config, tmp_path, 80, *COLOCATED, "--cluster.sleep_level=1") == (1, ())
    assert choose(config, tmp_path, 80) == (-1, ())

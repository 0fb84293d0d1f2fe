"""Colocated roles give back no more than the memory of a device does not hold."""

from pathlib import Path

import pytest

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._preflight.estimates import estimate_if_known
from grpo_async_app._preflight.placement import place_run
from grpo_async_app._preflight.turns import FILLED_SHARE, choose_sleep_level
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
    settled, said = choose_sleep_level(parsed, estimate_if_known(parsed, None, placement), placement)
    return settled.cluster.sleep_level, said


def test_memory_stays_where_all_roles_of_a_device_fit(config: Path, tmp_path: Path) -> None:
    level, said = choose(config, tmp_path, 80, *COLOCATED)
    assert level == 0
    assert said[0].startswith("cluster.sleep_level = 0 (the roles of a device need ")
    assert said[0].endswith(" of its 80 GiB together)")


def test_all_roles_of_a_device_are_counted(config: Path, tmp_path: Path) -> None:
    """An engine and a rank of the trainer on the one accelerator, by numbers that are made up."""
    nodes = tmp_path / "nodes.toml"
    parsed = load_config(config, GrpoConfig, [*SETTLED, *ON_ACCELERATORS, *COLOCATED])

    def level(gib: float) -> int:
        nodes.write_text(f'[[nodes]]\nname = "one"\naccelerators = 1\naccelerator_memory_gib = {gib}\n')
        placement = place_run(parsed, ClusterView.named(str(nodes), ["auto"]))
        assert {rank.device for rank in placement.plan.ranks} == {0}
        return choose_sleep_level(parsed, memory, placement)[0].cluster.sleep_level

    shares = {"trainer": MemoryEstimate({"weights": 2 << 30}), "rollout": MemoryEstimate({"weights": 3 << 30})}
    memory = RunMemory(read_shape(parsed.model.path), shares, {}, {})
    assert level(5 / FILLED_SHARE + 0.01) == 0
    assert level(5 / FILLED_SHARE - 0.01) == 2


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
    assert choose(config, tmp_path, gib, *words) == (level, (f"cluster.sleep_level = {level} ({reason})",))


def test_what_is_asked_for_is_done_and_without_turns_nothing_is_chosen(config: Path, tmp_path: Path) -> None:
    assert choose(config, tmp_path, 80, *COLOCATED, "--cluster.sleep_level=1") == (1, ())
    assert choose(config, tmp_path, 80) == (-1, ())

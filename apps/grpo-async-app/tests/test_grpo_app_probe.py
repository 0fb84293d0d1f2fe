"""`doctor --probe-engines` starts engines wider and wider, and says at which width and on which node that stops."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest
import wide_standin

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._run.engine_probe import ProbeOutcome, _WidthProbe, widths_to_probe
from offbeat_actors import Launcher
from offbeat_core import PeerFailedError, load_config
from offbeat_placement import ClusterView, Node, Plan, RankGroup
from offbeat_testing import CommandLine, ray_nodes


def probe(config: Path, *words: str, env: dict[str, str] = {}) -> subprocess.CompletedProcess[str]:  # noqa: B006  never changed
    """The command in a process of its own: it is to leave none behind."""
    line = [sys.executable, "-m", "grpo_async_app", "doctor", "--probe-engines", str(config), *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    return subprocess.run(line, capture_output=True, text=True, timeout=500, env=env)


def left_over() -> list[str]:
    """Command lines of processes of a wide engine, or of a role of a probe."""
    listed = subprocess.run(["ps", "-eo", "args="], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in listed if wide_standin.SLEEPER in line or " probe0-0" in line or " probe1-0" in line]


def test_widths_go_up_in_powers_of_two_to_that_of_the_configuration() -> None:
    assert [widths_to_probe(width) for width in (1, 2, 3, 8, 12)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4, 8],
        [1, 2, 4, 8, 12],
    ]


@pytest.mark.timeout(200)
def test_the_embedded_engine_starts_alone_and_says_that_it_has_no_other_width(
    config: Path, command: CommandLine
) -> None:
    ended = command("doctor", "--probe-engines", config)
    assert ended.code == 0, ended.err
    assert "tensor parallel 1 on " in ended.out
    assert "engines start at every width up to tensor parallel 1" in ended.out
    ended = command("doctor", "--probe-engines", config, "--rollout.tensor_parallel=4")
    assert ended.code == 2
    assert f"tensor parallel 1 on {os.uname().nodename}: ready in " in ended.out
    assert f"error: stops at tensor parallel 2 on {os.uname().nodename}: rollout-torch runs on one device" in ended.err
    assert "tensor parallel 4" not in ended.out
    assert "Traceback" not in ended.err


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_an_engine_that_is_never_ready_is_named_within_its_deadline_and_leaves_no_process(
    config: Path, tmp_path: Path
) -> None:
    env = {**wide_standin.register(tmp_path), wide_standin.HANGS_AT: "2"}
    words = ("--rollout.backend=wide", "--rollout.tensor_parallel=2", "--cluster.start_timeout_s=25")
    ended = probe(config, *words, env=env)
    assert ended.returncode == 4, ended.stderr
    assert "  tensor parallel 1 on " in ended.stdout
    assert f"stops at tensor parallel 2 on {os.uname().nodename}: starting probe0-0: waited 25 s" in ended.stderr
    assert "rank 0 waits for rank 1" in ended.stderr
    assert left_over() == []


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_an_engine_that_dies_is_named_with_its_last_words(config: Path, tmp_path: Path) -> None:
    env = {**wide_standin.register(tmp_path), wide_standin.DIES_AT: "2"}
    ended = probe(config, "--rollout.backend=wide", "--rollout.tensor_parallel=2", env=env)
    assert ended.returncode == 3, ended.stderr
    assert f"stops at tensor parallel 2 on {os.uname().nodename}: its process exited with code 7" in ended.stderr
    assert "NCCL WARN no route to the other ranks" in ended.stderr


@pytest.mark.asyncio
async def test_the_nodes_that_an_engine_spans_have_room_for_it(config: Path, tmp_path: Path) -> None:
    words = ["--rollout.device=cuda", "--rollout.tensor_parallel=16", "--cluster.spans_nodes=true"]
    nodes = [Node(name=f"node-{n}", free={"GPU": tuple(range(size))}) for n, size in enumerate((8, 8, 2))]
    launcher = cast("Launcher", PlacesNothing())
    found: list[ProbeOutcome] = []
    view = ClusterView(nodes=tuple(nodes), reserves=True)
    settings = load_config(config, GrpoConfig, words)
    await _WidthProbe(settings, launcher, view, tmp_path, 16, found.append).run()
    assert [(each.node, each.no_room) for each in found] == [("node-0+node-1", ("node-2",))]


class PlacesNothing:
    """A launcher whose cluster is gone by the time that it is asked."""

    async def place(self, plan: Plan, groups: Sequence[RankGroup]) -> None:
        raise PeerFailedError("cluster", "it is gone")


def test_settings_without_a_probe_are_refused(command: CommandLine) -> None:
    ended = command("doctor", "--rollout.tensor_parallel=4")
    assert ended.code == 2
    assert "with a FILE only" in ended.err


def on_accelerators(address: str, width: int) -> list[str]:
    cluster = ["--cluster.launcher=ray", f"--cluster.address={address}", "--cluster.connect_timeout_s=300"]
    engine = ["--rollout.device=abacus", "--rollout.backend=wide", f"--rollout.tensor_parallel={width}"]
    return [*cluster, *engine, f'--cluster.forward_env=["{wide_standin.HANGS_AT}"]']


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_width_that_no_node_holds_is_where_it_stops_on_a_cluster(
    two_nodes: str, config: Path, tmp_path: Path
) -> None:
    ended = probe(config, *on_accelerators(two_nodes, 4), env=wide_standin.register(tmp_path))
    assert ended.returncode == 2, ended.stderr
    for width in (1, 2):
        for node in ("127.0.0.2", "127.0.0.3"):
            assert f"tensor parallel {width} on {node}: ready in " in ended.stdout
    assert "error: stops at tensor parallel 4: " in ended.stderr
    assert "2 of 2 GPU free" in ended.stderr
    assert left_over() == []


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_node_of_an_engine_that_is_never_ready_is_named_on_a_cluster(
    two_nodes: str, config: Path, tmp_path: Path
) -> None:
    env = {**wide_standin.register(tmp_path), wide_standin.HANGS_AT: "2"}
    ended = probe(config, *on_accelerators(two_nodes, 2), "--cluster.start_timeout_s=40", env=env)
    assert ended.returncode == 4, ended.stderr
    for node in ("127.0.0.2", "127.0.0.3"):
        assert f"tensor parallel 1 on {node}: ready in " in ended.stdout
        assert f"stops at tensor parallel 2 on {node}: starting probe" in ended.stderr
    assert ended.stderr.count("rank 0 waits for rank 1") == 2
    assert left_over() == []


@pytest.fixture(scope="session")
def two_nodes() -> Iterator[str]:
    """A Ray cluster of a head without accelerators and two nodes with two each, in Ray's books: its address."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'offbeat-actors[ray]'")
    with ray_nodes(2, num_gpus=2, num_cpus=4) as cluster:
        yield cluster.address

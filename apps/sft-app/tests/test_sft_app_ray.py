"""Ranks on the nodes of a Ray cluster: one key makes the difference, and the run is the same."""

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from sft_runs import RANKS, WORDS, assert_same

from offbeat_core import ConfigError, PlacementError, load_config
from offbeat_placement import grid_nodes
from offbeat_testing import CommandLine, RayNodes, RunningCommand, ray_nodes
from sft_app._config import SftConfig
from sft_app._preflight import check_run

MARK = "SFT_APP_TEST"
ON_RAY = [
    "--cluster.launcher=ray",
    "--cluster.connect_timeout_s=300",  # Ray's processes take their time on a busy machine
    "--cluster.start_timeout_s=400",
    f'--cluster.forward_env=["{MARK}"]',
]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_one_key_trains_on_ray_as_one_process_does(command: CommandLine, config: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'offbeat-actors[ray]'")
    check_training(command, config, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_rank_on_each_of_two_nodes_trains_as_one_process_does(
    nodes: RayNodes, command: CommandLine, config: Path, tmp_path: Path
) -> None:
    address = f"--cluster.address={nodes.address}"
    with RunningCommand("sft_app", "plan", config, *RANKS, *ON_RAY, address, "--cluster=live", "--json") as process:
        assert process.wait(300) == 0, process.output
        ranks = json.loads(process.output[process.output.index("{") :])["ranks"]
    assert [rank["node"] for rank in ranks] == ["127.0.0.2", "127.0.0.3"]
    check_training(command, config, tmp_path, address)
    with RunningCommand("sft_app", "eval", tmp_path / "run") as process:
        assert process.wait(300) == 0, process.output
        assert "checkpoint of update 2: loss" in process.output


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_rank_that_is_killed_on_its_node_is_started_again_and_nothing_is_lost(
    nodes: RayNodes, command: CommandLine, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MARK, str(tmp_path))
    run, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    words = [*WORDS, "--data.epochs=15", "--checkpoint.every=3"]  # 38 updates
    address = f"--cluster.address={nodes.address}"
    with RunningCommand("sft_app", "train", config, "--out", run, *words, *RANKS, *ON_RAY, address) as process:
        process.wait_until((run / "checkpoints" / "step-000003").is_dir, "a checkpoint", 500)
        os.kill(role_process("trainer-1", tmp_path), signal.SIGKILL)
        assert process.wait(500) == 0, process.output
        assert "trainer-1 failed: its process on 127.0.0.3 was killed by SIGKILL" in process.output
    assert command("train", config, "--out", undisturbed, *words).code == 0
    assert_same(run, undisturbed)


@pytest.fixture
def two_nodes_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the Ray cluster has; this machine has no such devices."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'offbeat-actors[ray]'")
    monkeypatch.setattr("offbeat_actors.ray.RayLauncher.nodes", lambda _: grid_nodes(2, 4))


@pytest.mark.usefixtures("two_nodes_of_four")
def test_ranks_are_placed_on_nodes_whose_devices_this_machine_need_not_have(config: Path) -> None:
    words = ["--cluster.launcher=ray", "--engine.num_ranks=8", "--engine.device=cuda"]
    for options in ("{}", "{tensor_parallel = 2}"):
        placement = check_run(load_config(config, SftConfig, [*words, f"--engine.options={options}"])).placement
        places = [(rank.rank, rank.node, rank.device) for rank in placement.plan.ranks]
        assert places == [(rank, f"node-{rank // 4}", rank % 4) for rank in range(8)]


@pytest.mark.usefixtures("two_nodes_of_four")
@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        (["--engine.num_ranks=16"], PlacementError, "16 GPU wanted, 8 free"),
        (["--engine.num_ranks=8", "--engine.device=cuda:0"], ConfigError, "name the kind alone (cuda)"),
        (["--engine.device=cudo"], ConfigError, "engine.device = 'cudo': no such kind of device is known"),
        (["--cluster.num_nodes=2"], ConfigError, "go together: set both, or neither"),
    ],
)
def test_what_does_not_fit_the_cluster_is_refused_by_name(
    config: Path, words: list[str], kind: type[Exception], said: str
) -> None:
    loaded = load_config(config, SftConfig, ["--cluster.launcher=ray", "--engine.device=cuda", *words])
    with pytest.raises(kind, match=re.escape(said)):
        check_run(loaded)


def check_training(command: CommandLine, config: Path, folder: Path, *words: str) -> None:
    """Two ranks on Ray train as one process here does."""
    run, undisturbed = folder / "run", folder / "undisturbed"
    shared = [*WORDS, "--engine.max_updates=2"]
    with RunningCommand("sft_app", "train", config, "--out", run, *shared, *RANKS, *ON_RAY, *words) as process:
        assert process.wait(500) == 0, process.output
    assert {path.stem for path in (run / "logs").glob("*.log")} == {"trainer-0", "trainer-1"}
    assert command("train", config, "--out", undisturbed, *shared).code == 0
    assert_same(run, undisturbed)


def role_process(role: str, mark: Path) -> int:
    """Process id of a role of the run that was started with this mark, on whatever node of this machine."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            environment = (folder / "environ").read_bytes().split(b"\0")
            if (
                b"offbeat_actors._server" in words
                and role.encode() in words
                and f"{MARK}={mark}".encode() in environment
            ):
                return int(folder.name)
    raise AssertionError(f"no process of {role}")


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """A Ray cluster of a head that has room for nothing, and two nodes with an address and one CPU each."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'offbeat-actors[ray]'")
    with ray_nodes(2, num_gpus=0, head_cpus=0) as cluster:
        yield cluster


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_cluster_without_its_head_is_named_and_the_run_is_resumed_on_another(config: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'offbeat-actors[ray]'")
    run, words = tmp_path / "run", ["--data.epochs=400", "--checkpoint.every=3", "--cluster.silent_after_s=5"]
    with RunningCommand("sft_app", "train", config, "--out", run, *RANKS, *ON_RAY, *words) as process:
        process.wait_until(lambda: len(list((run / "checkpoints").glob("step-*"))) > 1, "2 checkpoints", 600)
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in process.descendants()}
        [head] = [pid for pid, command in commands.items() if "gcs_server" in command]
        os.kill(head, signal.SIGKILL)
        assert process.wait(120) == 3, process.output
        assert "the head of the Ray cluster failed: it has answered nothing at 127.0.0.1:" in process.output
        assert f"resume with: sft-app resume {run}" in process.output
        assert "Traceback" not in process.output
    last = max(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))
    with RunningCommand("sft_app", "resume", run, f"--engine.max_updates={last + 2}") as process:
        assert process.wait(600) == 0, process.output

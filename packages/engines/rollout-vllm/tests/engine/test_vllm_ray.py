"""vLLM of two ranks on the nodes of a Ray cluster: weights, images, sleep, a killed process, a colocated run.

The cluster is on this machine, and each of its nodes has an address and two CPUs of its own. Roles are started as in a
run: a node agent, which is a Ray actor, runs the role's process, and vLLM's two workers are children of that.
"""

import asyncio
import json
import os
import signal
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from image_checks import Trainer, request

from grpo_async_app._config.sections import GrpoConfig
from offbeat_actors import ClusterConfig, RoleSpec
from offbeat_actors.ray import RayLauncher, cluster_nodes
from offbeat_core import Completion, EngineHealth, PeerFailedError, RoleName, WeightProof, parse_config
from offbeat_placement import RankGroup, plan_placement
from offbeat_run import read_metrics
from offbeat_testing import RunningCommand, changed_weights, ray_nodes, tiny_model, tiny_vision_model
from offbeat_weightsync import BucketPlan, describe_tensors, new_address, open_sender

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]  # each start of two ranks takes a minute, or three if busy

SCHEMAS = Path(__file__).parent / "torchvision_schemas"
START_S = 400.0
CALL_S = 120.0
SEEN_WITHIN_S = 60.0
"""For the end of a worker to reach the caller that waits for a sample: vLLM looks after its workers itself."""


@pytest.fixture(scope="module")
def nodes():
    """host:port of the head of a cluster of two nodes with two CPUs each; the head has one.

    Roles get the folder that declares torchvision's operators from the driver. Ray's own processes do without it: each
    would import torch while it starts, and Ray gives its nodes 30 s.
    """
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path != str(SCHEMAS)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        with ray_nodes(2, num_cpus=2, num_gpus=0, head_cpus=1) as cluster:
            patch.undo()
            yield cluster.address


def spec_of(folder: Path, logs: Path) -> RoleSpec:
    """A rollout role as the application makes it, two ranks wide."""
    config = parse_config(
        f"""
[model]
path = "{folder}"
[data]
path = ""
[rollout]
backend = "vllm"
dtype = "float32"
tensor_parallel = 2
max_model_len = 512
max_running = 8
[async]
partial_rollout = true
""",
        GrpoConfig,
        (),
        name="engine",
    )
    kwargs = {"config": config, "role": RoleName("rollout"), "model_path": str(folder), "num_threads": 2}
    target = "grpo_async_app._roles.rollout:RolloutRole"
    env = {"PYTHONPATH": os.environ["PYTHONPATH"]}
    return RoleSpec(RoleName("rollout"), target, kwargs, env=env, num_threads=2, log_path=logs / "rollout-0.log")


@asynccontextmanager
async def placed(address: str):
    """A launcher that has reserved two CPUs of one node for rollout-0."""
    config = ClusterConfig(launcher="ray", address=address, connect_timeout_s=300, start_timeout_s=START_S)
    groups = [RankGroup(role="rollout", tensor_parallel=2, accelerator="", cpus_per_rank=1, process_per_replica=True)]
    async with RayLauncher("vllm", config) as launcher:
        await launcher.place(plan_placement(cluster_nodes(config), groups), groups)
        yield launcher


async def generate(engine, one):
    return await engine.call("generate", one, returns=list[Completion], deadline_s=CALL_S)


async def check_images(engine, trainer):
    for number in (0, 1, 3):
        one = request(*trainer.prompt(number), str(number), num_samples=2)
        for completion in await generate(engine, one):
            assert trainer.error(one, completion) < 1e-3


async def check_update(engine, trainer, version):
    """While it sleeps without weights it is woken for new ones, which come over TCP; then it samples from them."""
    weights = changed_weights(trainer.model, seed=version)
    await engine.call("pause", "wait", deadline_s=CALL_S)
    await engine.call("sleep", 2, returns=int, deadline_s=CALL_S)
    await engine.call("wake", ["weights"], returns=int, deadline_s=CALL_S)
    plan = BucketPlan.build(describe_tensors(weights))
    with open_sender(new_address("127.0.0.1"), plan) as sender:
        sending = asyncio.to_thread(sender.send, weights, version, 1, deadline_s=CALL_S)
        args = ([sender.address], version, CALL_S)
        taking = engine.call("pull_weights", *args, returns=WeightProof, deadline_s=CALL_S)
        [proof], taken = await asyncio.gather(sending, taking)
    assert taken.version == proof.version == version
    await engine.call("wake", ["kv_cache"], returns=int, deadline_s=CALL_S)
    await engine.call("resume", deadline_s=CALL_S)
    one = request(*trainer.prompt(1), f"v{version}", num_samples=2)
    for completion in await generate(engine, one):
        assert [segment.version for segment in completion.segments] == [version]
        assert trainer.error(one, completion) < 1e-3


async def check_killed_worker(engine, trainer):
    """A sample in flight is answered with an error that names the engine, long before the deadline of its call."""
    children = {child: " ".join(child.cmdline()) for child in psutil.Process(engine.pid).children(recursive=True)}
    workers = [child for child, line in children.items() if "VLLM" in line or "spawn_main" in line]
    assert len(workers) == 2, children
    sampling = asyncio.create_task(generate(engine, request(*trainer.prompt(0), "killed", max_tokens=480)))
    while not (await engine.call("health", returns=EngineHealth, deadline_s=CALL_S)).num_running:
        await asyncio.sleep(0.01)
    workers[1].kill()
    async with asyncio.timeout(SEEN_WITHIN_S):
        with pytest.raises(PeerFailedError, match="vLLM failed"):
            await sampling
    return workers


def test_two_ranks_on_a_node_take_weights_and_images_and_start_again_after_a_kill(nodes, tmp_path):
    folder = tiny_vision_model(tmp_path / "model", "qwen3_vl")
    trainer = Trainer(folder)

    async def scenario():
        async with placed(nodes) as launcher:
            engine = await launcher.start(spec_of(folder, tmp_path))
            assert engine.address in ("127.0.0.2", "127.0.0.3")
            await check_images(engine, trainer)
            for version in (1, 2):
                await check_update(engine, trainer, version)
            workers = await check_killed_worker(engine, trainer)
            await engine.destroy()
            # They were killed with it; the kernel takes a moment to free what they hold.
            assert not psutil.wait_procs(workers, timeout=SEEN_WITHIN_S)[1]
            again = await launcher.start(spec_of(folder, tmp_path))
            assert (again.address, again.pid != engine.pid) == (engine.address, True)
            await check_images(again, Trainer(folder))

    asyncio.run(scenario())


def test_a_colocated_run_on_two_nodes_goes_on_after_its_engine_was_killed(nodes, tmp_path):
    """The trainer is on one node and vLLM on another; they take turns, and both sides compute the same numbers."""
    model, run = tiny_model(tmp_path / "model"), tmp_path / "run"
    rows = [{"prompt": f"what is {n} and one?", "answer": str(n + 1)} for n in range(24)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "ray.toml").write_text(f"""
[model]
path = "{model}"
[data]
path = "{tmp_path}/sums.jsonl"
max_prompt_tokens = 64
[reward]
name = "grpo_async_app._shrink_reward:variety"
[rollout]
backend = "vllm"
dtype = "float32"
tensor_parallel = 2
samples_per_prompt = 2
max_tokens = 8
max_model_len = 96
max_running = 8
[engine]
learning_rate = 1e-3
[algorithm]
filter_groups = false
correction = "token_tis"
[async]
mini_batch_size = 4
staleness_threshold = 0
[cluster]
launcher = "ray"
address = "{nodes}"
forward_env = ["PYTHONPATH"]
connect_timeout_s = 300
start_timeout_s = {START_S}
turn_timeout_s = 300
colocate = true
[eval]
every_updates = 0
""")
    with RunningCommand("grpo_async_app", "train", tmp_path / "ray.toml", "--out", run) as process:
        first = engine_once(process, run, lambda role: (role["version"] or 0) >= 1)
        os.kill(first["pid"], signal.SIGKILL)
        again = engine_once(process, run, lambda role: role["restarts"] == 1 and role["version"] is not None)
        assert process.wait(deadline_s=600) == 0, process.output
        assert f"its process on {first['node']} was killed by SIGKILL" in process.output
    assert (again["pid"] != first["pid"], again["node"]) == (True, first["node"])
    places = {role["role"]: role["node"] for role in json.loads((run / "places.json").read_text())["roles"]}
    assert places["rollout-0"] in ("127.0.0.2", "127.0.0.3")
    assert places["trainer-0"] != places["rollout-0"]
    lines = [line.values for line in read_metrics(run / "metrics.jsonl") if "train/reward" in line.values]
    assert len(lines) == 6
    for values in lines:
        assert abs(values["correction/ratio_max"] - 1) < 1e-3
        assert abs(values["correction/ratio_min"] - 1) < 1e-3
        assert values["engine/grad_norm"] > 0


def engine_once(process, run, seen):
    """Return the entry of rollout-0 in places.json once it satisfies `seen`."""
    found = []

    def look():
        if (run / "places.json").exists():
            roles = json.loads((run / "places.json").read_text())["roles"]
            found[:] = [role for role in roles if role["role"] == "rollout-0"]
        return bool(found) and seen(found[0])

    process.wait_until(look, "rollout-0", deadline_s=600)
    return found[0]

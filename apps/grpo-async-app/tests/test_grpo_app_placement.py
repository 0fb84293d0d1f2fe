"""`plan` on other clusters: both parameter sets of incident D, a wrong cluster, and the recipe that is made to fit."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_async_app._commands.plan import GrpoPlanner
from grpo_async_app._config.resolved import resolve
from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._fleet.role_specs import plan_threads, share_cpus
from grpo_async_app._preflight.estimates import BatchArithmetic
from grpo_async_app._preflight.placement import place_run, request_resources
from grpo_async_app._preflight.preflight import check_run
from grpo_async_app._preflight.settings import check_settings
from offbeat_core import ConfigError, PlacementError, load_config, parse_config
from offbeat_placement import ClusterView, SettingValue, fit_settings, grid_nodes
from offbeat_recipes import change_recipe
from offbeat_recipes._recipe_text import with_settings
from offbeat_testing import CommandLine, large_model_configs, ray_nodes

AND_THEN_RAY = """
import ray
from grpo_async_app._cli import main
try:
    main()
finally:
    print("connected to Ray:", ray.is_initialized(), flush=True)
"""
OF_SMALL_LAG = """
staleness_threshold = 0.1
trigger_parameter_sync_step = 4
"""
OF_LARGE_LAG = """
staleness_threshold = 10
trigger_parameter_sync_step = 5
"""

SERVER = 'server = "engine.example:8000"'
BUDGET = "--engine.max_tokens_per_microbatch=8192"  # which a run settles by memory
IN_TURN = (
    "--async.staleness_threshold=0",
    "--async.trigger_parameter_sync_step=1",
    "--async.partial_rollout=false",
)


def recipe(folder: Path, lag: str = OF_SMALL_LAG, cluster: str = "num_nodes = 2\naccelerators_per_node = 16") -> Path:
    """16 + 16 accelerators on nodes of 16, as the recipe of the incident asks for."""
    model = large_model_configs(folder / "models") / "Qwen3-VL-8B-Instruct"
    path = folder / "geo3k.toml"
    path.write_text(f"""
[model]
path = "{model}"
[data]
path = "geo3k.jsonl"
max_prompt_tokens = 1024
[reward]
name = "number_match"
[rollout]
num_engines = 4
tensor_parallel = 4
samples_per_prompt = 4
max_tokens = 2048
max_model_len = 3072
dtype = "bfloat16"
[engine]
num_ranks = 16
learning_rate = 1e-6
dtype = "bfloat16"
activation_checkpointing = true
[algorithm]
correction_form = "bypass"
[async]
mini_batch_size = 64
require_batches = 2
partial_rollout = true
{lag}
[cluster]
{cluster}   # as where it was written
""")
    return path


@pytest.mark.parametrize("lag", [OF_SMALL_LAG, OF_LARGE_LAG], ids=["small lag", "large lag"])
def test_a_recipe_for_nodes_of_sixteen_is_refused_on_nodes_of_eight(
    command: CommandLine, tmp_path: Path, lag: str
) -> None:
    ended = command("plan", recipe(tmp_path, lag), "--cluster", "4x8")
    assert ended.code == 2
    assert "2 nodes × 16 GPU asked for" in ended.err
    assert "node-0 … node-3 (4): 8 of 8 GPU free, 8 short" in ended.err
    assert "nodes have 8: ask for 4 nodes × 8 (cluster.num_nodes = 4, cluster.accelerators_per_node = 8)" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("lag", [OF_SMALL_LAG, OF_LARGE_LAG], ids=["small lag", "large lag"])
def test_the_recipe_made_to_fit_is_the_recipe_with_two_numbers_changed(
    command: CommandLine, tmp_path: Path, lag: str
) -> None:
    written, fitted = recipe(tmp_path, lag), tmp_path / "fitted.toml"
    ended = command("plan", written, "--cluster", "4x8", "--fit", fitted)
    assert ended.code == 0, ended.err
    before, [first, _, *after] = written.read_text().splitlines(), fitted.read_text().splitlines()
    assert first == "# geo3k.toml made to fit another cluster: where words and settings differ, the settings hold."
    changed = [(old, " ".join(new.split())) for old, new in zip(before, after, strict=True) if old != new]
    assert changed == [
        ("num_nodes = 2", "num_nodes = 4 # was 2"),
        ("accelerators_per_node = 16   # as where it was written", "accelerators_per_node = 8 # was 16"),
    ]
    ended = command("plan", fitted, "--cluster", "4x8")
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    assert "node-1  T8   T9   T10  T11  T12  T13  T14  T15" in lines
    assert "node-3  R2.0 R2.1 R2.2 R2.3 R3.0 R3.1 R3.2 R3.3" in lines
    text = " ".join(ended.out.split())
    assert "8.77 B parameters, 576 M of them for vision" in text
    prompts = 563 if lag == OF_SMALL_LAG else 7040
    assert f"at most {prompts} prompts ({4 * prompts} samples) started between two syncs" in text


def test_a_cluster_that_is_too_small_is_named_with_what_would_fit(command: CommandLine, tmp_path: Path) -> None:
    ended = command("plan", recipe(tmp_path, cluster=""), "--cluster", "2x8")
    assert ended.code == 2
    assert "32 GPU wanted, 16 free" in ended.err
    assert "rollout on the devices of trainer (cluster.colocate)" in ended.err
    assert "2 more nodes with 8 GPU free" in ended.err
    fitted = tmp_path / "fitted.toml"
    assert command("plan", recipe(tmp_path, cluster=""), "--cluster", "2x8", "--fit", fitted).code == 0
    config = load_config(fitted, GrpoConfig)
    assert config.cluster.colocate
    check_settings(resolve(config))  # roles that take turns train synchronously, and the recipe asked for lag
    assert config.async_.mode == "on-policy pipeline"
    before = recipe(tmp_path, cluster="").read_text().splitlines()
    changed = [" ".join(line.split()) for line in fitted.read_text().splitlines()[2:] if line not in before]
    assert sorted(changed) == [
        "colocate = true",
        "partial_rollout = false # was true",
        "staleness_threshold = 0 # was 0.1",
        "trigger_parameter_sync_step = 1 # was 4",
    ]


def test_roles_that_take_turns_and_a_lag_are_refused_for_another_cluster_too(
    command: CommandLine, tmp_path: Path
) -> None:
    ended = command("plan", recipe(tmp_path, cluster="colocate = true"), "--cluster", "2x8")
    assert ended.code == 2
    assert "cluster.colocate = true: trainer and engines take turns" in ended.err


def test_the_plan_as_json_holds_every_rank(command: CommandLine, tmp_path: Path) -> None:
    ended = command("plan", recipe(tmp_path, cluster=""), "--cluster", "4x8", "--json")
    plan = json.loads(ended.out)
    assert len(plan["ranks"]) == 32
    assert plan["ranks"][-1]["node"] == "node-3"
    assert [driver["node"] for driver in plan["drivers"] if driver["role"] == "rollout"] == ["node-2"] * 2 + [
        "node-3"
    ] * 2
    assert plan["batch"]["max_admitted"] == 563
    assert plan["memory_bytes"]["trainer"]["weights"] == 8_767_123_696 * 4 // 16


def test_too_little_memory_is_a_notice(command: CommandLine, tmp_path: Path) -> None:
    nodes = tmp_path / "nodes.toml"
    nodes.write_text('[[nodes]]\nname = "small"\ncount = 4\naccelerators = 8\naccelerator_memory_gib = 12\n')
    ended = command("plan", recipe(tmp_path, cluster=""), "--cluster", nodes)
    assert "a trainer rank needs about 28.3 GiB and its device has 12 GiB" in " ".join(ended.out.split())


def test_a_reward_model_and_a_teacher_that_shares_its_devices_are_estimated(
    command: CommandLine, tmp_path: Path
) -> None:
    nodes = tmp_path / "nodes.toml"
    nodes.write_text('[[nodes]]\nname = "large"\ncount = 5\naccelerators = 8\naccelerator_memory_gib = 28.5\n')
    models = large_model_configs(tmp_path / "others")
    table = f'{{path = "{models}/Qwen3-8B", num_replicas = 2, max_batch = 1, max_tokens = 1024}}'
    scored = ["--reward.name=reward_model", f"--reward.reward_model={table}"]
    ended = command("plan", recipe(tmp_path, cluster=""), "--cluster", nodes, *scored, "--json")
    assert ended.code == 0, ended.err
    held = json.loads(ended.out)["memory_bytes"]["reward_model"]
    assert held["weights"] == 4 * (8_190_735_360 - 151_936 * 4096)  # in float32, without the rows that predict tokens
    taught = [f"--teacher.path={models}/Qwen3-8B", "--teacher.colocate=true", "--teacher.num_replicas=16"]
    taught += ["--teacher.dtype=bfloat16", "--algorithm.distillation_coefficient=1"]
    words = ["--cluster.colocate=true", "--rollout.dtype=float32", *IN_TURN, *taught]
    ended = command("plan", recipe(tmp_path, cluster=""), "--cluster", nodes, *words, *scored)
    assert ended.code == 0, ended.err
    text = " ".join(ended.out.split())
    assert "a reward_model rank needs about 28.6 GiB and its device has 28.5 GiB" in text
    assert "a trainer rank needs" in text
    assert text.count("with the teacher rank beside it") == 2
    assert "or teacher.colocate = false" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        # vLLM takes its share, whatever its samples need; with less than weights and one sample it does not start.
        (
            ["--rollout.backend=vllm", "--rollout.options={gpu_memory_utilization = 0.6}"],
            "rollout memory 48 GiB a rank",
        ),
        (
            ["--rollout.backend=vllm", "--rollout.options={gpu_memory_utilization = 0.4}", "--rollout.dtype=float32"],
            "may take 32 GiB of the 80 GiB of its device: a larger rollout.tensor_parallel, a smaller "
            "rollout.max_model_len, or a larger gpu_memory_utilization in rollout.options",
        ),
        # Where it takes turns with the trainer, vLLM leaves room for what a sleeping trainer keeps.
        (["--rollout.backend=vllm"], "rollout memory 73.6 GiB a rank"),
        (["--rollout.backend=vllm", "--cluster.colocate=true", *IN_TURN], "rollout memory 68 GiB a rank"),
        # The embedded engine takes what its samples need, up to a quarter of the device, or what is set.
        (["--rollout.backend=torch"], "KV cache 20 GiB"),
        (["--rollout.backend=torch", "--rollout.options={kv_cache_tokens = 65536}"], "KV cache 9 GiB"),
    ],
    ids=["vllm", "vllm-too-small", "vllm-apart", "vllm-in-turn", "torch", "torch-tokens"],
)
def test_the_cache_of_an_engine_is_what_the_engine_sets_aside(
    command: CommandLine, tmp_path: Path, words: list[str], said: str
) -> None:
    nodes = tmp_path / "nodes.toml"
    nodes.write_text('[[nodes]]\nname = "large"\ncount = 4\naccelerators = 8\naccelerator_memory_gib = 80\n')
    model = large_model_configs(tmp_path) / "Qwen3-8B"
    (model / "model.safetensors").unlink()  # its config.json is enough
    common = ["--rollout.max_running=1024", "--rollout.dtype=bfloat16", "--rollout.tensor_parallel=1"]
    many = ["--rollout.max_model_len=32768", "--model.path", model, *words]
    ended = command("plan", recipe(tmp_path, cluster=""), "--cluster", nodes, *common, *many)
    assert ended.code == 0, ended.err
    text = " ".join(ended.out.split())
    assert said in text
    assert "layout of" not in text


@pytest.mark.parametrize(
    ("words", "blocks", "cache"),
    [
        (["--rollout.backend=vllm"], 2, 2),
        (["--rollout.backend=vllm", "--rollout.weight_format=fp8"], 1, 2),
        (["--rollout.backend=vllm", '--rollout.options={kv_cache_dtype = "fp8_e4m3"}'], 2, 1),
        (["--rollout.backend=trtllm", f"--rollout.options={{{SERVER}}}"], 2, 2),
        (["--rollout.backend=trtllm", f'--rollout.options={{{SERVER}, weights = "fp8_blocks"}}'], 1, 2),
        (["--rollout.backend=trtllm", f"--rollout.options={{{SERVER}, fp8_kv_cache = true}}"], 2, 1),
        # The embedded engine computes with what the blocks stand for.
        (["--rollout.backend=torch", "--rollout.weight_format=fp8"], 2, 2),
    ],
    ids=["vllm", "vllm-weights", "vllm-cache", "trtllm", "trtllm-weights", "trtllm-cache", "torch"],
)
def test_numbers_that_an_engine_holds_in_fp8_are_counted_as_one_byte(
    command: CommandLine, tmp_path: Path, words: list[str], blocks: int, cache: int
) -> None:
    model = large_model_configs(tmp_path) / "Qwen3-8B"
    common = ["--rollout.dtype=bfloat16", "--rollout.max_model_len=32768", "--rollout.tensor_parallel=1", "--json"]
    # The devices' memory is unknown, so vLLM and TensorRT-LLM are said to hold the cache of one sample.
    ended = command("plan", recipe(tmp_path, cluster=""), "--cluster", "4x8", *common, "--model.path", model, *words)
    assert ended.code == 0, ended.err
    held = json.loads(ended.out)["memory_bytes"]["rollout"]
    in_blocks = 8_190_735_360 - 2 * 151_936 * 4096 - 4096
    assert held["weights"] == blocks * in_blocks + 2 * (8_190_735_360 - in_blocks)
    if "torch" not in words[0]:
        assert held["KV cache of one sample"] == cache * 32768 * 2 * 8 * 128 * 36


def test_a_plan_for_elsewhere_refuses_a_reward_that_does_not_exist(command: CommandLine, tmp_path: Path) -> None:
    ended = command("plan", recipe(tmp_path, cluster=""), "--cluster", "4x8", "--reward.name=exact_mach")
    assert (ended.code, "exact_match" in ended.err) == (2, True), ended.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cluster", "4by8"], "takes NODESxACCELERATORS such as 4x8"),
        (["--cluster", "0x8"], "at least one node"),
        (["--cluster", "4x8", "--cluster.num_nodes", "2"], "go together: set both, or neither"),
        (["--format", "yaml"], "--format takes text or json"),
        (["--cluster", "4x8", "--fit", "new.toml"], "fits as it is"),
        (
            ["--cluster", "1x4", "--rollout.tensor_parallel", "8", "--fit", "new.toml"],
            "--fit changes the recipe's file",
        ),
    ],
)
def test_wrong_words_are_one_clear_error(command: CommandLine, tmp_path: Path, words: list[str], said: str) -> None:
    ended = command("plan", recipe(tmp_path, cluster=""), *words)
    assert ended.code == 2
    assert said in ended.err


def test_a_fitted_recipe_that_cannot_be_written_is_one_clear_error(command: CommandLine, tmp_path: Path) -> None:
    written = recipe(tmp_path)
    # An absolute path, as a relative one would lead elsewhere from another folder, which is refused first.
    written.write_text(written.read_text().replace('"geo3k.jsonl"', f'"{tmp_path}/geo3k.jsonl"'))
    for target, said in ((tmp_path / "no" / "new.toml", "cannot be written: No such"), (written, "exists already")):
        ended = command("plan", written, "--cluster", "4x8", "--fit", target)
        assert ended.code == 2
        assert f"--fit {target}: {said}" in " ".join(ended.err.split())
        assert "Traceback" not in ended.err


def test_a_plan_for_programs_stays_json_when_a_recipe_is_made_to_fit(command: CommandLine, tmp_path: Path) -> None:
    ended = command("plan", recipe(tmp_path), "--cluster", "4x8", "--fit", tmp_path / "fitted.toml", "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["ranks"]
    assert "cluster.num_nodes = 4" in ended.err


def test_a_recipe_for_several_nodes_is_refused_before_anything_starts(
    command: CommandLine, config: Path, tmp_path: Path
) -> None:
    several = ["--cluster.num_nodes", "2", "--cluster.accelerators_per_node", "8", "--out", tmp_path / "run"]
    ended = command("train", config, *several)
    assert ended.code == 2
    assert "2 nodes asked for (cluster.num_nodes): launcher 'local' starts everything on 1" in ended.err
    assert not (tmp_path / "run").exists()


def test_the_preflight_places_every_process_of_this_machine(config: Path) -> None:
    placement = check_run(load_config(config, GrpoConfig, ["--engine.num_ranks", "2"])).placement
    assert len(placement.nodes) == 1
    assert [(rank.role, rank.rank, rank.device) for rank in placement.plan.ranks] == [
        ("trainer", 0, None),
        ("trainer", 1, None),
        ("rollout", 0, None),
    ]
    assert "T0 T1 R0" in placement.picture


def small(**cluster: int) -> GrpoConfig:
    text = '[model]\npath = "m"\n[data]\npath = "d"\n[rollout]\nnum_engines = 2\ntensor_parallel = 4\n'
    config = parse_config(text, GrpoConfig)
    return replace(config, cluster=replace(config.cluster, **cluster))


@pytest.mark.parametrize("colocate", [False, True])
def test_those_that_train_and_those_that_sample_share_all_cpus(colocate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_async_app._fleet.role_specs.available_cpus", lambda: 8)
    config = small(colocate=colocate)
    config = replace(config, engine=replace(config.engine, num_ranks=4))
    assert plan_threads(config) == {"trainer": 2, "rollout": 4, "teacher": 1, "reward_model": 1, "reference": 2}
    assert plan_threads(replace(config, cluster=replace(config.cluster, rollout_threads=3)))["rollout"] == 3
    assert share_cpus(config, plan_threads(config)) == (not colocate)
    assert not share_cpus(config, {"trainer": 1, "rollout": 2, "teacher": 1})


def test_threads_are_cpus_where_they_are_reserved() -> None:
    nodes = tuple(replace(node, num_cpus=16) for node in grid_nodes(2, 8))
    config = small(rollout_threads=8, trainer_threads=8)
    plan = place_run(config, ClusterView(nodes=nodes, reserves=True)).plan
    assert {rank.node for rank in plan.ranks if rank.role == "rollout"} == {"node-0", "node-1"}
    with pytest.raises(PlacementError):
        place_run(small(rollout_threads=32), ClusterView(nodes=nodes, reserves=True))
    place_run(small(rollout_threads=32), ClusterView(nodes=nodes, reserves=False))


def test_a_trainers_tensor_parallel_groups_lie_on_one_node_too(command: CommandLine, tmp_path: Path) -> None:
    cut = ["--engine.options.tensor_parallel", "8", "--rollout.num_engines", "1", "--rollout.tensor_parallel", "2"]
    cut += ["--model.path", str(tmp_path / "models" / "Qwen3-8B")]  # the layers of a model that sees are not shared
    ended = command("plan", recipe(tmp_path, cluster=""), "--cluster", "3x8", *cut)
    assert "node-0  T0.0 T0.1 T0.2 T0.3 T0.4 T0.5 T0.6 T0.7" in ended.out, ended.err
    ended = command("plan", recipe(tmp_path, cluster=""), "--cluster", "2x8", *cut)
    assert "engine.num_ranks 16 -> 8" in ended.err
    ended = command("plan", recipe(tmp_path, cluster=""), "--cluster", "2x8", "--engine.options.tensor_parallel", "3")
    assert "engine.num_ranks = 16 must be a multiple of engine.options.tensor_parallel = 3" in ended.err


def test_devices_are_what_the_cluster_calls_them() -> None:
    nodes = tuple(grid_nodes(2, 8, "XPU"))
    config = small()
    assert place_run(config, ClusterView(nodes=nodes, reserves=True)).groups[0].accelerator == "XPU"
    on_cpus = replace(config, engine=replace(config.engine, device="cpu"))
    placed = place_run(on_cpus, ClusterView(nodes=nodes, reserves=True))
    assert [group.accelerator for group in placed.groups] == ["", "XPU"]


def test_changes_reach_every_form_of_recipe() -> None:
    text = '[model]\npath = "m"\n[data]\npath = "d"\n[cluster]\nlauncher = "local"\n'
    changed = change_recipe(text, {"cluster.colocate": True, "engine.num_ranks": 4}, GrpoConfig)
    assert changed == text.replace("[cluster]\n", "[cluster]\ncolocate = true\n") + "\n[engine]\nnum_ranks = 4\n"
    inline = 'cluster = {colocate = false}\n[model]\npath = "m"\n[data]\npath = "d"\n'
    with pytest.raises(ConfigError):
        change_recipe(inline, {"cluster.colocate": True}, GrpoConfig)


def fit(config: GrpoConfig, view: ClusterView) -> dict[str, SettingValue]:
    return fit_settings(
        view,
        lambda settings: request_resources(with_settings(config, settings), view),
        lambda settings: GrpoPlanner().companions(config, settings),
    )


def test_a_recipe_that_fits_needs_no_change() -> None:
    assert fit(small(), ClusterView(nodes=tuple(grid_nodes(2, 8)), reserves=True)) == {}
    assert fit(small(), ClusterView(nodes=tuple(grid_nodes(1, 8)), reserves=True)) == {
        "cluster.colocate": True,
        "async.staleness_threshold": 0,
        "async.trigger_parameter_sync_step": 1,
        "async.partial_rollout": False,
    }


def test_the_batch_arithmetic_adds_up(config: Path) -> None:
    batch = BatchArithmetic(
        load_config(config, GrpoConfig, [BUDGET, "--async.require_batches", "3", "--engine.num_ranks", "3"])
    )
    assert (batch.groups_per_update, batch.samples_per_step, batch.samples_per_update) == (12, 8, 24)
    assert batch.max_admitted == 18
    [notice] = batch.notices()
    assert "8 samples of a step do not divide among 3 trainer ranks" in notice


@pytest.mark.nightly
def test_a_live_cluster_is_asked_what_it_has(tmp_path: Path) -> None:
    """In a process of its own: forks of one that has used Ray can crash, as those of later tests are."""
    pytest.importorskip("ray", reason="pip install 'offbeat-actors[ray]'")
    words = ["--cluster", "live", "--engine.num_ranks", "8", "--rollout.num_engines", "2"]

    def plan(*more: str) -> tuple[int, str]:
        line = [sys.executable, "-c", AND_THEN_RAY, "plan", str(recipe(tmp_path, cluster="")), *words, *more]
        ended = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=110)
        return ended.returncode, ended.stdout

    with ray_nodes(0, head_cpus=4, head_gpus=16) as cluster:
        code, output = plan("--cluster.address", cluster.address)
        assert code == 0, output
        assert "1 of 1 node used, 16 of 16 free GPU" in output
        assert output.endswith("connected to Ray: False\n")
        code, output = plan("--cluster.address", cluster.address, "--rollout.num_engines", "3")
        assert code == 2, output
        assert "20 GPU wanted, 16 free" in output

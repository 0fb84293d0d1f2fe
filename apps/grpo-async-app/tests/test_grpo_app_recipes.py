"""The recipes are configurations that the application takes, and each is planned on its cluster and on wrong ones."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_async_app._commands.shrink import shrink_run
from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._preflight.estimates import BatchArithmetic
from offbeat_core import BackendError, load_backend, load_config
from offbeat_testing import CommandLine, large_model_configs, tiny_model

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.toml"))
_CLUSTER = re.compile(r"^#     grpo-async-app plan \S+ --cluster (\d+)x(\d+)", re.MULTILINE)
_BATCH = re.compile(
    r"^# batch: (\d+) prompts x (\d+) samples = (\d+) samples; R = (\d+) x (\d+) = (\d+) prompts; K = (\d+); "
    r"at most (\d+) prompts in flight",
    re.MULTILINE,
)
FOR_CLUSTERS = [path for path in RECIPES if _CLUSTER.search(path.read_text())]
FOR_HERE = [path for path in RECIPES if path not in FOR_CLUSTERS]
GEOMETRY = [path for path in FOR_CLUSTERS if path.stem.startswith("geo3k")]

every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
every_large_recipe = pytest.mark.parametrize("recipe", FOR_CLUSTERS, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return large_model_configs(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def _folders(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBEAT_MODELS", str(models))
    for name in ("OFFBEAT_DATA", "OFFBEAT_DEVICE", "OFFBEAT_RAY", "OFFBEAT_TRTLLM_SERVER"):
        monkeypatch.delenv(name, raising=False)


def stated_cluster(recipe: Path) -> tuple[int, int]:
    """(nodes, accelerators of each) that the recipe says it is for."""
    found = _CLUSTER.search(recipe.read_text())
    assert found
    return int(found[1]), int(found[2])


def test_there_are_recipes_of_both_kinds() -> None:
    stems = {path.stem for path in RECIPES}
    rewards = {"smollm2_code", "smollm2_judge", "smollm2_reward_model"}
    assert {"smollm2_arithmetic", "smollm2_jsonl", "smollm2_mix"} | rewards == {path.stem for path in FOR_HERE}
    wanted = {
        "math_qwen3_8b_fsdp",
        "math_qwen3_8b_megatron",
        "moe_30b_megatron",
        "math_trtllm",
        "math_qwen3_8b_distill",
        "geo3k_qwen3vl_8b_cuda",
    }
    assert wanted <= stems
    assert len(GEOMETRY) == 4
    assert any(load_config(path, GrpoConfig).algorithm.advantage == "rloo" for path in FOR_CLUSTERS)


@every_recipe
def test_a_recipe_parses_and_takes_its_paths_from_the_environment(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFBEAT_MODELS", "/models")
    monkeypatch.setenv("OFFBEAT_DATA", "/data")
    config = load_config(recipe, GrpoConfig)
    assert config.model.path.startswith("/models/")
    paths = [each.path for each in (config.data.mix or {"": config.data}).values()]
    assert all(path.startswith(("/data/", "reasoning-gym:")) for path in paths)
    assert config.data.max_prompt_tokens + config.rollout.max_tokens <= config.rollout.max_model_len
    assert config.eval.every_updates
    assert config.data.eval_size or config.data.eval_path or (config.data.mix and config.eval.sets)
    assert config.data.epochs or config.engine.max_updates


@every_recipe
def test_every_section_and_every_choice_has_its_reason(recipe: Path) -> None:
    text = recipe.read_text()
    settings = re.findall(r"^\w+ = .*", text, re.MULTILINE)
    comments = re.findall(r"#.*", text)
    assert len(comments) * 3 >= len(settings), "a recipe is read to learn why"
    assert not re.search(r"\$HOME|(?<![\w.])/(?:home|mnt|data)/", text), "paths come from the environment"


@pytest.mark.parametrize("recipe", FOR_HERE, ids=lambda path: path.stem)
def test_a_recipe_for_one_machine_can_be_planned_here(
    command: CommandLine, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFBEAT_MODELS", str(tmp_path))
    monkeypatch.setenv("OFFBEAT_DATA", str(tmp_path))
    tiny_model(tmp_path / "SmolLM2-135M-Instruct")
    rows = [{"prompt": f"{n} + 1 = ?", "answer": str(n + 1)} for n in range(80)]
    for name in ("questions", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    programs = [{"prompt": f"Write f{n}().", "tests": [f"assert f{n}() is None"]} for n in range(80)]
    (tmp_path / "programs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in programs))
    if recipe.stem == "smollm2_code" and shutil.which("bwrap") is None:
        pytest.skip("no bubblewrap on this machine")
    if recipe.stem == "smollm2_reward_model":
        scorer = tiny_model(tmp_path / "reward-model")
        described = json.loads((scorer / "config.json").read_text())
        described |= {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "score"}}
        (scorer / "config.json").write_text(json.dumps(described))
    # The tiny model's tokenizer needs more tokens for the same text.
    ended = command("plan", recipe, "--data.max_prompt_tokens", "192", "--rollout.max_model_len", "256")
    assert ended.code == 0, ended.err
    assert "64 samples" in " ".join(ended.out.split())


def accelerator(recipe: Path) -> str:
    """What a plan calls the accelerators that a recipe is written for."""
    name = load_config(recipe, GrpoConfig).engine.device
    return "GPU" if name == "cuda" else name.upper()


@every_large_recipe
def test_a_recipe_fits_the_cluster_it_states_and_fills_it(command: CommandLine, recipe: Path, tmp_path: Path) -> None:
    nodes, width = stated_cluster(recipe)
    cluster = tmp_path / "nodes.toml"
    cluster.write_text(
        f'[[nodes]]\nname = "node"\ncount = {nodes}\naccelerators = {width}\naccelerator_memory_gib = 80\n'
    )
    ended = command("plan", recipe, "--cluster", cluster)
    assert ended.code == 0, ended.err
    assert f"{nodes} of {nodes} node" in ended.out
    assert f"{nodes * width} of {nodes * width} free {accelerator(recipe)}" in ended.out
    config = load_config(recipe, GrpoConfig)
    known = getattr(load_backend("offbeat.rollout", config.rollout.backend), "notices_of", lambda _: [])(config.rollout)
    assert len(re.findall(r"^notice", ended.out, re.MULTILINE)) == len(known), ended.out
    assert all(notice in " ".join(ended.out.split()) for notice in known)
    assert "parameters" in ended.out, "the memory could not be estimated"


@every_large_recipe
def test_the_batch_arithmetic_adds_up_to_what_the_recipe_says(recipe: Path) -> None:
    found = _BATCH.search(recipe.read_text())
    assert found, "a recipe says what its batches are made of"
    per_step, samples, all_samples, steps, per_step_again, per_update, syncs, in_the_air = map(int, found.groups())
    batch = BatchArithmetic(load_config(recipe, GrpoConfig))
    assert (batch.groups_per_step, batch.samples_per_group) == (per_step, samples) == (per_step_again, samples)
    assert batch.samples_per_step == per_step * samples == all_samples
    assert batch.groups_per_update == steps * per_step == per_update
    assert (batch.steps_per_update, batch.updates_per_sync, batch.max_admitted) == (steps, syncs, in_the_air)
    assert batch.notices() == []


@pytest.mark.parametrize("recipe", [path for path in FOR_CLUSTERS if path not in GEOMETRY], ids=lambda path: path.stem)
def test_the_ranks_of_the_trainer_can_share_the_model(recipe: Path) -> None:
    config = load_config(recipe, GrpoConfig)
    wanted = replace(config.train_engine(config.model.path, num_updates=100), device="cpu")
    backend = load_backend("offbeat.engine", config.engine.backend)
    try:
        layout = backend.plan(wanted, config.engine.num_ranks)
    except BackendError as error:
        pytest.skip(str(error))
    assert layout.num_ranks == config.engine.num_ranks
    assert BatchArithmetic(config, layout).notices() == []
    stated = re.search(r"^num_ranks = \d+ +# ((?:tp|pp|dp) .*)", recipe.read_text(), re.MULTILINE)
    if stated:
        sizes = {axis: int(size) for axis, size in (part.split() for part in stated[1].split(" x "))}
        assert sizes == {axis: getattr(layout, axis) for axis in sizes}


@every_large_recipe
def test_a_recipe_is_refused_on_half_of_its_cluster_with_what_would_fit(command: CommandLine, recipe: Path) -> None:
    nodes, width = stated_cluster(recipe)
    ended = command("plan", recipe, "--cluster", f"{max(nodes // 2, 1)}x{width if nodes > 1 else width // 2}")
    assert ended.code == 2
    assert f" {accelerator(recipe)} " in ended.err
    assert "what fits: " in ended.err
    assert "Traceback" not in ended.err


WIDE = [path for path in FOR_CLUSTERS if stated_cluster(path)[1] == 16]


def test_the_wide_recipes_are_both_parameter_sets_of_the_incident() -> None:
    held = [load_config(path, GrpoConfig) for path in WIDE if path in GEOMETRY]
    sets = {(each.async_.staleness_threshold, each.async_.trigger_parameter_sync_step) for each in held}
    assert sets == {(0.1, 4), (10, 5)}
    assert all(each.async_.require_batches == 2 and each.async_.partial_rollout for each in held)
    small = next(each for each in held if each.async_.staleness_threshold < 1)
    assert (small.rollout.samples_per_prompt, small.async_.mini_batch_size) == (4, 64)
    assert (small.algorithm.tis_cap, small.algorithm.normalise_weights) == (2.0, True)
    assert (small.algorithm.rs_low, small.algorithm.rs_high) == (0.6, 1.6)
    assert (small.algorithm.kl_coefficient, small.algorithm.kl_estimator, small.algorithm.kl_in) == (0.01, "k3", "loss")
    assert (small.engine.learning_rate, small.data.max_prompt_tokens, small.rollout.max_tokens) == (1e-6, 1024, 2048)


def test_a_geometry_recipe_without_a_plugin_trains_as_the_one_with_it(command: CommandLine) -> None:
    [embedded] = [path for path in GEOMETRY if load_config(path, GrpoConfig).rollout.backend == "torch"]
    [waiting] = [path for path in WIDE if load_config(path, GrpoConfig).async_.staleness_threshold < 1]
    ended = command("plan", embedded, "--cluster", "4x8")
    assert ended.code == 0, ended.err
    assert f"32 of 32 free {accelerator(embedded)}" in ended.out
    assert accelerator(embedded) != "GPU"
    assert "vllm" not in ended.out.lower(), "nothing to wait for"
    held, other = load_config(embedded, GrpoConfig), load_config(waiting, GrpoConfig)
    assert (held.engine, held.algorithm, held.data, held.async_) == (
        other.engine,
        other.algorithm,
        other.data,
        other.async_,
    )


@pytest.mark.parametrize("recipe", GEOMETRY, ids=lambda path: path.stem)
def test_a_correction_without_effect_is_refused(command: CommandLine, recipe: Path) -> None:
    nodes, width = stated_cluster(recipe)
    words = ["plan", recipe, "--cluster", f"{nodes}x{width}"]
    ended = command(*words, "--algorithm.correction_form", "bypass")
    assert ended.code == 2
    assert "the ratio of ppo_clip is already against the rollout policy" in ended.err
    ended = command(*words, "--algorithm.correction", "none")
    assert ended.code == 2
    assert "tis_cap has no effect" in ended.err


def test_the_name_under_which_the_filter_was_known_is_told_to_be_another(command: CommandLine) -> None:
    [small] = [path for path in WIDE if load_config(path, GrpoConfig).async_.staleness_threshold < 1]
    ended = command("plan", small, "--cluster", "2x16", "--algorithm.correction", "sequence_tis_geometric_rs")
    assert ended.code == 0, ended.err
    assert "[0.6, 1.6] are wide for a geometric mean" in " ".join(ended.out.split())


@every_recipe
def test_a_shrunken_recipe_has_the_structure_of_the_whole(recipe: Path, tmp_path: Path) -> None:
    whole = load_config(recipe, GrpoConfig)
    small = shrink_run(whole, tmp_path).config
    assert small.engine.num_ranks == min(whole.engine.num_ranks, 2)
    assert small.rollout.num_engines == min(whole.rollout.num_engines, 2)
    assert small.rollout.samples_per_prompt <= 4
    assert (small.engine.device, small.rollout.device) == ("cpu", "cpu")
    for key in ("advantage", "loss", "correction", "correction_form", "tis_cap", "rs_low", "rs_high", "filter_groups"):
        assert getattr(small.algorithm, key) == getattr(whole.algorithm, key)
    for key in ("staleness_threshold", "trigger_parameter_sync_step", "require_batches", "partial_rollout"):
        assert getattr(small.async_, key) == getattr(whole.async_, key)
    assert small.async_.mode == whole.async_.mode
    assert small.engine.max_updates == max(2, whole.async_.trigger_parameter_sync_step + 1)

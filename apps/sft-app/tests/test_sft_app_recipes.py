"""The recipes are configurations that the application takes, and each is planned on its machine and on wrong ones."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from offbeat_core import BackendError, load_backend, load_config
from offbeat_testing import CommandLine, large_model_configs
from sft_app._config import SftConfig
from sft_app._preflight import sharing_ranks

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.toml"))
_CLUSTER = re.compile(r"^#     sft-app plan \S+ --cluster (\d+)x(\d+)", re.MULTILINE)
_BATCH = re.compile(r"^# batch: (\d+) sequences over (\d+) data parallel ranks, (\d+) each", re.MULTILINE)
LARGE = [path for path in RECIPES if _CLUSTER.search(path.read_text())]
OF_ONE_MACHINE = [path for path in LARGE if "--cluster 1x" in path.read_text()]

every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
every_large_recipe = pytest.mark.parametrize("recipe", LARGE, ids=lambda path: path.stem)
every_recipe_of_one_machine = pytest.mark.parametrize("recipe", OF_ONE_MACHINE, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return large_model_configs(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def _folders(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBEAT_MODELS", str(models))
    for name in ("OFFBEAT_DATA", "OFFBEAT_DEVICE"):
        monkeypatch.delenv(name, raising=False)


def stated_cluster(recipe: Path) -> tuple[int, int]:
    """(nodes, accelerators of each) that the recipe says it is for."""
    found = _CLUSTER.search(recipe.read_text())
    assert found
    return int(found[1]), int(found[2])


def accelerator(recipe: Path) -> str:
    """What a plan calls the accelerators that a recipe is written for."""
    name = load_config(recipe, SftConfig).engine.device
    return "GPU" if name == "cuda" else name.upper()


def test_the_large_recipes_are_twins_of_those_that_come_after_them() -> None:
    others = {path.stem for path in (Path(__file__).parents[2] / "grpo-async-app" / "recipes").glob("*.toml")}
    stems = {path.stem for path in OF_ONE_MACHINE}
    assert {"math_qwen3_8b_fsdp", "math_qwen3_8b_megatron", "moe_30b_megatron"} <= stems
    assert len([stem for stem in stems if stem.startswith("geo3k_qwen3vl_8b_")]) == 2
    assert stems <= others
    of_smollm2 = {f"smollm2_{name}" for name in ("chat", "dpo", "kto", "orpo", "reward", "simpo")}
    assert {path.stem for path in RECIPES} - stems == {*of_smollm2, "math_qwen3_32b_fsdp"}


@every_recipe
def test_a_recipe_parses_and_takes_its_paths_from_the_environment(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OFFBEAT_MODELS")
    config = load_config(recipe, SftConfig)
    assert config.model.path.startswith(str(Path.home() / "models"))
    assert config.data.path.startswith(str(Path.home() / "data"))
    monkeypatch.setenv("OFFBEAT_MODELS", "/models")
    monkeypatch.setenv("OFFBEAT_DATA", "/data")
    config = load_config(recipe, SftConfig)
    assert config.model.path.startswith("/models/")
    assert config.data.path.startswith("/data/")
    assert config.eval.every_updates
    assert config.data.eval_size
    assert config.checkpoint.every == config.eval.every_updates, "only a validated checkpoint can be the best"


@every_large_recipe
def test_a_recipe_fits_the_cluster_it_states_and_fills_it(command: CommandLine, recipe: Path, tmp_path: Path) -> None:
    nodes, width = stated_cluster(recipe)
    cluster = tmp_path / "nodes.toml"
    cluster.write_text(
        f'[[nodes]]\nname = "node"\ncount = {nodes}\naccelerators = {width}\naccelerator_memory_gib = 80\n'
    )
    ended = command("plan", recipe, "--cluster", cluster)
    assert ended.code == 0, ended.err
    assert f"{nodes * width} of {nodes * width} free {accelerator(recipe)}" in ended.out
    assert "notice" not in ended.out, ended.out
    assert "parameters" in ended.out, "the memory could not be estimated"


@every_large_recipe
def test_the_batch_adds_up_to_what_the_recipe_says(command: CommandLine, recipe: Path) -> None:
    found = _BATCH.search(recipe.read_text())
    assert found, "a recipe says what its batches are made of"
    sequences, shares, each = map(int, found.groups())
    assert sequences == shares * each
    ended = command("plan", recipe, "--cluster", "{}x{}".format(*stated_cluster(recipe)), "--json")
    assert json.loads(ended.out)["batch"] == {"sequences_per_step": sequences, "data_parallel": shares}


@every_large_recipe
def test_the_ranks_can_share_the_model_as_the_recipe_says(recipe: Path) -> None:
    config = load_config(recipe, SftConfig)
    wanted = replace(config.train_engine(num_updates=100), device="cpu")
    stated = re.search(r"^num_ranks = \d+ +# ((?:tp|pp|dp) .*)", recipe.read_text(), re.MULTILINE)
    assert stated
    sizes = {axis: int(size) for axis, size in (part.split() for part in stated[1].split(" x "))}
    assert sizes["dp"] * sharing_ranks(config) == config.engine.num_ranks
    try:
        layout = load_backend("offbeat.engine", config.engine.backend).plan(wanted, config.engine.num_ranks)
    except BackendError as error:
        pytest.skip(str(error))
    assert sizes == {axis: getattr(layout, axis) for axis in sizes}


@every_recipe_of_one_machine
def test_a_recipe_is_refused_on_half_of_its_machine_and_made_to_fit(
    command: CommandLine, recipe: Path, tmp_path: Path
) -> None:
    _, whole = stated_cluster(recipe)
    half, fitted = whole // 2, tmp_path / "fitted.toml"
    ended = command("plan", recipe, "--cluster", f"2x{half}")
    assert ended.code == 2
    assert f"1 × trainer of {whole} {accelerator(recipe)} on one node" in ended.err
    assert f"{whole} {accelerator(recipe)} wanted, {whole} free, but not in such pieces" in ended.err
    assert f"what fits: engine.num_ranks {whole} -> {half}" in ended.err
    ended = command("plan", recipe, "--cluster", f"2x{half}", "--fit", fitted)
    assert ended.code == 0, ended.err
    before, [first, _, *after] = recipe.read_text().splitlines(), fitted.read_text().splitlines()
    assert first.startswith(f"# {recipe.name} made to fit")
    changed = [new.split("#")[0].strip() for old, new in zip(before, after, strict=True) if old != new]
    assert changed == [f"num_ranks = {half}"]
    assert command("plan", fitted, "--cluster", f"1x{half}").code == 0


def test_what_is_made_to_fit_can_still_share_the_model(command: CommandLine) -> None:
    recipe = RECIPES[0].with_stem("math_qwen3_8b_megatron")
    ended = command("plan", recipe, "--cluster", "4x3")
    assert ended.code == 2
    assert "what fits" not in ended.err, "four ranks share each matrix, and no machine has four"
    ended = command("plan", recipe, "--cluster", "1x8", "--engine.num_ranks", "6")
    assert ended.code == 2
    assert "engine.num_ranks = 6 must be a multiple of tensor_parallel 4" in ended.err


def test_a_recipe_for_several_nodes_is_refused_by_name_where_it_does_not_fit(
    command: CommandLine, tmp_path: Path
) -> None:
    recipe, fitted = RECIPES[0].with_stem("math_qwen3_32b_fsdp"), tmp_path / "fitted.toml"
    on_one_node = "1 × trainer of 16 GPU on one node"
    for words, *said in [
        ("2x8 --cluster.launcher=local", on_one_node, 'cluster.launcher = "ray", which trains on several nodes'),
        ("2x8 --engine.options={tensor_parallel=16}", on_one_node),
        ("2x8 --engine.device=cuda:0", "engine.device = cuda:0 is one device", "name the kind alone (cuda)"),
        ("4x4", "2 nodes × 8 GPU asked for", "cluster.num_nodes = 4, cluster.accelerators_per_node = 4"),
    ]:
        ended = command("plan", recipe, "--cluster", *words.split())
        assert ended.code == 2
        assert [text for text in said if text not in ended.err] == [], ended.err
    assert command("plan", recipe, "--cluster", "4x4", "--fit", fitted).code == 0
    ended = command("plan", fitted, "--cluster", "4x4")
    assert "node-3  T12 T13 T14 T15" in ended.out, ended.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--fit", "new.toml"], "fits as it is"),
        (["--cluster", "1x8", "--fit", "new.toml"], "fits as it is"),
        (["--cluster", "0x8"], "at least one node"),
        (["--cluster", "1x8", "--engine.max_updates=5"], "engine.warmup_steps = 10: the run makes 5 (engine.max_up"),
        (["--cluster", "1x8", "--shrink"], "leave --cluster and --fit out"),
        (["--format", "yaml"], "--format takes text or json"),
        (["--cluster", "1x8", "--engine.options", '{tensor_parallel = "2"}'], "must be whole numbers of ranks"),
    ],
)
def test_wrong_words_are_one_clear_error(
    command: CommandLine, tmp_path: Path, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = command("plan", RECIPES[0], *words)
    assert ended.code == 2
    assert said in ended.err
    assert list(tmp_path.iterdir()) == []

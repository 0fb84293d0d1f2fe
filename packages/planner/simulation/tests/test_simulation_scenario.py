"""Scenarios: files, overrides, recipes, costs, the search and what is said of the result."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from offbeat_core import ConfigError, DataError
from offbeat_simulation import ScenarioModel, read_run, read_scenario, scenario_text
from offbeat_simulation._calibration import ColocatedStep, calibrate, engine_time, length_moments
from offbeat_simulation._report import advise
from offbeat_simulation._search import propose
from offbeat_simulation._workload import Lengths, read_lengths

TEXT = """
[async]
mini_batch_size = 8
staleness_threshold = 0.5
[work]
num_syncs = 6
[machines]
trainer = 4
rollout = 8
per_engine = 2
"""


def write(folder, text, name="scenario.toml"):
    path = folder / name
    path.write_text(text)
    return path


def test_toml_and_json_say_the_same(tmp_path):
    plain = {"async": {"mini_batch_size": 8, "staleness_threshold": 0.5}, "work": {"num_syncs": 6}}
    plain["machines"] = {"trainer": 4, "rollout": 8, "per_engine": 2}
    as_json = read_scenario(write(tmp_path, json.dumps(plain), "scenario.json"))
    assert as_json == read_scenario(write(tmp_path, TEXT))
    assert as_json.num_accelerators == 12


def test_the_same_scenario_gives_the_same_report_and_another_seed_another(tmp_path):
    path = write(tmp_path, TEXT)
    first, again = (ScenarioModel.of(read_scenario(path)).run() for _ in range(2))
    assert first == again
    assert ScenarioModel.of(read_scenario(path, [("--work.seed", "1")])).run() != first


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[asink]\n", "[asink] is no section of a scenario; did you mean async?"),
        ("[machines]\ntrainers = 4\n", "scenario.toml, [machines] has no option 'trainers'; did you mean trainer?"),
        ('[machines]\ntrainer = "4"\n', "[machines]: option trainer must be int, got '4'"),
        ("[machines]\ntrainer = 0\n", "[machines]: option trainer must be a number >= 1, got 0"),
        ("[machines]\nrollout = 7\nper_engine = 2\n", "machines.rollout=7 is not a multiple"),
        ("[trainer]\nstep_s = inf\n", "[trainer]: option step_s must be a finite number"),
        (
            "[[colocated]]\naccelerators = 8\ngenerate = 1\n",
            "colocated row 1 has no option 'generate'; did you mean generate_s?",
        ),
        ("[machines\n", "not TOML"),
    ],
)
def test_a_bad_scenario_is_refused_by_name(tmp_path, text, said):
    with pytest.raises(ConfigError) as refused:
        read_scenario(write(tmp_path, text))
    assert said in str(refused.value)


def test_all_problems_are_named_at_once(tmp_path):
    with pytest.raises(ConfigError, match=r"seeds.*trainers"):
        read_scenario(write(tmp_path, "[machines]\ntrainers = 4\n[work]\nseeds = 1\n"))


def test_an_override_wins_over_a_recipe_and_a_recipe_over_the_file(tmp_path):
    recipe = '[model]\npath = "m"\n[async]\nmini_batch_size = 16\nstaleness_threshold = 1\n[rollout]\nnum_engines = 3\n'
    recipe += (
        "tensor_parallel = 2\nsamples_per_prompt = 4\nmax_tokens = 512\nmax_running = 0\n[engine]\nnum_ranks = 6\n"
    )
    scenario = read_scenario(
        write(tmp_path, TEXT), [("--async.staleness_threshold", "0.25")], write(tmp_path, recipe, "recipe.toml")
    )
    assert (scenario.async_.mini_batch_size, scenario.async_.staleness_threshold) == (16, 0.25)
    assert (scenario.machines.trainer, scenario.machines.rollout, scenario.machines.per_engine) == (6, 6, 2)
    assert (scenario.work.group_size, scenario.lengths.longest, scenario.work.num_syncs) == (4, 512, 6)


def test_recipes_of_the_application_can_be_simulated():
    recipes = sorted((Path(__file__).parents[4] / "apps" / "grpo-async-app" / "recipes").glob("smollm2_*.toml"))
    assert recipes
    for recipe in recipes:
        assert ScenarioModel.of(read_scenario(None, [("--work.num_syncs", "3")], recipe)).run().syncs >= 3


def test_colocated_rows_are_fitted_exactly_where_they_can_be():
    rows = [
        ColocatedStep(accelerators=n, groups=64, generate_s=50 + 800 / n, update_s=10 + 1600 / n, other_s=3)
        for n in (8, 16, 32)
    ]
    fit = calibrate(rows)
    assert (fit.generate.fixed_s, fit.generate.work_s) == pytest.approx((50, 800))
    assert (fit.update.fixed_s, fit.update.work_s, fit.switch_s) == pytest.approx((10, 1600, 3))
    lengths = Lengths(median=300, spread=0.5, longest=4000)
    speed = engine_time(fit, lengths, group_size=4, per_engine=2)
    mean, longest = length_moments(lengths, 256)
    for n in (8, 32):
        tokens_of_an_engine = 256 * mean / (n / 2)
        assert speed.step_s * longest + speed.sample_s * tokens_of_an_engine == pytest.approx(50 + 800 / n)


def test_a_fit_never_gives_negative_time():
    falling = [ColocatedStep(accelerators=n, generate_s=n, update_s=100 / n**2) for n in (8, 16, 32)]
    fit = calibrate(falling)
    assert min(fit.generate.fixed_s, fit.generate.work_s, fit.update.fixed_s, fit.update.work_s) >= 0


def test_one_colocated_row_needs_to_be_told_what_more_accelerators_shorten():
    with pytest.raises(ConfigError, match="give rows of two sizes, or fixed_generate_share"):
        calibrate([ColocatedStep(accelerators=8, generate_s=1, update_s=1)])
    shares = {"fixed_generate_share": 0.25, "fixed_train_share": 0.5}
    fit = calibrate([ColocatedStep(accelerators=8, generate_s=4, update_s=2, **shares)])
    assert (fit.generate.fixed_s, fit.generate.work_s, fit.update.work_s) == pytest.approx((1, 24, 8))


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", "10 20\n30\n", (10, 20, 30)),
        ("a.jsonl", '5\n{"num_tokens": 7, "text": "x"}\n\n{"length": 9}\n', (5, 7, 9)),
    ],
)
def test_measured_lengths_are_read(tmp_path, name, content, expected):
    assert read_lengths(write(tmp_path, content, name)) == expected


def test_lengths_of_a_run_folder_are_read_and_used(tmp_path):
    (tmp_path / "run" / "generations").mkdir(parents=True)
    write(tmp_path / "run" / "generations", '{"num_tokens": 40}\n{"num_tokens": 60}\n', "train.jsonl")
    model = ScenarioModel.of(read_scenario(write(tmp_path, TEXT + '[lengths]\nfile = "run"\n')))
    assert model.lengths.measured == (40, 60)


@pytest.mark.parametrize("content", ['{"tokens": 5}\n', "true\n", "1.5\n", "[1]\n", "{\n"])
def test_a_bad_line_of_lengths_is_named(tmp_path, content):
    with pytest.raises(DataError, match="line 2"):
        read_lengths(write(tmp_path, "5\n" + content, "a.jsonl"))


def test_advice_names_the_greatest_waste_first(tmp_path):
    def first_line(*overrides):
        model = ScenarioModel.of(read_scenario(write(tmp_path, TEXT), overrides))
        return advise(model.scenario.async_, model.run())[0]

    assert "move accelerators to rollout" in first_line(
        ("--engines.sample_s", "0.05"), ("--async.staleness_threshold", "3.0"), ("--async.partial_rollout", "true")
    )
    assert "move accelerators to the trainer" in first_line(("--trainer.group_s", "200"))
    assert "sync faster" in first_line(("--sync.sync_s", "2000"))
    assert "partial_rollout = true" in first_line(("--async.staleness_threshold", "2.0"), ("--trainer.group_s", "8"))


def test_the_search_moves_accelerators_to_whoever_needs_them(tmp_path):
    overrides = [("--trainer.group_s", "60"), ("--async.partial_rollout", "true"), ("--lengths.spread", "0.3")]
    proposal = propose(ScenarioModel.of(read_scenario(write(tmp_path, TEXT), overrides)))
    assert proposal.best.machines.trainer > 4
    assert proposal.best.machines.trainer + proposal.best.machines.rollout == 12
    assert proposal.best.report.groups_per_s > 1.2 * proposal.present.report.groups_per_s
    behind = [each.groups_behind for each in proposal.front]
    speeds = [each.report.groups_per_s for each in proposal.front]
    assert behind == sorted(behind)
    assert speeds == sorted(speeds)


def test_the_search_keeps_its_limit(tmp_path):
    proposal = propose(ScenarioModel.of(read_scenario(write(tmp_path, TEXT))), max_groups_behind=4.0)
    assert proposal.best.groups_behind <= 4.0


def fake_run(folder, mini_batch_size, *, sigma=0.0, num_updates=10, generate_s=None, update_s=None):
    """A run folder as a synchronous run leaves it: 0.2 s a sync, 1 s + 0.5 s a group training, generation by steps."""
    generate_s = generate_s or 0.01 * 64 + 0.001 * 64 * 4 * mini_batch_size
    update_s = update_s or 1 + 0.5 * mini_batch_size
    (folder / "generations").mkdir(parents=True)
    write(folder / "generations", '{"num_tokens": 64}\n', "train.jsonl")
    write(folder, "".join(f'{{"step": {i}, "groups/filtered": 0}}\n' for i in range(num_updates)), "metrics.jsonl")
    config = f"[async]\nmini_batch_size = {mini_batch_size}\nrequire_batches = 1\ntrigger_parameter_sync_step = 1\n"
    config += f"staleness_threshold = {sigma}\n[engine]\nnum_ranks = 1\n"
    config += "[rollout]\nnum_engines = 1\nsamples_per_prompt = 4\nmax_tokens = 64\nmax_running = 0\n"
    write(folder, config, "config.toml")
    write(folder, config.replace("max_running = 0", "max_running = 512"), "settled.toml")
    events, now = [], 100.0
    for _ in range(num_updates):
        for name, seconds in (("sync", 0.2), ("generate", generate_s), ("train", update_s)):
            events.append({"ph": "X", "name": name, "ts": now * 1e6, "dur": seconds * 1e6})
            now += seconds
    write(folder, json.dumps(events), "timeline.json")
    return read_run(folder)


def test_two_synchronous_runs_give_the_costs_back(tmp_path):
    runs = [fake_run(tmp_path / "a", 8), fake_run(tmp_path / "b", 32)]
    path = write(tmp_path, scenario_text(runs), "measured.toml")
    scenario = read_scenario(path)
    assert (scenario.engines.step_s, scenario.engines.sample_s) == pytest.approx((0.01, 0.001), rel=1e-3)
    assert (scenario.trainer.step_s, scenario.trainer.group_s) == pytest.approx((1, 0.5), rel=1e-3)
    assert scenario.sync.sync_s == pytest.approx(0.2, rel=1e-3)
    assert scenario.engines.max_running == 512, "what config.toml leaves open is in settled.toml"
    simulated = ScenarioModel.of(replace(scenario, work=replace(scenario.work, num_syncs=10))).run()
    assert simulated.groups_per_s == pytest.approx(runs[-1].groups_per_s, rel=0.05)
    assert simulated.trainer_idle_share == pytest.approx(runs[-1].trainer_idle_share, abs=0.05)


@pytest.mark.parametrize(
    ("times_s", "step_s", "sample_s", "group_s"),
    [
        ([(8, 0.1, 1.0), (32, 8.192, 16.0)], (0.0, 0.0), 0.001, 0.5),  # the smaller batch was faster than in proportion
        ([(8, 8.0, 9.0), (32, 6.4, 8.0)], (0.1, 8.0), 0.0, 0.0),  # the larger batch was faster
        ([(32, 8.192, 16.0)], (0.0, 0.0), 0.001, 0.5),  # one run does not separate them
    ],
    ids=["no step below zero", "no group below zero", "one run"],
)
def test_no_measured_cost_is_negative(tmp_path, times_s, step_s, sample_s, group_s):
    runs = [
        fake_run(tmp_path / str(size), size, generate_s=generate_s, update_s=update_s)
        for size, generate_s, update_s in times_s
    ]
    scenario = read_scenario(write(tmp_path, scenario_text(runs), "measured.toml"))
    assert (scenario.engines.step_s, scenario.trainer.step_s) == pytest.approx(step_s, rel=1e-3)
    assert (scenario.engines.sample_s, scenario.trainer.group_s) == pytest.approx((sample_s, group_s), rel=1e-3)


def test_what_cannot_be_measured_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="a synchronous run is required"):
        scenario_text([fake_run(tmp_path / "a", 8, sigma=0.5)])
    with pytest.raises(ConfigError, match=r"different async\.mini_batch_size"):
        scenario_text([fake_run(tmp_path / "b", 8), fake_run(tmp_path / "c", 8)])
    with pytest.raises(DataError, match="at least 3 updates"):
        fake_run(tmp_path / "d", 8, num_updates=2)
    with pytest.raises(DataError, match="No such file"):
        read_run(tmp_path)

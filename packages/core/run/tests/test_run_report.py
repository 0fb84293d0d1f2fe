"""A report shows what was measured, leaves out what was not, and lets no completion become part of the page."""

import json
import math
import re
import statistics
from html.parser import HTMLParser

import pytest

from offbeat_core import RunFolderError
from offbeat_run import Generation, RunFolder
from offbeat_run._log.run_log import GenerationsLog
from offbeat_run._log.timeline import Timeline
from offbeat_run._metrics.metrics import MetricsLog
from offbeat_run._report.page import _script_json, write_report

EVIL = "</pre></script><script>document.title='pwned'</script><img src=http://evil.example/x onerror=alert(1)>"
GRPO = {
    "train/reward": 0.5, "train/loss": 0.1, "train/entropy": 1.0, "train/kl_ref": 0.01, "train/clip_fraction": 0.1,
    "train/ratio_max": 1.5, "train/response_tokens": 20.0, "train/lag_mean": 1.0, "train/lag_max": 2.0,
    "async/trainer_idle_share": 0.1, "async/rollout_idle_share": 0.2, "async/overlap_share": 0.7,
    "perf/tokens_per_s": 4000.0, "perf/samples_per_s": 100.0, "groups/filtered": 1.0, "groups/dropped": 0.0,
    "correction/weight_mean": 1.0, "engine/grad_norm": 1.0, "engine/learning_rate": 1e-5, "engine/steps_refused": 0.0,
}  # fmt: skip


class Page(HTMLParser):
    """Tags with their attributes, and the text of scripts apart from the rest."""

    def __init__(self, html):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.scripts, self.pieces = "", [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.cdata_elem == "script":
            self.scripts[-1] += data
        else:
            self.text += data
            self.pieces.append(data)

    @property
    def figures(self):
        return list(json.loads(self.scripts[1]))

    def marked_text(self):
        """Return the text, with a bar between any two pieces of it."""
        return "|".join(["", *filter(None, (piece.strip() for piece in self.pieces)), ""])

    def titles(self):
        return [str(attrs["aria-label"]) for tag, attrs in self.tags if attrs.get("class") == "plot"]


def grpo_run(path, *, steps=40, evil=EVIL):
    run = RunFolder.create(path)
    run.write_text(run.config, f"# {evil}\n[rollout]\ntemperature = 1.0\n")
    with MetricsLog(run, tensorboard=False) as log, Timeline(run.timeline) as timeline, GenerationsLog(run) as samples:
        for step in range(1, steps + 1):
            numbers = {name: value * (1 + step / 100) for name, value in GRPO.items()}
            log.write(step, {**numbers, "async/lag_histogram": [3, 5, 1]}, time_s=1000.0 + step)
            if step in (1, steps):
                log.write(step, {"eval/accuracy": step / steps, "eval/reward": 0.1}, time_s=1000.0 + step)
                samples.write([sample(step, "validation", evil), sample(step, "train", evil)])
            timeline.span("trainer-0", f"update {step}", step, step + 0.5)
            timeline.span("rollout-0", "generate", step, step + 0.8)
            timeline.span(evil, "idle", step + 0.5, step + 1)
    return run


def sample(step, kind, text):
    return Generation(step=step, kind=kind, version=step, prompt=text, completion=text, reward=0.5, answer=text)


def page_of(run):
    return Page(write_report(run).read_text())


def page_of_metrics(path, *lines):
    """The report of a run that has measured these, one line an update."""
    with RunFolder.create(path) as run:
        run.write_text(run.config, "")
        with MetricsLog(run, tensorboard=False) as log:
            for step, values in enumerate(lines, 1):
                log.write(step, values)
        return page_of(run)


def test_a_grpo_run_shows_every_figure_of_the_design(tmp_path):
    page = page_of(grpo_run(tmp_path / "run"))
    assert {
        "Reward", "Loss", "Response length", "Lag", "Overlap and idle time", "Tokens per second", "Timeline", "Entropy",
        "KL to the reference", "Clip fraction", "Groups left out", "Rollout correction", "Gradient norm",
    } <= set(page.titles())  # fmt: skip
    assert "Refused steps" not in page.titles()  # there were none
    assert "0.025 → 1.000" in page.text  # held-out accuracy before, and after
    lines = [line.strip() for line in page.text.splitlines()]
    assert {"Learning", "Speed", "Policy lag and mismatch", "Data", "Optimizer"} <= set(lines)


def test_every_line_has_a_value_or_a_gap_at_each_update_of_its_figure(tmp_path):
    page = page_of(grpo_run(tmp_path / "run"))
    assert len(page.figures) == len(page.titles())
    assert [figure["title"] for figure in page.figures] == page.titles()
    kinds = {figure["title"]: figure["kind"] for figure in page.figures}
    assert (kinds["Reward"], kinds["Lag"], kinds["Timeline"]) == ("lines", "columns", "bars")
    for figure in page.figures:
        assert figure["legend"]
        for line in figure.get("lines", []):
            assert len(line["values"]) == len(figure["x"])
            assert any(value is not None for value in line["values"])
        assert figure.get("lines") or figure.get("bars") or figure.get("shares")


def test_the_plotting_library_is_embedded_once_and_nothing_comes_from_elsewhere(tmp_path):
    page = page_of(grpo_run(tmp_path / "run", evil="plain"))
    assert sum("uPlot (v" in script for script in page.scripts) == 1
    assert len(write_report(tmp_path / "run").read_bytes()) < 200_000, "most of a report is its content"
    ours = page.text + page.scripts[1] + page.scripts[2]
    assert not re.search(r"https?:|//[a-z]", ours)
    assert not [attrs for _, attrs in page.tags if {"src", "href", "srcset", "data", "action"} & attrs.keys()]
    policy = next(str(attrs["content"]) for tag, attrs in page.tags if tag == "meta" and "http-equiv" in attrs)
    assert policy.startswith("default-src 'none'; script-src 'nonce-")


def test_what_a_completion_holds_stays_text(tmp_path):
    page = page_of(grpo_run(tmp_path / "run"))
    assert EVIL in page.text  # shown as it is
    assert len(page.scripts) == 3
    assert not [tag for tag, _ in page.tags if tag == "img"]
    nonces = {attrs.get("nonce") for tag, attrs in page.tags if tag == "script"}
    assert len(nonces) == 1
    assert page_of(RunFolder(tmp_path / "run", None)).tags != page.tags  # the nonce is new each time


def test_no_text_in_the_figures_can_end_their_script():
    held = _script_json({"name": EVIL})
    assert "<" not in held
    assert json.loads(held) == {"name": EVIL}


def test_a_fine_tuning_run_shows_its_losses_and_no_empty_figure(tmp_path):
    losses = [
        {"train/loss": 3.0 / step, "eval/loss": 4.0 / step, "perf/tokens_per_s": 9e3 * step} for step in range(1, 5)
    ]
    page = page_of_metrics(tmp_path / "run", *losses)
    assert page.titles() == ["Loss", "Tokens per second"]
    assert "4.000 → 1.000" in page.text


def test_a_run_without_any_metric_still_has_a_report(tmp_path):
    (tmp_path / "config.toml").write_text("[a]\n")
    page = Page(write_report(tmp_path).read_text())
    assert "No metrics yet" in page.text
    assert page.figures == []


def test_damaged_lines_are_counted_and_the_others_shown(tmp_path):
    run = grpo_run(tmp_path / "run", evil="plain")
    for path in (run.metrics, run.generations / "train.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join([*lines[:1], "nonsense\n", '{"step": 1}\n', *lines[1:]]))
    page = page_of(run)
    assert "Left out: 4 damaged lines of the run's files, the first: " in page.text
    assert "metrics.jsonl:2: not a line of JSON" in page.text
    assert page.titles() == page_of(grpo_run(tmp_path / "whole", evil="plain")).titles()


def test_numbers_that_are_not_finite_are_left_out(tmp_path):
    infinite = {"train/loss": float("nan"), "train/reward": float("inf"), "async/lag_histogram": [0, 0]}
    page = page_of_metrics(tmp_path / "run", infinite, {"train/loss": 1.0}, {"train/loss": 2.0})
    assert page.titles() == ["Loss"]
    assert (page.figures[0]["x"], page.figures[0]["lines"][0]["values"]) == ([2, 3], [1.0, 2.0])


def test_metrics_unknown_to_the_report_are_drawn_too(tmp_path):
    values = ({"mine/<b>": 1.0 * i, "alone": 2.0 * i, **{f"many/{n}": 1.0 * i for n in range(8)}} for i in (1, 2))
    page = page_of_metrics(tmp_path / "run", *values)
    assert page.titles() == ["Other", "Other: many", "Other: many", "Other: mine"]
    assert page.figures[3]["legend"] == ["<b>"]
    assert not [tag for tag, _ in page.tags if tag == "b" and not _.keys() & {"data-line"}]


def test_shares_times_and_numbers_of_one_group_have_axes_of_their_own(tmp_path):
    units = (
        {"mine/a_share": 0.1 * i, "mine/b_share": 0.2 * i, "mine/kl_nats": 0.3 * i, "mine/wait_s": 9.0 * i}
        for i in (1, 2)
    )
    page = page_of_metrics(tmp_path / "run", *units)
    assert page.titles() == ["Other: mine"] * 3
    assert {(figure["unit"], *figure["legend"]) for figure in page.figures} == {
        ("%", "a share", "b share"), ("nats", "kl nats"), ("s", "wait s"),
    }  # fmt: skip


def test_what_is_the_same_in_every_update_is_a_line_of_text(tmp_path):
    values = [
        {"train/reward": 0.1 * i, "engine/learning_rate": 1e-6, "groups/dropped": 0.0, "groups/filtered": i}
        for i in (1, 2, 3)
    ]
    page = page_of_metrics(tmp_path / "run", *values)
    assert page.titles() == ["Reward", "Groups left out"]
    assert page.figures[1]["legend"] == ["groups filtered"]
    said = " ".join(page.text.split())
    assert "The same in every update: learning rate 1e-06" in said
    assert "The same in every update: groups dropped 0 " in said
    assert "groups dropped 0 groups" not in said
    assert page_of_metrics(tmp_path / "first", values[0]).titles() == []  # one update is no curve


def test_sources_of_a_mix_share_figures(tmp_path):
    whats = ("share", "success_rate", "reward", "too_hard")
    names = [f"mix/{name}/{what}" for name in ("words", "a<b") for what in whats]
    more = ("curriculum/too_hard", "mix/words/scoring/queue")
    page = page_of_metrics(tmp_path / "run", *(dict.fromkeys([*names, *more], value) for value in (0.5, 0.6)))
    mixed = ["Mix: groups", "Mix: success", "Mix: reward", "Mix: too hard"]
    assert page.titles() == ["Curriculum", *mixed, "Other: mix/words/scoring"]
    for figure in page.figures[1:5]:
        assert figure["legend"] == ["a<b", "words"]


def test_lag_is_drawn_from_its_histogram_or_else_from_its_mean(tmp_path):
    histograms = [{"async/lag_histogram": [3, 1]}, {"async/lag_histogram": [1, 1, 2]}]
    (figure,) = page_of_metrics(tmp_path / "a", *histograms).figures
    assert figure["shares"] == [[0.75, 0.25], [0.25, 0.25, 0.5]]
    (figure,) = page_of_metrics(tmp_path / "b", {"train/lag_mean": 1.5}, {"train/lag_mean": 2.5}).figures
    assert figure["lines"][0]["values"] == [1.5, 2.5]


def test_the_timeline_leaves_out_the_time_between_two_sessions(tmp_path):
    with RunFolder.create(tmp_path / "run") as run:
        run.write_text(run.config, "")
        run.write_text(run.sessions, '{"command":"a","started_s":990.0}\n{"ended_s":1010.0,"end":"interrupted"}\n'
                                     '{"command":"b","started_s":9000.0}\n')  # fmt: skip
        with Timeline(run.timeline) as timeline:
            for start_s in (1000.0, 9050.0):
                timeline.span("trainer-0", "train", start_s, start_s + 4.0)
                timeline.span("rollout-0", "idle", start_s + 4.0, start_s + 10.0)
        page = page_of(run)
    (strip,) = page.figures
    assert (strip["length"], strip["breaks"]) == (20.0, [10.0])
    assert strip["tracks"] == ["trainer-0", "rollout-0"]
    assert {bar["name"]: (bar["slot"], bar["at"]) for bar in strip["bars"]} == {
        "idle": (-1, [[1, 4.0, 6.0], [1, 14.0, 6.0]]), "train": (0, [[0, 0.0, 4.0], [0, 10.0, 4.0]]),
    }  # fmt: skip
    assert "the time between is left out" in page.text


def test_before_and_after_are_shown_where_there_are_enough_updates_and_with_intervals(tmp_path):
    few = page_of_metrics(tmp_path / "few", *({"train/reward": 0.1 * step} for step in range(6)))
    assert "Before and after" not in few.text
    noisy = [{"train/reward": step / 100 + 0.01 * (-1) ** step, "train/loss": 1.0 / (step + 1)} for step in range(40)]
    said = page_of_metrics(tmp_path / "many", *noisy).marked_text()
    rewards = [values["train/reward"] for values in noisy]
    error = 1.96 * statistics.stdev(rewards[:10]) / math.sqrt(10)
    before, after = (
        f"{mean:.3f} ({mean - error:.3f} to {mean + error:.3f})"
        for mean in map(statistics.mean, (rewards[:10], rewards[-10:]))
    )
    assert f"|reward|{before}|{after}|+0.300 ± {math.sqrt(2) * error:.3f}|10 updates|" in said
    assert "|loss|0" not in said, "of a policy it says little"
    with RunFolder.create(tmp_path / "held") as run:
        run.write_text(run.config, "")
        with MetricsLog(run, tensorboard=False) as log:
            for step, value in ((0, 0.25), (9, 0.75)):
                ends = {"eval/accuracy_low": value - 0.1, "eval/accuracy_high": value + 0.1, "eval/items": 64.0}
                log.write(step, {"eval/accuracy": value, "eval/reward": value, **ends})
        said = page_of(run).marked_text()
    assert "|held-out accuracy|0.250 (0.150 to 0.350)|0.750 (0.650 to 0.850)|+0.500 ± 0.141|64 items|" in said
    assert "held-out reward" not in said, "which is the accuracy here"


def test_a_page_says_what_the_run_is_and_a_model_cannot_write_on_it(tmp_path):
    with RunFolder.create(tmp_path / "run") as run:
        run.write_text(run.config, '[model]\npath = "a/<b>Tiny"\n[data]\npath = "q.jsonl"\n')
        run.write_text(run.sessions, json.dumps({"command": f"app {EVIL}", "started_s": 1.0}) + "\n")
        page = page_of(run)
    assert "<b>Tiny on q.jsonl" in page.text
    assert EVIL in " ".join(page.text.split())
    assert len(page.scripts) == 3
    assert "1970-01-01 " in page.text
    assert re.search(r"\d\d:\d\d [A-Z]{3,4}\n", page.text), "times have their zone"


def test_a_long_run_stays_a_small_page(tmp_path):
    with RunFolder.create(tmp_path / "run") as run:
        run.write_text(run.config, "")
        lines = "".join(f'{{"step":{i},"time_s":{i},"train/reward":{i % 7}}}\n' for i in range(20000))
        run.write_text(run.metrics, lines)
        with Timeline(run.timeline) as timeline:
            for i in range(6000):
                timeline.span("trainer-0", f"update {i}", i, i + 0.9)
        page = page_of(run)
    reward, strip = page.figures
    assert len(reward["x"]) <= 1500
    assert reward["x"][-1] == 19999
    faint, smooth = (line["values"] for line in reward["lines"])
    assert set(faint) <= set(range(7))
    assert all(2.9 < value < 3.1 for value in smooth[100:-100])  # of all 20,000 values, not of those that are drawn
    assert len(strip["bars"]) == 1  # "update 1", "update 2", ... are one kind of span
    assert len(strip["bars"][0]["at"]) <= 3000


def test_a_folder_without_a_run_has_no_report(tmp_path):
    with pytest.raises(RunFolderError, match="not a run folder"):
        write_report(tmp_path)


def test_images_of_a_prompt_stand_beside_it_and_nothing_else_is_loaded(tmp_path):
    image = "data:image/png;base64,iVBORw0KGgo="
    addresses = (
        image,
        "http://evil.example/x.png",
        'data:image/png;base64,AA=="><script>',
        "data:text/html;base64,AA==",
    )
    run = grpo_run(tmp_path / "run", steps=1)
    with GenerationsLog(run) as log:
        log.write(
            [Generation(step=1, kind="train", version=0, prompt="p", completion="c", reward=1.0, images=addresses)]
        )
    page = page_of(run)
    assert [attrs["src"] for tag, attrs in page.tags if tag == "img"] == [image]
    assert "beside update" not in page.text  # of one validation there is nothing to compare

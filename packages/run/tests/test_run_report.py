"""A report tells what was measured, leaves out what was not, and lets no completion become part of the page."""

import json
import re
import socket
import threading
import urllib.error
import urllib.request
from html.parser import HTMLParser

import plotly.graph_objects as go
import pytest

from offbeat_run import (
    Generation,
    GenerationsLog,
    MetricsLog,
    RunFolder,
    Timeline,
    serve_report,
    write_report,
)
from offbeat_run._report.page import _script_json
from offbeat_types import ConfigError, RunFolderError

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
        self.text, self.scripts = "", []
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

    @property
    def figures(self):
        return list(json.loads(self.scripts[1]))

    def titles(self):
        return [str(attrs["aria-label"]) for tag, attrs in self.tags if attrs.get("class") == "plot"]


def grpo_run(path, *, steps=40, evil=EVIL):
    run = RunFolder.create(path)
    run.write_text(run.config, f"# {evil}\n[rollout]\ntemperature = 1.0\n")
    with MetricsLog(run, tensorboard=False) as log, Timeline(run.timeline) as timeline, GenerationsLog(run) as samples:
        for step in range(1, steps + 1):
            log.write(step, {**GRPO, "async/lag_histogram": [3, 5, 1]}, time_s=1000.0 + step)
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
    assert "2.5%" in page.text  # held-out accuracy before
    assert "100.0%" in page.text  # and after


def test_every_figure_is_one_that_plotly_knows(tmp_path):
    page = page_of(grpo_run(tmp_path / "run"))
    assert len(page.figures) == len(page.titles())
    for figure in page.figures:
        go.Figure(data=figure["data"], layout=figure["layout"])  # raises for a name or value plotly does not have
        assert figure["data"]


def test_the_plotting_library_is_embedded_once_and_nothing_comes_from_elsewhere(tmp_path):
    page = page_of(grpo_run(tmp_path / "run", evil="plain"))
    assert sum("plotly.js v" in script for script in page.scripts) == 1
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
    losses = [{"train/loss": 3.0 / step, "eval/loss": 4.0 / step, "perf/tokens_per_s": 9000.0} for step in range(1, 5)]
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
    page = page_of_metrics(tmp_path / "run", infinite, {"train/loss": 1.0})
    assert page.titles() == ["Loss"]
    assert page.figures[0]["data"][0]["y"] == [1.0]


def test_metrics_nobody_told_the_report_about_are_drawn_too(tmp_path):
    page = page_of_metrics(tmp_path / "run", {"mine/<b>": 1.0, "alone": 2.0, **{f"many/{i}": 1.0 for i in range(8)}})
    assert page.titles() == ["Other", "Other: many", "Other: many", "Other: mine"]
    assert page.figures[3]["data"][0]["name"] == "&lt;b&gt;"


def test_sources_of_a_mix_share_figures(tmp_path):
    whats = ("share", "success_rate", "reward", "too_hard")
    values = {f"mix/{name}/{what}": 0.5 for name in ("words", "a<b") for what in whats}
    page = page_of_metrics(tmp_path / "run", {**values, "curriculum/too_hard": 0.1, "mix/words/scoring/queue": 1.0})
    mixed = ["Mix: groups", "Mix: success", "Mix: reward", "Mix: too hard"]
    assert page.titles() == ["Curriculum", *mixed, "Other: mix/words/scoring"]
    for figure in page.figures[1:5]:
        assert [trace["name"] for trace in figure["data"]] == ["a&lt;b", "words"]


def test_lag_is_drawn_from_its_histogram_or_else_from_its_mean(tmp_path):
    histograms = [{"async/lag_histogram": [3, 1]}, {"async/lag_histogram": [1, 1, 2]}]
    (figure,) = page_of_metrics(tmp_path / "a", *histograms).figures
    assert figure["data"][0]["z"] == [[0.75, 0.25], [0.25, 0.25], [0, 0.5]]
    (figure,) = page_of_metrics(tmp_path / "b", {"train/lag_mean": 1.5}).figures
    assert figure["data"][0]["y"] == [1.5]


def test_a_long_run_stays_a_small_page(tmp_path):
    with RunFolder.create(tmp_path / "run") as run:
        run.write_text(run.config, "")
        lines = "".join(f'{{"step":{i},"time_s":{i},"train/reward":0.5}}\n' for i in range(20000))
        run.write_text(run.metrics, lines)
        with Timeline(run.timeline) as timeline:
            for i in range(6000):
                timeline.span("trainer-0", f"update {i}", i, i + 0.9)
        page = page_of(run)
    reward, strip = page.figures
    assert len(reward["data"][1]["x"]) <= 1500
    assert reward["data"][1]["x"][-1] == 19999
    assert len(strip["data"]) == 1  # "update 1", "update 2", ... are one kind of span
    assert len(strip["data"][0]["x"]) <= 3000


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


def test_the_report_is_served_on_loopback_alone(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    run = RunFolder.open(tmp_path / "run", write=False)
    threading.Thread(target=serve_report, args=(run, port), daemon=True).start()
    assert b"<html" in fetch(f"http://127.0.0.1:{port}/")
    assert b"<html" in fetch(f"http://localhost:{port}/")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/../config.toml", timeout=10)
    # A page elsewhere can have its own name lead here (DNS rebinding), and would read what we answer.
    for host in (f"evil.example:{port}", "127.0.0.1", "", f"127.0.0.1:{port}.evil.example"):
        request = urllib.request.Request(f"http://127.0.0.1:{port}/", headers={"Host": host})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(request, timeout=10)


def fetch(url):
    """Read a page that may take a moment to be there."""
    for _ in range(200):
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return bytes(answer.read())
        except urllib.error.URLError:
            threading.Event().wait(0.05)
    raise AssertionError(f"{url} never answered")


@pytest.mark.parametrize("port", [0, 70000])
def test_a_port_that_cannot_be_is_refused(tmp_path, port):
    with pytest.raises(ConfigError, match="port"):
        serve_report(RunFolder(tmp_path, None), port)

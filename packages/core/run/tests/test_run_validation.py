"""What a validation gave: estimates of its items, tables, histories, and two evaluations side by side."""

import json

import msgspec
import pytest

from offbeat_core import ConfigError, DataError, RunFolderError
from offbeat_run import (
    AnswersLog,
    EvalFolder,
    Generation,
    ItemAnswers,
    RunFolder,
    SampledAnswer,
    read_answers,
    summarize,
    table_markdown,
    table_text,
    write_comparison,
)
from offbeat_run._log.run_log import GenerationsLog
from offbeat_run._metrics.metrics import MetricsLog
from offbeat_run._report.page import write_report
from offbeat_run._validation.items import item_histories

EVIL = "</pre><script>alert(1)</script>"


def item(number, votes, right, step=0, **about):
    """An item whose samples vote so; those that vote for `right` are right."""
    samples = tuple(
        SampledAnswer(
            reward=2.0 * (vote == right),
            right=vote == right,
            vote=vote,
            num_tokens=10 * (at + 1) ** 2 + number,
            num_turns=at,
            stop_reason="length" if at == 0 else "eos",
            versions=((step, 4), (step + at, 6)),
            text=f"says {vote} {EVIL}",
        )
        for at, vote in enumerate(votes)
    )
    return ItemAnswers(
        step=step, item=number, prompt=f"question {number} {EVIL}", answer=right, samples=samples, **about
    )


ITEMS = [
    item(0, ["7", "7", "8", None], "7", step=5),
    item(1, ["1", "2", "2", "2"], "1", step=5),
    item(2, [], "3", step=5),
]


def test_a_summary_holds_the_estimates_of_its_items():
    summary = summarize("aime", 5, ITEMS, 4, [1, 4])
    values = {name: estimate.value for name, estimate in summary.estimates.items()}
    assert values == pytest.approx(
        {"avg@4": 3 / 8, "pass@1": 3 / 8, "maj@1": 3 / 8, "pass@4": 1.0, "maj@4": 0.5, "reward": 0.75}
    )
    assert (summary.num_items, summary.num_samples, summary.accuracy, summary.reward) == (2, 4, 3 / 8, 0.75)
    assert all(estimate.low <= estimate.value <= estimate.high for estimate in summary.estimates.values())
    assert summary.tokens == pytest.approx({"mean": 75.5, "median": 65.5, "p95": 160.65})
    assert summary.turns == 1.5
    assert summary.cut_share == 0.25
    assert summary.versions == {5: 8}, "by the oldest"
    assert summary.mixed_share == 0.75
    metrics = summary.metrics()
    ends = [metrics.pop(f"eval/aime/{name}_{end}") for name in ("accuracy", "reward") for end in ("low", "high")]
    of = summary.estimates["avg@4"], summary.estimates["reward"]
    assert ends == [end for each in of for end in (each.low, each.high)]
    assert {name: value for name, value in metrics.items() if not name.endswith(("_low", "_high"))} == pytest.approx(
        {
            "eval/aime/accuracy": 3 / 8,
            "eval/aime/pass_at_1": 3 / 8,
            "eval/aime/maj_at_1": 3 / 8,
            "eval/aime/pass_at_4": 1.0,
            "eval/aime/maj_at_4": 0.5,
            "eval/aime/reward": 0.75,
            "eval/aime/response_tokens": 75.5,
            "eval/aime/response_tokens_p95": 160.65,
            "eval/aime/cut_off_share": 0.25,
            "eval/aime/turns": 1.5,
            "eval/aime/versions": 1.0,
            "eval/aime/items": 2.0,
        }
    )


def test_an_item_with_fewer_samples_than_k_is_no_part_of_what_needs_k():
    summary = summarize("aime", 0, [item(0, ["7", "7"], "7"), item(1, ["1"], "2")], 2)
    assert summary.estimates["pass@2"].num_items == 1
    assert summary.estimates["avg@2"].num_items == 2
    assert summarize("aime", 0, [], 2).estimates["pass@2"].num_items == 0


def test_the_held_out_prompts_keep_their_names_and_one_sample_has_no_pass_at_k():
    metrics = summarize("held-out", 0, [item(0, ["7"], "7")], 1).metrics()
    assert {"eval/accuracy", "eval/reward", "eval/response_tokens"} <= metrics.keys()
    assert not any("pass" in name for name in metrics)


def test_tables_say_the_same_in_every_form():
    summaries = [summarize("aime", 5, ITEMS, 4), summarize("held-out", 5, [item(0, ["7"], "7")], 1)]
    text, markdown = table_text(summaries), table_markdown(summaries)
    assert len({len(line.rstrip().split("|")) for line in markdown.splitlines()}) == 1
    for said in ("aime", "avg@4", "pass@4", "maj@4", "0.3750", "held-out", "25.0%"):
        assert said in text
        assert said in markdown


def test_answers_survive_a_kill_and_are_cut_back_on_resume(tmp_path):
    with AnswersLog(tmp_path) as log:
        log.write("aime", ITEMS)
        log.write("aime", [item(0, ["7"], "7", step=9)])
    path = tmp_path / "aime.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step":9,"it')
    assert read_answers(path) == [*ITEMS, item(0, ["7"], "7", step=9)]
    with AnswersLog(tmp_path, resume_step=5) as log:
        log.write("aime", [item(1, ["7"], "7", step=7)])
    assert [each.step for each in read_answers(path)] == [5, 5, 5, 7]


def test_items_that_changed_most_often_come_first():
    answers = [item(number, ["7" if right else "8"], "7", step=step) for step, row in enumerate(["101", "001", "011"])
               for number, right in enumerate(map(int, row))]  # fmt: skip
    histories = item_histories(answers)
    assert [(each.item, each.flips, each.change) for each in histories] == [(0, 1, -1.0), (1, 1, 1.0), (2, 0, 0.0)]
    [halves] = item_histories([item(0, ["7", "8"], "7", step=0), item(0, ["8", "8"], "7", step=4)])
    assert halves.flips == 1, "half of the samples right is right"


def test_the_report_shows_items_that_turned_and_answers_side_by_side(tmp_path):
    with RunFolder.create(tmp_path / "run") as run:
        run.write_text(run.config, "")
        run.keep()
        with AnswersLog(run.validation) as log, MetricsLog(run, tensorboard=False) as metrics:
            for step in (0, 4):
                items = [item(0, ["7" if step else "8"], "7", step=step), item(1, ["1"], "1", step=step)]
                log.write("aime", items)
                metrics.write(step, summarize("aime", step, items, 1).metrics())
        with GenerationsLog(run) as log:
            for step in (0, 4):
                log.write([Generation(step=step, kind="validation", set="aime", version=step, prompt="1+1=",
                                      completion=f"after {step} {EVIL}", reward=step / 4)])  # fmt: skip
        page = write_report(run).read_text()
    assert "Of 2 items 1 were right more often in the validation of update 4 than in that of update 0" in page
    assert "aime: update 0 beside update 4" in page
    assert "Validation: aime" in page
    assert '"low":[' in page
    assert '"high":[' in page
    assert EVIL not in page


def folder(path, items, model="a", **asked):
    with EvalFolder(path, {"model": model}, {"aime": asked}) as held:
        for each in items:
            held.write("aime", each)
        held.write_table([summarize("aime", 0, items, 2)])
    return path


def test_an_evaluation_goes_on_with_its_own_answers_only(tmp_path):
    folder(tmp_path / "a", [item(0, ["7", "7"], "7")], n=2)
    with EvalFolder(tmp_path / "a", {"model": "a"}, {"aime": {"n": 2}, "other": {"n": 1}}) as held:
        assert list(held.answered("aime")) == [0]
        assert held.answered("other") == {}
        with pytest.raises(RunFolderError, match="is working in this"):
            EvalFolder(tmp_path / "a", {}, {}).__enter__()
    with EvalFolder(tmp_path / "a", {"model": "a"}, {"other": {"n": 1}}):
        pass  # which says nothing of the answers of aime
    with pytest.raises(RunFolderError, match="answers of the set aime from other weights"):
        EvalFolder(tmp_path / "a", {"model": "a"}, {"aime": {"n": 4}}).__enter__()
    table = json.loads((tmp_path / "a" / "table.json").read_text())
    assert table["model"] == "a"
    assert table["sets"][0]["estimates"]["pass@2"]["value"] == 1.0


def test_two_evaluations_stand_side_by_side_item_by_item(tmp_path):
    first = [item(0, ["8", "8"], "7"), item(1, ["1", "1"], "1"), item(2, ["1", "2"], "1"), item(3, ["1"], "1")]
    second = [item(0, ["7", "7"], "7"), item(1, ["1", "2"], "1"), item(2, ["1", "2"], "1"), item(3, [], "1")]
    folders = folder(tmp_path / "a", first), folder(tmp_path / "b", second, model="/models/b")
    said = write_comparison(*folders, tmp_path / "page.html")
    assert said.startswith("aime: 0.5000 -> 0.6667, by +0.1667 (95% interval ")
    assert said.endswith("of 3 items 1 gained, 1 lost\n")
    page = (tmp_path / "page.html").read_text()
    assert page.index("question 0") < page.index("question 1") < page.index("question 2")
    assert "says 8" in page
    assert "<script" not in page
    with pytest.raises(ConfigError, match="no set x in common"):
        write_comparison(*folders, tmp_path / "page.html", ["x"])
    other = [msgspec.structs.replace(each, prompt="another") for each in second]
    with pytest.raises(DataError, match="ask different things: item 0"):
        write_comparison(folders[0], folder(tmp_path / "c", other), tmp_path / "page.html")
    with pytest.raises(RunFolderError, match="not the folder of an evaluation"):
        write_comparison(tmp_path, folders[0], tmp_path / "page.html")

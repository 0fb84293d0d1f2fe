"""The page of speeds: a part for each benchmark, written after each, with what was wanted of it."""

import pytest
from bench import all as speeds

ROWS = [{"what": speeds.GRPO, "dtype": "bfloat16", "offbeat": 4.0, "trl": 1.0, "ratio": 4.0}]


def test_a_bound_is_met_missed_or_not_measured():
    measures = {measure.what: measure for measure in speeds.BENCHES["trl"].measures}
    wanted = [
        ("GRPO", ROWS, "met"),
        ("GRPO", [{**ROWS[0], "ratio": 3.9}], "missed"),
        ("SFT", ROWS, "not measured"),
        ("memory of a GRPO step", [{"what": speeds.MEMORY, "ratio": 0.4}], "met"),
        ("memory of a GRPO step", [{"what": speeds.MEMORY, "ratio": 0.6}], "missed"),
        ("SFT", [{"what": speeds.SFT, "ratio": ""}], "not measured"),
    ]
    for what, rows, verdict in wanted:
        measure = measures[what]
        assert speeds.judge(measure, speeds.value_of(measure, rows))["verdict"] == verdict


def test_parts_in_bfloat16_are_left_out_where_its_products_are_slow(tmp_path, monkeypatch, capsys):
    page = tmp_path / "performance.md"
    ran = []
    monkeypatch.setattr(speeds, "run", lambda bench, model: (ran.append(bench.title), ([{"work": "batch 1"}], 1.0))[1])
    arguments = ["--model", str(tmp_path), "--out", str(page)]
    for speed, expected in ((0.2, False), (2.0, True)):
        ran.clear()
        monkeypatch.setattr(speeds, "bfloat16_speed", lambda speed=speed: speed)
        assert speeds.main(arguments) == 1, "nothing was measured, so no bound is met"
        assert (speeds.BENCHES["trl"].title in ran) == expected
        assert speeds.BENCHES["trl_float32"].title in ran
        assert ("trl is left out" in capsys.readouterr().out) != expected


def test_a_part_is_written_in_its_place_and_the_others_stay(tmp_path):
    page = tmp_path / "performance.md"
    first = {name: speeds.section(name, speeds.BENCHES[name], ROWS, 60.0) for name in ("trl", "changes")}
    speeds.write_page(page, first)
    again = speeds.read_sections(page)
    assert {name: text.strip() for name, text in again.items()} == {name: text.strip() for name, text in first.items()}
    again["generation"] = speeds.section("generation", speeds.BENCHES["generation"], [{"work": "batch 1"}], 1.0)
    speeds.write_page(page, again)
    text = page.read_text()
    places = [text.index(f"## {speeds.BENCHES[name].title}") for name in ("generation", "trl", "changes")]
    assert places == sorted(places)
    assert "| GRPO | 4 | at least 4 | 6 | met |" in text


def test_a_benchmark_that_fails_ends_the_hour_with_its_words(tmp_path):
    wrong = speeds.Bench(title="wrong", words=("quickstart.py", "--seeds", "-1"), takes_model=False)
    with pytest.raises(SystemExit, match="ended with 1"):
        speeds.run(wrong, tmp_path)

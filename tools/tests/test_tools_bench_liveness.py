"""The bench of the liveness monitor: it alternates, it reports, and its parts run on real ranks."""

import pytest
from bench import liveness


@pytest.mark.parametrize("part", [pytest.param("monitor", marks=pytest.mark.nightly), "all_reduce"])
def test_each_part_runs_on_two_ranks(part):
    rows = liveness.measure(part, 2, 1)
    assert rows
    if part == "all_reduce":
        assert [row["bytes"] for row in rows] == list(liveness.SIZES_BYTES)
        assert all(row["without_us"] > 0 and row["with_us"] > 0 and row["ratio"] > 0 for row in rows)
    else:
        assert all(row["share"] < 1 for row in rows)


def test_the_report_has_a_line_for_each_figure(capsys):
    timed = {"ranks": 2, "without_us": 100.0, "with_us": 103.0, "ratio": 1.03}
    results = {
        "all_reduce": [{"bytes": 4, **timed}],
        "step": [timed],
        "monitor": [{"stall_after_s": 60.0, "threads": 1, "share": 0.0012}],
    }
    liveness.report(results)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["4", "B", "2", "100.0", "103.0", "3.0", "1.030"]
    assert lines[2] == "training step, 2 ranks: 0.1 ms without, 0.1 ms with, ratio 1.030"
    assert lines[3] == "monitor at stall_after_s = 60, 1 threads: 0.12% of a core per process"

"""The bench of a large run's look: both ways of looking come to the same verdict, and the brief one reads far less."""

from bench import liveness_scale


def test_the_brief_look_comes_to_the_same_verdict_and_reads_a_part():
    row = liveness_scale.measure(128, 30)
    assert row["brief_mb"] < row["full_mb"]
    assert min(row["brief_s"], row["full_s"], row["answer_ms"]) > 0

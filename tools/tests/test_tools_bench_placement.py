"""The placement bench times every case, and decides all random ones."""

import json

from bench import placement


def test_every_case_is_timed_and_every_random_one_decided() -> None:
    said: list[str] = []
    placement.main(["--nodes", "16", "--repeats", "1", "--random", "60", "--json"], said.append)
    found = json.loads("\n".join(said))
    outcomes = {row["case"]: row["outcome"] for row in found["rows"]}
    assert len(outcomes) == 10
    assert outcomes["widths 3 + 5, nothing left over"] == "plan"
    assert outcomes["widths 3 + 5, one too many"].startswith("refused")
    assert all(row["median_s"] > 0 for row in found["rows"])
    assert set(found["random"]["outcomes"]) == {"plan", "proven impossible"}
    assert sum(found["random"]["outcomes"].values()) == 60


def test_the_table_is_readable() -> None:
    said: list[str] = []
    placement.main(["--nodes", "8", "--repeats", "1", "--random", "5"], said.append)
    assert said[0].startswith("8 nodes of 8\n\n| wanted |")
    assert said[-1].startswith("\nof 5 random cases: ")

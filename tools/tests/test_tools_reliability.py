"""The table of docs/reliability.md, and the tools that do harm to a run."""

import random
import subprocess
import sys
from pathlib import Path

import elastic
import pytest
import reliability
from reliability import DOCUMENT, Outcome, _row, read_table, table
from role_faults import Job, accounting_complaints
from run_faults import FAULTS, Fault, slowed

[KILLED] = [fault for fault in FAULTS if fault.name == "rollout engine killed"]


def test_rows_that_are_made_again_leave_the_others_as_they_are() -> None:
    outcome = Outcome(noticed_s=0.12, again_s=3.0, reissued=4, repeated=0, reward=0.987, complaints=())
    rows = {fault.name: _row(fault, outcome) for fault in (KILLED, FAULTS[-1])}
    page = f"before\n<!-- written by tools/reliability.py -->\n{table(rows)}\n<!-- end -->\n| not | ours |"
    assert {name: read_table(page)[name] for name in rows} == rows
    assert rows[KILLED.name][2:6] == ["0.1 s", "3.0 s", "4 prompts in flight, issued again", "0.99"]


def test_every_row_of_the_page_is_of_a_fault_there_is_and_ends_with_exact_accounting() -> None:
    rows = {name: row for name, row in read_table(DOCUMENT.read_text()).items() if name not in ("fault", "---")}
    assert rows
    assert rows.keys() <= {fault.name for fault in FAULTS}
    assert {row[-1] for row in rows.values()} == {"every prompt 10 times in 10 epochs"}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_that_ends_the_run_says_so_or_is_a_kill(fault: Fault) -> None:
    assert fault.ends_with <= 0 or fault.noticed_by


def test_accounting_that_is_wrong_is_complained_about(tmp_path: Path) -> None:
    (tmp_path / "generations").mkdir()
    lines = [f'{{"prompt": "{prompt}"}}\n' for prompt in "aabbc"]
    (tmp_path / "generations" / "train.jsonl").write_text("".join(lines))
    steps = [f'{{"step": {step}, "time_s": 0.0, "train/reward": 0.5}}\n' for step in (1, 2, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(steps))
    complaints = accounting_complaints(tmp_path, num_prompts=3, num_epochs=2, per_update=2)
    assert len(complaints) == 2
    assert "{2: 2, 1: 1}" in complaints[0]
    assert "updates 1 to 3 once each required, got [1, 2, 2]" in complaints[1]


def test_a_process_is_slowed_and_goes_on_afterwards() -> None:
    code = "import sys, time\nsys.stdin.readline()\nprint(sum(range(1000)))"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        with slowed(child.pid, 0.5, period_s=0.02):
            random.random()
        said, _ = child.communicate("go\n", timeout=60)
    assert said.strip() == "499500"


def test_a_text_goes_between_its_own_mark_and_the_next_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- one -->\nold\n<!-- end -->\nkept\n<!-- two -->\nold\n<!-- end -->\n")
    monkeypatch.setattr(reliability, "DOCUMENT", page)
    reliability.put_text("<!-- one -->", "new")
    assert page.read_text() == "<!-- one -->\nnew\n<!-- end -->\nkept\n<!-- two -->\nold\n<!-- end -->\n"
    with pytest.raises(SystemExit, match="holds no '<!-- three -->'"):
        reliability.put_text("<!-- three -->", "new")


def test_engines_that_bring_nothing_and_prompts_issued_again_are_complained_about(tmp_path: Path) -> None:
    job = Job.make(tmp_path, num_epochs=1)
    (job.run / "generations").mkdir(parents=True)
    (job.run / "generations" / "train.jsonl").write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(20)))
    steps = [f'{{"step": {n}, "time_s": 0.0, "train/reward": 0.5, "groups/reissued": {n // 5}}}\n' for n in range(1, 6)]
    (job.run / "metrics.jsonl").write_text("".join(steps))
    first, second = elastic.what_is_wrong(job, [(1, 10.0), (2, 20.0), (3, 19.0), (1, 11.0)])
    assert first == "1 prompts issued again"
    assert second == "3 engines are no faster than 2: 19.0 against 20.0 tokens/s"
    assert elastic.table([(1, 10.0), (2, 20.0)]).splitlines()[-1] == "| 2 | 20 | 2.00 |"

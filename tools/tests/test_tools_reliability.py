"""The table of docs/reliability.md, and the tools that do harm to a run."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
from reliability import DOCUMENT, FAULTS, Fault, Outcome, _row, read_table, slowed, table
from role_faults import accounting_complaints

KILLED = FAULTS[0]


def test_rows_that_are_made_again_leave_the_others_as_they_are() -> None:
    outcome = Outcome(noticed_s=0.12, again_s=3.0, reissued=4, repeated=0, complaints=())
    rows = {fault.name: _row(fault, outcome) for fault in FAULTS[:2]}
    page = f"before\n<!-- written by tools/reliability.py -->\n{table(rows)}\n<!-- end -->\n| not | ours |"
    assert {name: read_table(page)[name] for name in rows} == rows
    assert rows[KILLED.name][2:5] == ["0.1 s", "3.0 s", "4 prompts in flight, issued again"]


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

"""The examples of the documentation run, on as many ranks as they say, and print what stands below them."""

import re
from pathlib import Path

import pytest
from fault_runs import FaultRun, run_faults
from workspace import ROOT

# An example, and what it prints where that is shown.
EXAMPLE = re.compile(r"^```python ranks=(\d+)\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
DOCUMENTS = ("axes.md", "liveness.md", "placement.md", "weights.md")
ABORTED = 4


def examples():
    for name in DOCUMENTS:
        text = (ROOT / "docs" / name).read_text()
        for number, (size, source, shown) in enumerate(EXAMPLE.findall(text), start=1):
            # It waits out the timeout of a group.
            marks = [pytest.mark.nightly] if (name, number) == ("liveness.md", 2) else []
            yield pytest.param(int(size), source, shown, id=f"{name}-{number}", marks=marks)


@pytest.mark.parametrize(("size", "source", "shown"), list(examples()))
def test_the_example_does_what_the_page_says(tmp_path: Path, size, source, shown):
    script = tmp_path / "example.py"
    script.write_text(source)
    [(_, seen)] = run_faults([FaultRun(script=script, size=size, limit_s=60)])
    printed = "\n".join(seen.outputs.values())
    missing = [line for line in shown.splitlines() if line.strip() not in printed]
    assert not missing, f"the page shows {missing}\n{printed}"
    expected = ABORTED if "liveness.watch(" in source else 0
    assert set(seen.exit_codes.values()) == {expected}, f"{seen.exit_codes}\n{printed}"


def test_every_page_has_examples_that_run():
    pages = {param.id.rpartition("-")[0] for param in examples()}
    assert pages == set(DOCUMENTS)

"""docs/hanglint.md shows what hanglint prints."""

import os
import re
from pathlib import Path

import pytest
from test_hanglint_command import run

PAGE = Path(__file__).parents[4] / "docs" / "hanglint.md"
EXAMPLE = re.compile(
    r"```python\n(?P<source>.*?)```(?P<between>.*?<!-- example: hanglint -->\n```text\n)(?P<shown>.*?)```", re.DOTALL
)


def timeless(text: str) -> str:
    return re.sub(r"\d+\.\d s\b", "0.0 s", text)


def test_the_example_prints_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OFFBEAT_RENEW=1 writes it anew."""
    text = PAGE.read_text()
    example = EXAMPLE.search(text)
    assert example
    (tmp_path / "loss.py").write_text(example["source"])
    monkeypatch.chdir(tmp_path)
    printed = timeless(run("loss.py", "--no-cache").stdout)
    if os.environ.get("OFFBEAT_RENEW"):
        start, end = example.span("shown")
        PAGE.write_text(text[:start] + printed + text[end:])
    else:
        assert printed == timeless(example["shown"])


def test_the_example_is_clean_under_the_last_stage_alone(tmp_path: Path) -> None:
    example = EXAMPLE.search(PAGE.read_text())
    assert example
    safe = example["source"].replace("if self.is_source_with_outputs():", "if mpu.is_pipeline_last_stage():")
    assert safe != example["source"]
    (tmp_path / "loss.py").write_text(safe)
    assert run(tmp_path, "--no-cache", "--confidence", "low").code == 0

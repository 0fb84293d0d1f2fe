"""The README's example runs, over a server of the stand-in engine."""

import asyncio
import re
from pathlib import Path

from offbeat_testing import tiny_model

README = (Path(__file__).parents[1] / "README.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_first_example_prints_what_was_sampled(start_engine, tmp_path, capsys):
    folder = tiny_model(tmp_path / "model")
    source = EXAMPLES[0].replace("504, 3575, 282", "10, 44, 81").replace("num_samples=8", "num_samples=2")
    source = source.replace("127.0.0.1:8000", start_engine(folder).address)
    names = {}
    exec(compile(source, "README.md", "exec"), names)
    asyncio.run(names["main"](str(folder)))
    printed = capsys.readouterr().out.splitlines()
    assert sum("VersionSegment(version=0" in line for line in printed) == 2


def test_the_second_example_names_what_there_is():
    names = {}
    exec(compile(EXAMPLES[1], "README.md", "exec"), names)
    assert callable(names["publish"])

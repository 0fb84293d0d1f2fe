"""The Python examples of all pages run as they are written, and print what the page shows below them.

The blocks of a page are one program, in their order, in a folder where the models that pages name are small ones. A
block that begins with a comment `# name.py` or `# name.toml` is a file of that name beside it. A block of tests is run
by pytest, and one with `ranks=4` is a program of its own on four ranks.
"""

import multiprocessing
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from doc_blocks import Block, blocks, pages
from fault_runs import FaultRun, run_faults
from workspace import ROOT

from offbeat_testing import tiny_model

FILE_NAME = re.compile(r"# (\w+\.(?:py|toml))\b")
IS_OF_TESTS = re.compile(r"^(?:async )?def test_", re.MULTILINE)
MODEL = "SmolLM2-135M-Instruct"
REWARD_MODEL = "runs/reward/checkpoints/step-000100"
ABORTED = 4
LIMIT_S = 100
# A server of its own imports these once and forks each program: most of a short program's time is their import.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["transformers", "offbeat_engine_torch", "offbeat_rollout_torch", "offbeat_serve"])


def examples(page: Path) -> Iterator[tuple[Block, str]]:
    """Yield each Python block, and the text that the page shows below it."""
    found = list(blocks(page))
    for block, following in pairwise([*found, None]):
        if block is not None and not block.note and (block.language == "python" or FILE_NAME.match(block.text)):
            is_shown = following is not None and following.language == "text" and following.line == _after(block)
            yield block, following.text if is_shown and following is not None else ""


def _after(block: Block) -> int:
    """Return the first line of a fenced block that follows after one empty line."""
    return block.line + block.text.count("\n") + 3


def on_ranks():
    for page in pages():
        for number, (block, shown) in enumerate(examples(page), start=1):
            if size := re.fullmatch(r"ranks=(\d+)", block.info):
                # It waits out the timeout of a group.
                marks = [pytest.mark.nightly] if (page.name, number) == ("liveness.md", 2) else []
                yield pytest.param(int(size[1]), block, shown, id=f"{page}-{number}", marks=marks)


def programs():
    for page in pages():
        if found := [block for block, _ in examples(page) if not block.info]:
            yield pytest.param(found, id=str(page))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make small models under the names that pages use."""
    folder = tmp_path_factory.mktemp("models")
    tiny_model(folder / MODEL, "llama", vocab_size=4000)
    tiny_model(folder / REWARD_MODEL, "llama")
    transformers = pytest.importorskip("transformers")
    with_score = transformers.AutoModelForSequenceClassification.from_pretrained(folder / REWARD_MODEL, num_labels=1)
    with_score.save_pretrained(folder / REWARD_MODEL)
    return folder


@pytest.mark.parametrize(("size", "block", "shown"), list(on_ranks()))
def test_an_example_on_ranks_does_what_the_page_says(
    tmp_path: Path, models: Path, size: int, block: Block, shown: str
) -> None:
    script = tmp_path / "example.py"
    (tmp_path / MODEL).symlink_to(models / MODEL)
    # On the same line, so that the lines a page shows keep their numbers.
    script.write_text(f"import os; os.chdir({str(tmp_path)!r}); {block.text}" if MODEL in block.text else block.text)
    [(_, seen)] = run_faults([FaultRun(script=script, size=size, limit_s=60)])
    printed = "\n".join(seen.outputs.values())
    missing = [line for line in shown.splitlines() if line.strip() not in printed]
    assert not missing, f"the page shows {missing}\n{printed}"
    expected = ABORTED if "liveness.watch(" in block.text else 0
    assert set(seen.exit_codes.values()) == {expected}, f"{seen.exit_codes}\n{printed}"


@pytest.mark.parametrize("found", list(programs()))
def test_the_examples_of_a_page_run(tmp_path: Path, models: Path, found: list[Block]) -> None:
    for folder in models.iterdir():
        (tmp_path / folder.name).symlink_to(folder)
    program, tests = tmp_path / "program.py", tmp_path / "test_page.py"
    named = {block.name: tmp_path / name[1] for block in found if (name := FILE_NAME.match(block.text))}
    for block in found:
        file = named.get(block.name, tests if IS_OF_TESTS.search(block.text) else program)
        with file.open("a", encoding="utf-8") as written:
            written.write(block.text + "\n")
    for module in sorted({file.stem for file in named.values() if file.suffix == ".py"}):
        run_python(["-c", f"import {module}"], tmp_path)
    if program.exists():
        run_program(program)
    if tests.exists():
        run_python(["-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)], tmp_path)


def run_program(program: Path) -> None:
    """Run a program as `python PROGRAM` does, in its folder."""
    folder, printed = str(program.parent), program.with_suffix(".out")
    printed.touch()
    begin = f"import os, sys; os.chdir({folder!r}); sys.argv, sys.path[0] = [{str(program)!r}], {folder!r}"
    output = f"[os.dup2(os.open({str(printed)!r}, os.O_WRONLY | os.O_APPEND), each) for each in (1, 2)]"
    program.write_text(f"{begin}; {output}\n{program.read_text()}")
    process = FORKS.Process(target=runpy.run_path, args=(str(program),), kwargs={"run_name": "__main__"})
    process.start()
    process.join(LIMIT_S)
    code = process.exitcode
    process.kill()
    assert code == 0, f"{program}: exit code {code}\n{printed.read_text()}"


def run_python(arguments: list[str], folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, *arguments]
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert ran.returncode == 0, f"{' '.join(arguments)}: exit code {ran.returncode}\n{ran.stdout}\n{ran.stderr}"


def test_a_block_that_is_run_elsewhere_names_the_test_that_reads_the_page() -> None:
    notes = {block.name: block.note for page in pages() for block in blocks(page) if block.note}
    for name, note in notes.items():
        if file := re.fullmatch(r"run by (\S+\.py)", note):
            page = Path(name.rpartition(":")[0])
            assert page.name in (ROOT / file[1]).read_text(), f"{name}: {file[1]} does not read {page.name}"
        else:
            assert re.fullmatch(r"not run: \S.{9,}", note), f"{name}: {note!r} is no reason"

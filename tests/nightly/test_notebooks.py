"""The notebooks of examples/ are executed by a kernel, beside a Hub on loopback."""

import os
from pathlib import Path

import nbclient
import nbformat
import pytest

from offbeat_testing import HubServer, tiny_model

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with HubServer() as hub:
        hub.add("Qwen/Qwen3-0.6B", tiny_model(tmp_path / "model", config={"max_position_embeddings": 40960}))
        for name, value in hub.environment(tmp_path / "cache").items():
            monkeypatch.setenv(name, value)
        yield hub


def outputs_of(cell):
    """Return the HTML that a cell shows, last state of a live view included, and its text."""
    pages = [output["data"]["text/html"] for output in cell.outputs if "text/html" in output.get("data", {})]
    return pages, "".join(output.get("text", "") for output in cell.outputs)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.ipynb")))
def test_a_notebook_runs_as_it_is_written(name, hub, tmp_path):
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "notebooks are kept without outputs"
    work = tmp_path / "work"
    work.mkdir()
    nbclient.NotebookClient(notebook, timeout=800, resources={"metadata": {"path": str(work)}}).execute()
    shown = [outputs_of(cell) for cell in notebook.cells if cell.cell_type == "code"]
    if kept := os.environ.get("OFFBEAT_KEEP_NOTEBOOKS"):
        nbformat.write(notebook, Path(kept) / f"{name}.ipynb")
    live = [page for pages, _ in shown for page in pages if "<polyline" in page]
    assert bool(live) == (name != "watch_stop_resume"), "train() draws curves, and start() does not"
    for page in live:
        assert "ended with code 0" in page
    assert any("<iframe srcdoc=" in page for pages, _ in shown for page in pages)
    assert not any("updates 1/" in text for _, text in shown), "lines of the command are in the view"


def test_the_notebooks_are_there():
    assert [path.stem for path in sorted(EXAMPLES.glob("*.ipynb"))] == ["grpo", "sft_then_dpo", "watch_stop_resume"]

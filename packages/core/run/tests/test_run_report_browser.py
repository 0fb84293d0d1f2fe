"""A report opens in a browser without a network: its plots are drawn, and no completion runs."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
# One that is named must work: then the test fails rather than being skipped.
CHROMIUM = os.environ.get("OFFBEAT_CHROMIUM") or next((path for path in map(shutil.which, NAMES) if path), "")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
    *("--enable-logging=stderr", "--virtual-time-budget=20000"),
)

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium on this machine: apt-get install chromium")


def test_a_report_is_drawn_offline_and_runs_nothing_of_a_completion(tmp_path):
    report = write_a_report(tmp_path / "run")
    dom, messages = opened(report, tmp_path / "profile")
    assert messages == []
    drawn = re.search(r'data-drawn="(\d+)"', dom)
    assert drawn is not None
    num_figures = len(re.findall(r'id="figure-\d+"', dom))
    assert int(drawn[1]) == num_figures >= 13
    assert len(re.findall(r"<canvas", dom)) >= num_figures
    assert "<title>run: run report</title>" in dom  # a script in a completion would have changed it
    assert "<img" not in dom


@pytest.mark.parametrize("width", [420, 1280])
def test_nothing_of_a_report_is_wider_than_a_phone(tmp_path, width):
    page = write_a_report(tmp_path / "run").read_text()
    nonce = re.search(r'nonce="([^"]+)"', page)
    assert nonce is not None
    # A browser without a head has windows no narrower than 500 pixels: the page is laid out in a frame of the width.
    measure = f"""<script nonce="{nonce[1]}">setTimeout(() => {{
      const root = document.documentElement, edges = [...document.querySelectorAll(".plot canvas, .card, figure, td")];
      const right = Math.max(...edges.map((each) => each.getBoundingClientRect().right));
      root.dataset.found = [root.clientWidth, root.scrollWidth, right,
        [...document.querySelectorAll(".plot")].filter((plot) => plot.scrollWidth > plot.clientWidth).length].join(" ");
      parent.postMessage(root.dataset.found, "*");
    }}, 3000);</script></body>"""
    (tmp_path / "inner.html").write_text(page.replace("</body>", measure))
    outer = tmp_path / "outer.html"
    outer.write_text(
        f'<iframe src="inner.html" style="width: {width}px; height: 900px; border: 0"></iframe>'
        "<script>onmessage = (event) => { document.documentElement.dataset.found = event.data; };</script>"
    )
    dom, _ = opened(outer, tmp_path / "profile")
    found = re.search(r'data-found="([^"]+)"', dom)
    assert found is not None
    inner, content, right, num_cut = map(float, found[1].split())
    assert inner == width
    assert content <= width, "the page scrolls sideways"
    assert right <= width
    assert num_cut == 0, "plots are wider than their cards"


def write_a_report(path):
    """The run of the tests beside this one, loaded by its path: tests are no package."""
    beside = Path(__file__).with_name("test_run_report.py")
    spec = importlib.util.spec_from_file_location("run_report_example", beside)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    run = module.grpo_run(path)
    run.close()
    return Path(module.write_report(run))


def opened(page, profile):
    """The page's DOM once its scripts have run, and what it said on the console. No name resolves."""
    blocked = "--host-resolver-rules=MAP * ~NOTFOUND"
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", blocked, "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]

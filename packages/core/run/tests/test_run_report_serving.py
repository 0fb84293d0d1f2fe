"""The report over HTTP: on this machine alone, for those who have its address, written when the run has changed."""

import http.client
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from itertools import pairwise

import pytest

from offbeat_core import ConfigError
from offbeat_run import RunFolder
from offbeat_run._report.serving import ServedReport, serve_report

DEADLINE_S = 60.0
SERVE = """
import sys
from offbeat_run import RunFolder
from offbeat_run._report.serving import serve_report
serve_report(RunFolder.open(sys.argv[1], write=False), int(sys.argv[2]))
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("")
    return RunFolder.open(tmp_path / "run", write=False)


@pytest.fixture
def address(run):
    """Return the address of the report, as a process has printed it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", SERVE, str(run.path), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield re.search(r"http://\S+", process.stdout.readline())[0]
        process.kill()


def fetch(url, **headers):
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        return bytes(answer.read())


def test_the_report_is_served_on_loopback_alone(address):
    assert b"<html" in fetch(address)
    assert b"<html" in fetch(address.replace("127.0.0.1", "localhost"))
    port = int(address.split(":")[2].split("/")[0])
    with pytest.raises(urllib.error.HTTPError, match="404"):
        fetch(f"{address}../config.toml")
    # A page elsewhere can have its own name lead here (DNS rebinding), and would read what we answer.
    for host in (f"evil.example:{port}", "127.0.0.1", "", f"127.0.0.1:{port}.evil.example"):
        with pytest.raises(urllib.error.HTTPError, match="403"):
            fetch(address, Host=host)


def test_another_user_of_this_machine_who_lacks_the_address_reads_nothing(address):
    server, _, path = address.rpartition("http://")[2].partition("/")
    assert len(path) > 30
    for guess in ("", "report.html", path[:-1], f"{path[:-2]}x/", "/"):
        with pytest.raises(urllib.error.HTTPError, match="404") as refused:
            fetch(f"http://{server}/{guess}")
        assert path.strip("/") not in refused.value.read().decode()


def test_a_health_check_may_ask_for_the_head(address):
    server, _, path = address.removeprefix("http://").partition("/")
    lengths = []
    for method in ("HEAD", "GET"):
        connection = http.client.HTTPConnection(server, timeout=DEADLINE_S)
        connection.request(method, f"/{path}")
        answer = connection.getresponse()
        lengths.append((answer.status, answer.headers["Content-Length"], len(answer.read())))
    (head, head_length, head_bytes), (get, length, num_bytes) = lengths
    assert (head, get, head_length, head_bytes, num_bytes) == (200, 200, length, 0, int(length))


def renders(run, changes, render_every_s):
    """Times at which the report was written, where each request comes after a change or after none."""
    served, times = ServedReport(run, 8000, render_every_s), []
    for number, is_changed in enumerate(changes):
        if is_changed:
            run.metrics.write_text("".join(f'{{"step":{at},"time_s":{at},"a":1}}\n' for at in range(number + 1)))
        served._renew()
        times.append(run.report.stat().st_mtime_ns)
        time.sleep(0.02)
    return [first != second for first, second in pairwise(times)]


def test_the_report_is_written_anew_when_the_run_has_changed(run):
    assert renders(run, [True, False, True, False, False, True], render_every_s=0) == [False, True, False, False, True]


def test_the_report_is_not_written_more_often_than_it_may_be(run):
    assert renders(run, [True, True, True, True], render_every_s=DEADLINE_S) == [False] * 3


@pytest.mark.parametrize("port", [0, 70000])
def test_a_port_that_cannot_be_is_refused(tmp_path, port):
    with pytest.raises(ConfigError, match="port"):
        serve_report(RunFolder(tmp_path, None), port)

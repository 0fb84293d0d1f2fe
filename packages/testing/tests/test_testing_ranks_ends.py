"""However a session ends, nothing of its ranks stays: no process, no shared memory, no folder."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import offbeat_testing._ranks._launch  # noqa: F401 - what the forked sessions need

STUCK = """
import os
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
import torch.distributed as dist


@pytest.mark.ranks(2{options})
def test_stuck(rank):
    block = SharedMemory(create=True, size=1024)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    Path(f"pids-{{rank}}").write_text(f"{{os.getpid()}} {{child.pid}} {{block.name}}")
    dist.barrier()
    {end}
"""


class Session:
    """A pytest of its own on the test file above, forked from this one, which has imported torch already."""

    def __init__(self, folder, *arguments, options="", end="time.sleep(1000)"):
        self.folder = folder
        (folder / "tmp").mkdir()
        (folder / "test_stuck.py").write_text(STUCK.format(options=options, end=end))
        self.pid = os.fork()
        if self.pid == 0:
            self._run(["-p", "no:cacheprovider", "-p", "no:asyncio", "-p", "no:hypothesispytest", *arguments])
        self._status = None

    def _run(self, arguments):
        code = 3
        try:
            os.setsid()
            os.chdir(self.folder)
            os.environ["TMPDIR"] = tempfile.tempdir = str(self.folder / "tmp")
            log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for descriptor in (1, 2):
                os.dup2(log, descriptor)
            sys.stdout, sys.stderr = (os.fdopen(os.dup(log), "w", buffering=1) for _ in range(2))
            sys.modules.pop("test_stuck", None)
            code = int(pytest.main(arguments))
        finally:
            sys.stdout.flush()
            os._exit(code)

    def started(self):
        """Process ids of the ranks and of what they started, and the names of their shared memory."""
        deadline_s = time.monotonic() + 60
        while len(found := [path.read_text().split() for path in self.folder.glob("pids-*")]) < 2 or not all(found):
            assert time.monotonic() < deadline_s, (self.folder / "log").read_text()
            time.sleep(0.05)
        return [int(pid) for one in found for pid in one[:2]], [one[2] for one in found]

    def interrupt(self):
        os.kill(self.pid, signal.SIGINT)

    def kill(self):
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.output()

    def output(self):
        """What it wrote, when it has ended."""
        _, self._status = os.waitpid(self.pid, 0)
        return (self.folder / "log").read_text()


@pytest.fixture
def session(tmp_path):
    made = []

    def start(*arguments, **how):
        made.append(Session(tmp_path, *arguments, **how))
        return made[-1]

    yield start
    for one in made:
        one.kill()


def assert_nothing_is_left(pids, blocks, folder):
    deadline_s = time.monotonic() + 10
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline_s, f"still there: {alive}"
        time.sleep(0.05)
    assert not [block for block in blocks if Path("/dev/shm", block).exists()]
    assert not list((folder / "tmp").glob("ranks-*"))


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_nothing_is_left_after_the_deadline(session, tmp_path):
    run = session(options=", deadline_s=3")
    started = run.started()
    assert "were not through after 3 s" in run.output()
    assert_nothing_is_left(*started, tmp_path)


@pytest.mark.nightly
def test_nothing_is_left_after_a_pass_that_forgot_its_child(session, tmp_path):
    run = session(end="block.close(), block.unlink()")
    started = run.started()
    assert "1 passed" in run.output()
    assert_nothing_is_left(*started, tmp_path)


@pytest.mark.nightly
def test_nothing_is_left_after_ctrl_c(session, tmp_path):
    run = session()
    started = run.started()
    run.interrupt()
    assert "KeyboardInterrupt" in run.output()
    assert_nothing_is_left(*started, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["signal", "thread"])
def test_pytest_timeout_ends_the_ranks_too(session, tmp_path, method):
    run = session("--timeout=4", f"--timeout-method={method}")
    pids, _ = run.started()
    assert "Timeout" in run.output()
    # The thread method leaves by os._exit: the ranks go with their parent, what they started and made does not.
    if method == "signal":
        assert_nothing_is_left(*run.started(), tmp_path)
    else:
        assert_nothing_is_left(pids[::2], [], tmp_path / "nowhere")


def test_the_ranks_go_when_the_tests_process_is_killed(session, tmp_path):
    run = session()
    pids, _ = run.started()
    run.kill()
    ranks = pids[::2]
    assert_nothing_is_left(ranks, [], tmp_path / "nowhere")
    for pid in pids[1::2]:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.nightly
def test_workers_of_xdist_have_ranks_of_their_own(tmp_path):
    (tmp_path / "test_two.py").write_text(
        "import pytest\n@pytest.mark.ranks(2)\n@pytest.mark.parametrize('n', [1, 2])\ndef test_it(n): pass"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert "2 passed" in done.stdout, done.stdout


def test_a_session_without_marked_tests_does_not_import_torch(tmp_path):
    (tmp_path / "test_plain.py").write_text(
        "import sys\ndef test_it(): assert {'torch', 'numpy'}.isdisjoint(sys.modules)"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


@pytest.fixture
def joined():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.xfail(raises=pytest.fail.Exception, strict=True, reason="a process that has joined cannot become ranks")
@pytest.mark.ranks(2)
def test_a_tests_process_that_has_joined_a_world_is_refused(joined):
    pass

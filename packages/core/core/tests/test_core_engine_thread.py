import queue
import threading

import pytest

from offbeat_core import EngineThread, OffbeatError, _engine_thread


def engine_thread(**changes):
    parts = {"build": lambda: None, "can_step": lambda: False, "step": lambda: None}
    return EngineThread("engine", **parts | changes)


def test_a_caller_that_asks_while_the_thread_ends_is_answered(monkeypatch):
    """Holds even when the thread had every chance to end between the check of `is_closed` and the put."""
    the_end = threading.Event()

    class Hesitant(queue.SimpleQueue):
        def put(self, job):
            if threading.current_thread().name == "late":
                the_end.set()
                thread.join(timeout_s=0.5)
            super().put(job)

    def ask():
        answers.append(thread.call(lambda: "done"))

    def close_once_asked():
        the_end.wait(30)
        thread.close()

    monkeypatch.setattr(_engine_thread.queue, "SimpleQueue", Hesitant)
    thread, answers = engine_thread(), []
    thread.start().result(timeout=30)
    thread.call(close_once_asked)
    late = threading.Thread(target=ask, name="late", daemon=True)
    late.start()
    late.join(30)
    with pytest.raises(OffbeatError, match="closed"):
        answers[0].result(timeout=10)
    assert thread.join(timeout_s=30)


def test_an_engine_that_cannot_be_built_says_why_and_takes_no_jobs():
    thread = engine_thread(build=lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        thread.start().result(timeout=30)
    with pytest.raises(OffbeatError, match="closed; make a new one"):
        thread.call(lambda: None).result(timeout=30)


def test_jobs_run_between_steps_and_the_engine_is_shut_down_after_the_last():
    done = []
    thread = engine_thread(
        can_step=lambda: len(done) < 2, step=lambda: done.append("step"), shut_down=lambda: done.append("end")
    )
    thread.start().result(timeout=30)
    assert thread.call(lambda: len(done)).result(timeout=30) <= 2
    thread.call(thread.close).result(timeout=30)
    assert thread.join(timeout_s=30)
    assert done[-1] == "end"

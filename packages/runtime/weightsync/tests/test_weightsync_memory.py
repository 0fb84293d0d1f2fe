"""However many weights there are, two buckets are all the memory that a sync takes, on either side."""

from pathlib import Path
from typing import Any

import pytest
from weightsync_memory import be_engine, be_reader, be_trainer, be_writer

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads peak memory from /proc")

MOST_BUCKETS = 2.5
"""Two, and what Python takes for its threads and messages: 64 MiB are a bucket here. The weights are five."""


def test_the_peak_of_extra_memory_between_processes_is_two_buckets(start_peer: Any, host: str) -> None:
    trainer = start_peer(be_trainer, host)
    engine = start_peer(be_engine, trainer.next_text())
    sender_buckets, engine_buckets = float(trainer.next_text()), float(engine.next_text())
    assert sender_buckets < (1.0 if host else MOST_BUCKETS)  # over TCP the bytes have no memory but the kernel's
    assert engine_buckets < (1.0 if host else MOST_BUCKETS)


def test_the_peak_of_extra_memory_by_way_of_the_disk_is_two_buckets(start_peer: Any, tmp_path: Path) -> None:
    assert float(start_peer(be_writer, str(tmp_path)).next_text()) < MOST_BUCKETS
    assert float(start_peer(be_reader, str(tmp_path)).next_text()) < MOST_BUCKETS

"""How much of a parameter one call gathers from the ranks."""

import pytest

from offbeat_engine_torch._parallel.ranks import DEVICE_GATHER_BYTES, GATHER_BYTES, rows_at_once

MIB = 2**20


@pytest.mark.parametrize(("on_cpu", "most_bytes"), [(True, 8 * MIB), (False, 64 * MIB)])
def test_a_call_gathers_what_suits_the_memory_it_lies_in(on_cpu, most_bytes):
    num_rows, num_bytes = 4096, 512 * MIB
    rows = rows_at_once(num_rows, num_bytes, on_cpu=on_cpu)
    assert rows * num_bytes // num_rows == most_bytes == (GATHER_BYTES if on_cpu else DEVICE_GATHER_BYTES)
    assert rows_at_once(2, 1024 * MIB, on_cpu=on_cpu) == 1, "a row at least"
    assert rows_at_once(4096, 0, on_cpu=on_cpu) >= 4096

"""Ranks that one process starts meet at the address it gives them."""

import subprocess
import sys
from dataclasses import asdict

from offbeat_mesh import current_world, open_rendezvous

RANK = """
import sys
from offbeat_mesh import Rendezvous, current_world
place = Rendezvous(**eval(sys.argv[1]))
mesh = place.join("cpu", name=f"trainer-{place.rank}", stall_after_s=60.0)
print(mesh.group("dp").all_gather_data(place.rank))
current_world().leave()
"""


def test_ranks_that_one_process_starts_meet_and_call_each_other() -> None:
    store, places = open_rendezvous("127.0.0.1", 2, start_deadline_s=60.0, call_deadline_s=60.0)
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, repr(asdict(place))], stdout=subprocess.PIPE, text=True)
        for place in places
    ]
    assert [rank.communicate(timeout=90)[0] for rank in ranks] == ["[0, 1]\n", "[0, 1]\n"]
    assert store.port == places[0].port


def test_ranks_wait_for_calls_as_long_as_is_set_and_not_as_for_the_start(run_ranks) -> None:
    def body(rank, num_ranks, store):
        _store, [place] = open_rendezvous("127.0.0.1", 1, start_deadline_s=60.0, call_deadline_s=70.0)
        mesh = place.join("cpu", name="trainer-0", stall_after_s=60.0)
        world = current_world()
        assert world is not None
        with world:
            return [world.deadline_s, mesh.deadline_s]

    [ended] = run_ranks(1, body)
    assert ended.value == [60.0, 70.0], ended.text

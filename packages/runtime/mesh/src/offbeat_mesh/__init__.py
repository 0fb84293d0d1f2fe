"""Groups of processes that compute together (the mesh), and collectives that end well or name the rank at fault.

Names are loaded when they are asked for: importing a part of it does not import torch before that part needs it.
"""

from typing import TYPE_CHECKING

from offbeat_core import load_lazily

if TYPE_CHECKING:
    from offbeat_mesh._calls import break_off, interrupt_calls
    from offbeat_mesh._group import Group, ReduceOp
    from offbeat_mesh._guard import Guard
    from offbeat_mesh._layout import Layout
    from offbeat_mesh._mesh import Mesh
    from offbeat_mesh._rendezvous import Rendezvous, open_rendezvous
    from offbeat_mesh._world import World, current_world, join_world, open_store

__all__ = [
    "Group",
    "Guard",
    "Layout",
    "Mesh",
    "ReduceOp",
    "Rendezvous",
    "World",
    "break_off",
    "current_world",
    "interrupt_calls",
    "join_world",
    "open_rendezvous",
    "open_store",
]

__getattr__, __dir__ = load_lazily(
    __name__,
    {
        "_calls": "break_off interrupt_calls",
        "_group": "Group ReduceOp",
        "_guard": "Guard",
        "_layout": "Layout",
        "_mesh": "Mesh",
        "_rendezvous": "open_rendezvous Rendezvous",
        "_world": "current_world join_world open_store World",
    },
)

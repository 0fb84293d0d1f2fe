"""Groups of processes that compute together (the mesh), and collectives that end well or say who is to blame.

Names are loaded when they are asked for: importing a part of it does not import torch before that part needs it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat_mesh._calls import break_off
    from offbeat_mesh._group import Group, ReduceOp
    from offbeat_mesh._guard import Guard
    from offbeat_mesh._layout import AXES, Layout
    from offbeat_mesh._mesh import Mesh
    from offbeat_mesh._rendezvous import Rendezvous, open_rendezvous
    from offbeat_mesh._world import World, current_world, join_world, open_store

__all__ = [
    "AXES",
    "Group",
    "Guard",
    "Layout",
    "Mesh",
    "ReduceOp",
    "Rendezvous",
    "World",
    "break_off",
    "current_world",
    "join_world",
    "open_rendezvous",
    "open_store",
]

_NAMES = {
    "_calls": "break_off",
    "_group": "Group ReduceOp",
    "_guard": "Guard",
    "_layout": "AXES Layout",
    "_mesh": "Mesh",
    "_rendezvous": "Rendezvous open_rendezvous",
    "_world": "World current_world join_world open_store",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    except AttributeError as error:  # Python would drop it, and say only that the name cannot be imported
        raise ImportError(f"{name} of {__name__} cannot be loaded: {error}") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

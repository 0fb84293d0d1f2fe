"""Any rollout engine as an OpenAI-compatible endpoint, with token ids and policy versions. No torch."""

from offbeat_serve._server import RolloutServer
from offbeat_serve._sessions import Session, Sessions
from offbeat_serve._settings import TOKEN_VARIABLE, ServedModel, ServeSettings

__all__ = [
    "TOKEN_VARIABLE",
    "RolloutServer",
    "ServeSettings",
    "ServedModel",
    "Session",
    "Sessions",
]

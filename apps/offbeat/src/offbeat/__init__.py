"""Training of language models from a script or a notebook: each run is a command of an application. No torch."""

from offbeat._run import CheckpointEvent, EndedEvent, Event, MessageEvent, MetricsEvent, Run, resume
from offbeat._trainings import DPO, GRPO, SFT, import_config

__all__ = [
    "DPO",
    "GRPO",
    "SFT",
    "CheckpointEvent",
    "EndedEvent",
    "Event",
    "MessageEvent",
    "MetricsEvent",
    "Run",
    "import_config",
    "resume",
]

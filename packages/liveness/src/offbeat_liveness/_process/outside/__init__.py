"""What a thread waits for outside torch.distributed: `outside_wait`; whether it may still act: `may_act`."""

from offbeat_liveness._process.outside.idle import may_act
from offbeat_liveness._process.outside.wait import outside_wait

__all__ = ["may_act", "outside_wait"]

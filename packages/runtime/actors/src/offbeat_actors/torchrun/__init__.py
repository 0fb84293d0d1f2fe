"""The `torchrun` launcher: roles on the nodes where torchrun, srun or mpirun has started this program. No Ray."""

from offbeat_actors.torchrun._launcher import TorchrunLauncher

__all__ = ["TorchrunLauncher"]

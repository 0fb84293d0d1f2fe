"""Where a process computes (the device seam) and which groups it belongs to (the mesh)."""

from offbeat_dist._device import Device, DeviceMemory, available_devices, open_device
from offbeat_dist._mesh import AXES, Group, Mesh

__all__ = ["AXES", "Device", "DeviceMemory", "Group", "Mesh", "available_devices", "open_device"]

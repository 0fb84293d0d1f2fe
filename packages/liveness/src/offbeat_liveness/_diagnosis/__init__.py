"""From what all processes say to a verdict. Pure: no clock, no torch, no sockets."""

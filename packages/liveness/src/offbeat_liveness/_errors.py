"""What a caller of offbeat-liveness can put right."""


class LivenessError(ValueError):
    """A setting is out of range, or a script or folder is missing; says what was required, and what was got."""

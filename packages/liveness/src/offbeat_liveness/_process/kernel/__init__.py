"""What the kernel tells of this process and of others (/proc): states, usage, ports."""

"""Checksums of weights that are computed where they lie: of whole buckets, and of parts that processes share."""

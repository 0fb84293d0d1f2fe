"""Settings of a caller."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """Settings of an analysis.

    Attributes:
        exclude: glob patterns of paths, relative to the root, that are not read.
        rules: identifiers to run; empty means all.
        root: what paths of findings are relative to; by default the path given that a file lies under.
        summaries: files that say what libraries do, in the form of `_libraries`, beside those of ours.
        cache_folder: where facts of files are kept between runs; None keeps nothing.
        num_jobs: processes that read files at the same time.
    """

    exclude: tuple[str, ...] = ()
    rules: frozenset[str] = frozenset()
    root: Path | None = None
    summaries: tuple[Path, ...] = ()
    cache_folder: Path | None = None
    num_jobs: int = 1

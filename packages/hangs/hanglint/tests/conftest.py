"""Modules of tests that others of them import."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for hanglint_programs

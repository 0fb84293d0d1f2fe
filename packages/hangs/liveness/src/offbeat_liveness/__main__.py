"""`python -m offbeat_liveness run script.py` and `python -m offbeat_liveness show DIR`."""

import sys

from offbeat_liveness._cli import main

sys.exit(main())

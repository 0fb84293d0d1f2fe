"""`python -m offbeat_dist.liveness run script.py` and `python -m offbeat_dist.liveness show DIR`."""

import sys

from offbeat_dist.liveness._cli import main

sys.exit(main())

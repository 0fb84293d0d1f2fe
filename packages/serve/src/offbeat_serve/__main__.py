"""`python -m offbeat_serve`."""

import sys

from offbeat_serve._cli import main

sys.exit(main())

"""`python -m offbeat_hanglint` is the command `hanglint`."""

import sys

from offbeat_hanglint._command import main

sys.exit(main())

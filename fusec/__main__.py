"""``python -m fusec``: the command line."""

import sys

from fusec.cli import main

sys.exit(main())

"""``python -m fusec``: the command line."""

import sys

from fusec.tools.cli import main

sys.exit(main())

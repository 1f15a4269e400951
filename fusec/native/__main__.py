"""``python -m fusec.native``: what a C compiler is told for a program with ``fusec.h``."""

from fusec.native import flags

print(*flags())

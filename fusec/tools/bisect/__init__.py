"""``fusec bisect``: find the graph, kernel, stage or merge at fault, and a minimal file with it.

A separate process runs the user's program and records its compiles (``recorder``). The part at
fault is an ``Excerpt``, lines of plain torch (``excerpt``), printed as a file that shows the fault
by itself (``source``). Files run in processes that may die (``trial``), and are reduced while they
show the same fault (``smaller``). The smallest one tells which options, which merge and
which stage make the difference (``questions``); for a slowdown, the program itself is timed under
other options. ``hunt`` drives all of this.
"""

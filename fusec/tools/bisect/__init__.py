"""``fusec bisect``: which graph, kernel, stage or merge is at fault, and the least file with it.

A process of its own runs the user's program and watches what is compiled (``recorder``). What it
finds is an ``Excerpt``, some lines of plain torch (``excerpt``), printed as a file that shows the
fault by itself (``source``). Files are run in processes that may die (``trial``), as long as they
show the same fault they become smaller (``smaller``, ``shrink``), and the last one is asked which
options, which merge and which stage make the difference (``questions``); what is slow, the program
itself (``paces``). ``hunt`` is the whole.
"""

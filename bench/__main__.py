"""Everything that can be measured here without a GPU: `python -m bench [--quick] [--out DIR]`."""

from __future__ import annotations

import argparse
import sys

from bench import compile_time, cpu, start


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds: a check")
    parser.add_argument("--out", default="build/bench", help="default %(default)s")
    options = parser.parse_args()
    shared = ["--out", options.out, *(["--quick"] if options.quick else [])]
    return max(cpu.main(shared), compile_time.main(shared), start.main(shared))


if __name__ == "__main__":
    sys.exit(main())

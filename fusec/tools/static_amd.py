"""Facts of a kernel's AMDGPU assembly, as Triton prints it for gfx942 and gfx950.

``static_checks.inspect_kernel`` calls it for targets whose machine code is AMD's. What a compiler
keeps in scratch memory, the metadata says; products are MFMA instructions; local data share is what
shared memory is elsewhere.

Worked example: ``buffer_load_dwordx4 v[2:5], v1, s[0:3], 0 offen`` is a load of 16 bytes, and
``v_mfma_f32_16x16x16_bf16`` a product.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

_LINE = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)")
_LABEL = re.compile(r"^(\.LBB\w+):")
_INSTRUCTION = re.compile(r"^\t([a-z]\w+)(.*)")
_ACCESS = re.compile(r"(?:global|buffer|flat)_(load|store)_(?:lds_)?(\w+)")
_PRODUCT = re.compile(r"v_(?:s?mfma|wmma)_")
_BYTES = dict.fromkeys(("ubyte", "sbyte", "byte", "ubyte_d16", "byte_d16_hi"), 1)
_BYTES |= dict.fromkeys(("ushort", "sshort", "short", "short_d16", "short_d16_hi"), 2)
_BYTES |= {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}


def read_assembly(text: str) -> dict[str, Any]:
    """Return the facts of one kernel's assembly, as fields of ``StaticReport``.

    Registers are a thread's vector registers, accumulation registers among them. ``accesses`` maps
    (line of the source, "load" or "store", bytes) to their number.
    """
    accesses: Counter[tuple[int, str, int]] = Counter()
    opcodes, labels, loops = list[str](), dict[str, int](), dict[int, int]()
    home, line = "", 0
    for shown in text.splitlines():
        if place := _LINE.match(shown):
            home = home or place[1]  # the kernel begins in its own file
            line = int(place[2]) if place[1] == home else 0
        elif label := _LABEL.match(shown):
            labels[label[1]] = len(opcodes)
        elif (found := _INSTRUCTION.match(shown)) and found[1] != "s_nop":
            opcodes.append(found[1])
            if (access := _ACCESS.fullmatch(found[1])) and access[2] in _BYTES:
                accesses[line, access[1], _BYTES[access[2]]] += 1
            goal = found[2].strip() if found[1].startswith(("s_cbranch", "s_branch")) else ""
            if goal in labels:
                loops[labels[goal]] = len(opcodes)
    products = [bool(_PRODUCT.match(opcode)) for opcode in opcodes]
    return {
        "registers": _number(text, "vgpr_count"),
        "spill_bytes": _number(text, "private_segment_fixed_size"),
        "accesses": accesses,
        "barriers": opcodes.count("s_barrier"),
        "instructions": len(opcodes),
        "mma": sum(products),
        "loops": len(loops),
        "dot_loops": sum(any(products[first:last]) for first, last in loops.items()),
    }


def _number(text: str, name: str) -> int:
    """Return a number of the kernel's metadata; 0 where it is not there."""
    found = re.search(rf"^\s+\.{name}:\s+(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else 0

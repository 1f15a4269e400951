"""Decode the opcodes of PTX: the table of rules, by an opcode's first word.

A rule gets an instruction, and a function that returns the declared type of a register. It returns
None for a form that it does not know. Cache hints and scopes of memory order have no effect here
and are dropped: `launch` runs blocks one after the other.
"""

from __future__ import annotations

from fusec.tools.emulator.parse import Instruction, Literal, Register, Symbol, Vector
from fusec.tools.emulator.tile_rules import (
    Kind,
    Row,
    Rule,
    copy_rule,
    mma_rule,
    tensor_rule,
    wgmma_rule,
    without_hint,
)
from fusec.tools.emulator.vocabulary import CODES, FLAG

_INTEGERS = {
    f"{k}{n}": CODES[f"{'S' if k == 's' else 'U'}{n}"] for k in "bus" for n in (8, 16, 32, 64)
}
_FLOATS = {
    name: CODES[name.upper()] for name in ("f16", "bf16", "f32", "f64", "f16x2", "bf16x2", "f32x2")
}
_TYPES = {**_INTEGERS, **_FLOATS, "pred": CODES["PRED"]}
_PACKED = {name: CODES[name.upper()] for name in ("u16x2", "s16x2")}
_ROUNDINGS = {"rn": "RN", "rz": "RZ", "rm": "RM", "rp": "RP", "rna": "RNA"}
_ROUNDINGS |= {"rni": "RN", "rzi": "RZ", "rmi": "RM", "rpi": "RP"}
_SINK = Register("_")


def _type(one: Instruction) -> int | None:
    return _TYPES.get(one.opcode[-1])


_FLAG_OF = {word: FLAG[word.upper()] for word in ("ftz", "sat", "wide", "relu")}
_FLAG_OF |= {"NaN": FLAG["NANS"], "hi": FLAG["HIGH"]}


def _flags(one: Instruction) -> int:
    found = 0
    for word in one.opcode[1:]:
        found |= _FLAG_OF.get(word, 0)
    return found


def _rounding(one: Instruction) -> int:
    for word in one.opcode[1:]:
        if word in _ROUNDINGS:
            return CODES[_ROUNDINGS[word]]
    return CODES["RN"]


def _known(one: Instruction, words: str) -> bool:
    """Return True if all words between the first and the type are among ``words``."""
    return set(one.opcode[1:-1]) <= set(words.split())


def _plain(operation: str, words: str = "", types: dict[str, int] = _INTEGERS) -> Rule:
    """Return a rule for d = f(a, ...), of ``types``, with no modifiers but ``words``."""

    def rule(one: Instruction, _: Kind) -> Row | None:
        if one.opcode[-1] not in types or not _known(one, words):
            return None
        return Row(
            operation,
            one.operands,
            type=types[one.opcode[-1]],
            choice=_rounding(one) if types is not _INTEGERS else 0,
            flags=_flags(one),
        )

    return rule


def _either(integer: Rule, floating: Rule) -> Rule:
    """Return a rule for an opcode that both integers and floats have."""
    return lambda one, kind: (floating if one.opcode[-1] in _FLOATS else integer)(one, kind)


def _floats(operation: str, words: str = "rn ftz sat approx full") -> Rule:
    directed = _plain(operation, words + " rz rm rp", {"f32": CODES["F32"]})
    usual = _plain(operation, words, _FLOATS)

    def rule(one: Instruction, kind: Kind) -> Row | None:
        if len(one.operands) not in _TERMS.get(operation, (2,)):
            return None
        found = usual(one, kind)
        if found is None and operation in _DIRECTED:
            found = directed(one, kind) or _mixed(operation, one)
        return found

    return rule


def _mixed(operation: str, one: Instruction) -> Row | None:
    """Return the row of a sum in f32 that takes all but its last term in 16 bits, or None."""
    words, types = set(one.opcode[1:-2]), one.opcode[-2:]
    if types not in (("f32", "f16"), ("f32", "bf16")) or operation == "fmul":
        return None
    if not words <= {"rn", "rz", "rm", "rp", "sat"}:
        return None
    type_, source = (_FLOATS[name] for name in types)
    return Row(operation, one.operands, type_, source, _rounding(one), _flags(one))


_TERMS: dict[str, tuple[int, ...]] = {"ffma": (4,), "fmin": (3, 4), "fmax": (3, 4)}
_TERMS |= dict.fromkeys(("fadd", "fsub", "fmul", "fdiv", "copysign"), (3,))
"""Operands of operations that have more than one term; the result is one of them."""
_DIRECTED = ("fadd", "fsub", "fmul", "ffma")


def _logic(operation: str) -> Rule:
    return _plain(operation, "", {**_INTEGERS, "pred": CODES["PRED"]})


def _carrying(operation: str, takes: bool) -> Rule:
    """Return a rule for add.cc, addc, madc...: with a carry in, out, or both."""

    def rule(one: Instruction, _: Kind) -> Row | None:
        if one.opcode[-1] not in _INTEGERS or not _known(one, "cc lo hi"):
            return None
        flags = _flags(one) | (FLAG["CARRY_IN"] if takes else 0)
        flags |= FLAG["CARRY_OUT"] if "cc" in one.opcode else 0
        return Row(operation, one.operands, type=_INTEGERS[one.opcode[-1]], flags=flags)

    return rule


def _integer_sum(operation: str) -> Rule:
    packed, single = _plain(operation, "", _PACKED), _carrying(operation, takes=False)
    return lambda one, kind: packed(one, kind) or single(one, kind)


def _product(one: Instruction, kind: Kind) -> Row | None:
    if "cc" in one.opcode:
        return _carrying("imul", takes=False)(one, kind)
    return _plain("imul", "lo hi wide")(one, kind)


# -- moves -----------------------------------------------------------------------------------------


def _mov(one: Instruction, kind: Kind) -> Row | None:
    found = _type(one)
    if found is None or len(one.operands) != 2:
        return None
    to, value = one.operands
    bits = 0 if one.opcode[-1] == "pred" else int(one.opcode[-1].lstrip("busf"))
    if isinstance(value, Vector):
        return Row("pack", one.operands, choice=bits, count=len(value.parts))
    if isinstance(to, Vector):
        n = len(to.parts)
        return Row("unpack", one.operands, choice=bits, count=n)
    integer = found if one.opcode[-1] not in _FLOATS else CODES[f"U{bits}"]
    return Row("mov", one.operands, type=integer)


def _cvta(one: Instruction, _: Kind) -> Row | None:
    # Triton 3.9 takes parameters' addresses in 32 bits; those of 3.7 are generic already.
    windows = {"param": 1 << 60, "local": 1 << 59, "shared": 1 << 58}
    window = 0 if "to" in one.opcode else windows.get(one.opcode[1], 0)
    return Row("or", (*one.operands, window), type=_TYPES[one.opcode[-1]])


def _selp(one: Instruction, _: Kind) -> Row | None:
    bits = one.opcode[-1].lstrip("busf")
    return Row("selp", one.operands, type=CODES[f"U{bits}"]) if bits.isdigit() else None


def _shf(one: Instruction, _: Kind) -> Row | None:
    flags = FLAG["RIGHT"] if one.opcode[1] == "r" else 0
    flags |= FLAG["WRAP"] if "wrap" in one.opcode else 0
    return Row("shf", one.operands, flags=flags)


def _only(operation: str, *opcodes: str) -> Rule:
    """Return a rule for opcodes that have one form."""

    def rule(one: Instruction, _: Kind) -> Row | None:
        return Row(operation, one.operands) if ".".join(one.opcode) in opcodes else None

    return rule


def _setp(one: Instruction, _: Kind) -> Row | None:
    found, words = _type(one), list(one.opcode[1:-1])
    if found is None or not words:
        return None
    integer = found < CODES["F16"]
    aliases = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"} if integer else {}
    name = aliases.get(words[0], words[0]).upper().replace("NAN", "UNORDERED")
    combining = {"and": 1, "or": 2, "xor": 3}
    count = next((combining[w] for w in words[1:] if w in combining), 0)
    if name not in CODES or not set(words[1:]) <= {"ftz", *combining}:
        return None
    first, *rest = one.operands
    results = first.parts if isinstance(first, Vector) else (first, _SINK)
    return Row(
        "setp", (*results, *rest), type=found, choice=CODES[name], flags=_flags(one), count=count
    )


def _testp(one: Instruction, _: Kind) -> Row | None:
    kinds = {"finite": 0, "infinite": 1, "notanumber": 2}
    if one.opcode[1] not in kinds:
        return None
    return Row("testp", one.operands, type=_FLOATS[one.opcode[-1]], choice=kinds[one.opcode[1]])


def _cvt(one: Instruction, _: Kind) -> Row | None:
    words, to, source = one.opcode[1:-2], one.opcode[-2], one.opcode[-1]
    if not set(words) <= {*_ROUNDINGS, "ftz", "sat", "relu", "satfinite"}:
        return None
    small = {"e4m3x2": CODES["E4M3X2"], "e5m2x2": CODES["E5M2X2"]}
    choice, flags = _rounding(one), _flags(one)
    if source == "f32" and to in {"f16x2", "bf16x2", *small}:
        made = small.get(to, _FLOATS.get(to, 0))
        return Row("cvt_pair", one.operands, type=made, choice=choice, flags=flags)
    if source in small and to == "f16x2":
        return Row("cvt_from_fp8", one.operands, source=small[source], flags=flags)
    if (to, source) == ("tf32", "f32"):
        return Row("cvt_tf32", one.operands, choice=choice)
    types = {**_INTEGERS, "f16": _FLOATS["f16"], "bf16": _FLOATS["bf16"]}
    types |= {"f32": _FLOATS["f32"], "f64": _FLOATS["f64"]}
    if to not in types or source not in types:
        return None
    if (
        to in _FLOATS
        and source in _FLOATS
        and any(w in ("rni", "rzi", "rmi", "rpi") for w in words)
    ):
        flags |= FLAG["TO_INTEGER"]
    return Row("cvt", one.operands, types[to], types[source], choice, flags)


# -- memory ----------------------------------------------------------------------------------------

_SPACES = {"global": "GLOBAL", "const": "GLOBAL", "shared": "SHARED", "shared_cta": "SHARED"}
_SPACES |= {"local": "LOCAL", "param": "PARAM"}
_IGNORED = {
    "volatile", "relaxed", "acquire", "release", "acq_rel", "weak", "gpu", "sys", "cta", "nc", "ca",
    "cg", "cs", "cv", "lu", "wb", "wt", "mmio", "noftz", "uni", "unified", "L1_evict_last",
    "L1_evict_first", "L1_no_allocate", "L1_evict_normal", "L1_evict_unchanged", "L2_evict_last",
    "L2_evict_first", "L2_cache_hint", "L2_64B", "L2_128B", "L2_256B",
}  # fmt: skip


def _space(one: Instruction) -> int:
    return CODES[next((_SPACES[w] for w in one.opcode[1:] if w in _SPACES), "GENERIC")]


def _vector(one: Instruction) -> int:
    return next((int(w[1:]) for w in one.opcode if w in ("v2", "v4", "v8")), 1)


def _moves_memory(one: Instruction) -> bool:
    words = set(one.opcode[1:-1]) - _IGNORED - set(_SPACES) - {"v2", "v4", "v8"}
    return not words and one.opcode[-1] in _TYPES


def _ld(one: Instruction, _: Kind) -> Row | None:
    if not _moves_memory(one):
        return None
    n = _vector(one)
    operands = without_hint(one)
    return Row("ld", operands, type=_TYPES[one.opcode[-1]], choice=_space(one), count=n)


def _st(one: Instruction, _: Kind) -> Row | None:
    if not _moves_memory(one):
        return None
    n, found = _vector(one), _TYPES[one.opcode[-1]]
    return Row("st", without_hint(one), type=found, choice=_space(one), count=n)


def _atom(one: Instruction, _: Kind) -> Row | None:
    words = [w for w in one.opcode[1:-1] if w not in _IGNORED and w not in _SPACES]
    n, words = _vector(one), [w for w in words if w not in ("v2", "v4")]
    name = f"ATOMIC_{words[0].upper()}" if len(words) == 1 else ""
    if n > 1 and (name != "ATOMIC_ADD" or one.opcode[-1] != "f32"):
        return None
    if name not in CODES or one.opcode[-1] not in _TYPES or one.opcode[-1].endswith("x2"):
        return None
    returns = one.opcode[0] == "atom"
    return Row(
        "atom",
        without_hint(one),
        type=_TYPES[one.opcode[-1]],
        choice=_space(one),
        source=n,
        flags=FLAG["RETURNS"] if returns else 0,
        count=CODES[name],
    )


def _matrix(operation: str) -> Rule:
    def rule(one: Instruction, _: Kind) -> Row | None:
        n = next((int(w[1:]) for w in one.opcode if w in ("x1", "x2", "x4")), 0)
        if operation == "ldmatrix" and {"m16n16", "trans", "b8"} <= set(one.opcode) and n < 4:
            return Row("ldmatrix_b8", one.operands, count=2 * n)
        if not n or "m8n8" not in one.opcode or one.opcode[-1] != "b16":
            return None
        flags = FLAG["TRANSPOSED"] if "trans" in one.opcode else 0
        return Row(operation, one.operands, flags=flags, count=n)

    return rule


# -- lanes of a warp -------------------------------------------------------------------------------


def _shfl(one: Instruction, _: Kind) -> Row | None:
    if len(one.operands) != 5 or one.opcode[1] != "sync":
        return None
    first, *rest = one.operands
    results = first.parts if isinstance(first, Vector) else (first, _SINK)
    return Row("shfl", (*results, *rest), choice=CODES[one.opcode[2].upper()])


def _redux(one: Instruction, _: Kind) -> Row | None:
    kind, words = one.opcode[-1], set(one.opcode[3:-1])
    made = CODES[f"ATOMIC_{one.opcode[2].upper()}"]
    if kind == "f32" and words <= {"NaN", "abs"}:
        flags = _flags(one) | (FLAG["IGNORES"] if "abs" in words else 0)
        return Row("redux", one.operands, type=_FLOATS[kind], flags=flags, count=made)
    if kind not in _INTEGERS or words:
        return None
    return Row("redux", one.operands, type=_INTEGERS[kind], count=made)


# -- barriers --------------------------------------------------------------------------------------


def _bar(one: Instruction, _: Kind) -> Row | None:
    words = set(one.opcode[1:]) - {"cta", "aligned"}
    if words == {"warp", "sync"}:
        return Row("bar_warp", one.operands)
    if words not in ({"sync"}, {"arrive"}):
        return None
    number, *rest = one.operands
    flags = FLAG["ARRIVES"] if "arrive" in words else 0
    return Row("bar", (number, rest[0] if rest else 0), flags=flags)


def _fence(one: Instruction, _: Kind) -> Row | None:
    if one.opcode[1:3] == ("proxy", "async"):
        return Row("fence_proxy")
    return Row("nothing")


def _mbarrier(one: Instruction, _: Kind) -> Row | None:
    words = set(one.opcode[1:]) - {"shared", "shared_cta", "b64", "release", "acquire", "cta"}
    words -= {"relaxed"}
    operands = one.operands
    if words == {"init"}:
        return Row("mbarrier_init", operands)
    if words == {"inval"}:
        return Row("mbarrier_inval", operands)
    if words == {"expect_tx"}:
        return Row("mbarrier_arrive", (operands[0], 0, operands[1]))
    if words == {"arrive", "expect_tx"} and operands[0] == _SINK:
        return Row("mbarrier_arrive", (operands[1], 1, operands[2]))
    if words == {"arrive"} and operands[0] == _SINK:
        count = operands[2] if len(operands) > 2 else 1
        return Row("mbarrier_arrive", (operands[1], count, 0))
    if words in ({"try_wait", "parity"}, {"test_wait", "parity"}):
        flags = FLAG["TESTS"] if "test_wait" in words else 0
        return Row("mbarrier_wait", operands[:3], flags=flags)
    return None


# -- control ---------------------------------------------------------------------------------------


def _bra(one: Instruction, _: Kind) -> Row | None:
    target = one.operands[0]
    return Row("bra", target=target.name) if isinstance(target, Symbol) else None


def _brx(one: Instruction, _: Kind) -> Row | None:
    index, table = one.operands
    if not isinstance(table, Symbol):
        return None
    return Row("brx", (index,), target=table.name)


def _set_registers(one: Instruction, _: Kind) -> Row | None:
    (number,) = one.operands
    if one.opcode[1] not in ("inc", "dec") or not isinstance(number, Literal):
        return None
    flags = FLAG["TAKES"] if one.opcode[1] == "inc" else 0
    return Row("set_registers", flags=flags, count=number.bits)


def _grid_control(one: Instruction, _: Kind) -> Row | None:
    known = {"wait": "grid_wait", "launch_dependents": "grid_launch"}
    return Row(known[one.opcode[1]]) if one.opcode[1] in known else None


RULES: dict[str, Rule] = {
    "add": _either(_integer_sum("iadd"), _floats("fadd")),
    "sub": _either(_integer_sum("isub"), _floats("fsub")),
    "addc": _carrying("iadd", takes=True),
    "subc": _carrying("isub", takes=True),
    "mul": _either(_product, _floats("fmul")),
    "mad": _either(_product, _floats("ffma")),
    "madc": _carrying("imul", takes=True),
    "fma": _floats("ffma"),
    "div": _either(_plain("idiv"), _floats("fdiv")),
    "rem": _plain("irem"),
    "min": _either(_plain("imin", "", _INTEGERS | _PACKED), _floats("fmin", "ftz NaN")),
    "max": _either(_plain("imax", "", _INTEGERS | _PACKED), _floats("fmax", "ftz NaN")),
    "neg": _either(_plain("ineg"), _floats("fneg", "ftz")),
    "abs": _either(_plain("iabs"), _floats("fabs", "ftz")),
    "copysign": _floats("copysign", ""),
    **{n: _floats(n) for n in ("sqrt", "rsqrt", "rcp", "ex2", "lg2", "sin", "cos", "tanh")},
    **{n: _plain(n) for n in ("popc", "clz", "brev", "shl", "shr", "bfe", "bfi")},
    **{n: _logic(n) for n in ("and", "or", "xor", "not")},
    "shf": _shf,
    "prmt": _only("prmt", "prmt.b32"),
    "lop3": _only("lop3", "lop3.b32"),
    "mov": _mov,
    "cvta": _cvta,
    "selp": _selp,
    "setp": _setp,
    "testp": _testp,
    "cvt": _cvt,
    "ld": _ld,
    "ldu": _ld,
    "st": _st,
    "atom": _atom,
    "red": _atom,
    "ldmatrix": _matrix("ldmatrix"),
    "stmatrix": _matrix("stmatrix"),
    "shfl": _shfl,
    "vote": lambda one, _: Row("vote", one.operands, choice=CODES[one.opcode[2].upper()]),
    "activemask": _only("activemask", "activemask.b32"),
    "redux": _redux,
    "elect": lambda one, _: Row("elect", one.operands),
    "bar": _bar,
    "barrier": _bar,
    "fence": _fence,
    "mbarrier": _mbarrier,
    "cp": copy_rule,
    "mma": mma_rule,
    "wgmma": wgmma_rule,
    "tcgen05": tensor_rule,
    "bra": _bra,
    "brx": _brx,
    **dict.fromkeys(("ret", "exit"), lambda _one, _: Row("ret")),
    "trap": lambda _one, _: Row("trap"),
    "setmaxnreg": _set_registers,
    "griddepcontrol": _grid_control,
    **dict.fromkeys(("membar", "nanosleep", "prefetch", "discard"), lambda *_: Row("nothing")),
    "createpolicy": lambda one, _: Row("mov", (one.operands[0], 0), type=CODES["U64"]),
}
"""The rule of each opcode."""

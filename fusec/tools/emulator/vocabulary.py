"""The codes that decoder and interpreter share: the meaning of the numbers in a program.

Each list becomes an enumeration in C++ by `enumerations`, so that each code is defined once.
"""

from __future__ import annotations

TYPES = (
    "U8", "S8", "U16", "S16", "U32", "S32", "U64", "S64", "F16", "BF16", "F32", "F64",
    "F16X2", "BF16X2", "F32X2", "U16X2", "S16X2", "E4M3X2", "E5M2X2", "E4M3", "E5M2", "E2M1",
    "UE8M0", "UE4M3", "TF32", "PRED",
)  # fmt: skip
"""Types of elements; integers come first."""
COMPARISONS = (
    "EQ", "NE", "LT", "LE", "GT", "GE", "EQU", "NEU", "LTU", "LEU", "GTU", "GEU", "NUM",
    "UNORDERED",
)  # fmt: skip
ROUNDINGS = ("RN", "RZ", "RM", "RP", "RNA")
SPACES = ("GLOBAL", "SHARED", "LOCAL", "PARAM", "GENERIC")
SHUFFLES = ("UP", "DOWN", "BFLY", "IDX")
VOTES = ("ALL", "ANY", "UNI", "BALLOT")
ATOMICS = (
    "ATOMIC_ADD", "ATOMIC_MIN", "ATOMIC_MAX", "ATOMIC_AND", "ATOMIC_OR", "ATOMIC_XOR",
    "ATOMIC_EXCH", "ATOMIC_CAS",
)  # fmt: skip
QUEUES = ("COPIES", "PRODUCTS", "STORES", "QUEUES")
"""The queues of asynchronous operations; the last name is their number."""
SPECIALS = (
    "ZERO", "ONE", "TID_X", "NTID_X", "CTAID_X", "CTAID_Y", "CTAID_Z", "NCTAID_X", "NCTAID_Y",
    "NCTAID_Z", "LANEID", "WARPID", "LANEMASK_LT",
)  # fmt: skip
FLAGS = (
    "FTZ", "SAT", "HIGH", "WIDE", "CARRY_IN", "CARRY_OUT", "NANS", "TO_INTEGER", "RELU", "WRAP",
    "RIGHT", "RETURNS", "TRANSPOSED", "ARRIVES", "TESTS", "IGNORES", "UNCOUNTED", "FROM_REGISTERS",
    "LEFT_TRANSPOSED", "RIGHT_TRANSPOSED", "NEGATES", "TAKES", "FROM_TENSOR", "ADDS",
)  # fmt: skip
OPERATIONS = (
    "iadd", "isub", "imul", "imin", "imax", "idiv", "irem", "ineg", "iabs", "popc", "clz", "brev",
    "and", "or", "xor", "not", "shl", "shr", "shf", "bfe", "bfi", "prmt", "lop3",
    "mov", "pack", "unpack", "selp", "setp", "testp", "cvt", "cvt_pair", "cvt_from_fp8", "cvt_tf32",
    "fadd", "fsub", "fmul", "ffma", "fdiv", "fmin", "fmax", "fneg", "fabs", "copysign",
    "sqrt", "rsqrt", "rcp", "ex2", "lg2", "sin", "cos", "tanh",
    "ld", "st", "atom", "ldmatrix", "ldmatrix_b8", "stmatrix",
    "shfl", "vote", "activemask", "redux", "elect", "bar_warp", "nothing", "trap",
    "bar", "fence_proxy", "mbarrier_init", "mbarrier_inval", "mbarrier_arrive", "mbarrier_wait",
    "cp_async", "cp_async_arrive", "bulk_load", "bulk_store", "commit", "wait_group",
    "tensor_alloc", "tensor_dealloc", "tensor_relinquish", "tensor_load", "tensor_store",
    "tensor_wait_load", "tensor_wait_store", "tensor_mma", "tensor_commit",
    "mma", "mma_f64", "mma_scaled", "wgmma", "wgmma_fence", "set_registers",
    "grid_wait", "grid_launch", "bra", "brx", "ret",
)  # fmt: skip

PIPES = ("floats", "integers", "specials", "moves", "accesses", "products", "controls")
"""The pipes that a multiprocessor issues instructions to, named as the counters of
``launch.Counts``: float and integer arithmetic, special functions, moves and selects, memory and
copies, tensor cores, and barriers, branches and all else."""
_INTEGERS = (
    "iadd isub imul imin imax idiv irem ineg iabs popc clz brev and or xor not shl shr shf bfe "
)
_PIPES = {
    "floats": "fadd fsub fmul ffma fmin fmax fneg fabs copysign",
    "integers": _INTEGERS + "bfi prmt lop3 redux",
    "specials": "fdiv sqrt rsqrt rcp ex2 lg2 sin cos tanh",
    "moves": "mov pack unpack selp setp testp cvt cvt_pair cvt_from_fp8 cvt_tf32 shfl vote "
    "activemask elect",
    "accesses": "ld st atom ldmatrix ldmatrix_b8 stmatrix cp_async bulk_load bulk_store "
    "tensor_load tensor_store",
    "products": "mma mma_f64 mma_scaled wgmma tensor_mma",
}
_PIPE_OF = {name: pipe for pipe, names in _PIPES.items() for name in names.split()}

_LISTS = (
    TYPES, COMPARISONS, ROUNDINGS, SPACES, SHUFFLES, VOTES, ATOMICS, QUEUES, SPECIALS,
    tuple(f"OP_{name}" for name in OPERATIONS),
)  # fmt: skip

CODES = {word: number for words in _LISTS for number, word in enumerate(words)}
"""The number of each word except the flags."""
FLAG = {word: 1 << bit for bit, word in enumerate(FLAGS)}


def pipe_of(operation: str) -> int:
    """Return the index in ``PIPES`` of an operation's pipe."""
    return PIPES.index(_PIPE_OF.get(operation, "controls"))


def enumerations() -> str:
    """Return the C++ enumerations of all words."""
    lines = [f"enum {{ {', '.join(words)} }};" for words in _LISTS]
    flags = ", ".join(f"{word} = {value}" for word, value in FLAG.items())
    return "\n".join([*lines, f"enum {{ {flags} }};", ""])


def handlers() -> str:
    """Return the C++ functions that run the operations, in their order."""
    return ", ".join(f"run_{name}" for name in OPERATIONS)

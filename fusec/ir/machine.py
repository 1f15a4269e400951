"""The description of a target's machine: rates, sizes, and all that is tuned for it.

The only source for the cost model, for tile sizes and for thresholds: a ``Machine`` has its rates
and, for each kind of decision, a class of values. ``codegen/targets.py`` has one for each target.

The rates are approximate and only rank candidates; measurements override them. ``sm_90``: products
of an H100 (2026-11-26); a copy on an H200, 4.3 TB/s, and the issue budget that follows (6.9 thread
instructions a byte). CPU: two cores of a shared socket, measured 2026-11 within a factor of two.

The values of a class are defaults, found by measuring or chosen, as each says: for GPUs on an H200
(``sm_90``), for CPUs on one core with AVX-512. A row of ``targets.py`` overrides what is better
otherwise. Tests lower some, so that graphs small enough to interpret take the paths of large ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeAlias

from fusec.ir.cpu_tuning import CachedTuning, GroupTuning, LoopTuning, Sides, TransformedTuning
from fusec.ir.dtype import F4X2, F8, F32, DType

Shapes: TypeAlias = tuple[tuple[int, int, int, int], ...]
"""Rows, terms of an iteration, warps and stages."""


@dataclass(frozen=True, slots=True)
class FusionTuning:
    """What is computed where, and what shares a kernel: graph passes and fusion."""

    split_elements: int = 1 << 14
    """Elements of a reduction from which it becomes partial and final sums. Fewer are not worth a
    second kernel (a launch is some 5 us)."""
    least_part_rows: int = 4
    """Least rows of a partial column sum."""
    most_part_rows: int = 64
    """Most rows of a partial column sum. They are added one by one: longer chains lose digits that
    eager's sum keeps. On a GPU there may be more: short rows share an iteration, and the partial
    sums of long ones are limited in bytes (one percent of the input: 266 rows a part of a LayerNorm
    in 16 bits, 133 in f32)."""
    two_programs: int = 16
    """Factor by which partial sums may exceed ``Machine.part_share`` to give each multiprocessor
    two programs: one waits at its barriers (LayerNorm 1024 wide: 60 us for 31, H200, 2026-11)."""
    lost_parts: tuple[int, int] = (8, 64)
    """One of so many parts may be given up to make all equally long; the second is for long rows,
    where 128 programs leave four of 132 multiprocessors idle."""
    direct_steps: int = 1 << 15
    """Steps of a short scan, scatter or search up to which its direct form is taken. Twice as many
    cost as much as the eager call (cumsum, scatter_add, index_add, bucketize; 2026-11)."""
    direct_terms: int = 16
    """Sources of a scatter that each element is compared with, however many elements there are, if
    all are written."""
    chosen: tuple[int, int] = (16, 1024)
    """Most elements of a line that ``topk`` chooses, each by an extreme of the line, and most
    elements of the line."""
    least_iterations: int = 8
    """Iterations of an unrolled loop from which it is rolled up. Fewer are one kernel as they are,
    which computes all states of an element at once."""
    small_product: tuple[int, int] = (64, 8)
    """Rows, and columns and terms, up to which a product is a sum in a kernel: 4096 multiply-adds
    take less than a library's call around them."""
    groups: GroupTuning = field(default_factory=GroupTuning)
    channel_product: int = 1 << 28
    """Multiply-adds up to which a 1 x 1 convolution of a channels-last image is a matrix product:
    MobileNetV3 takes 0.94 of the time, DenseNet-121 0.95; 2^24 gained it a third (2026-11-26)."""
    filtered_side: int = 4
    """Least height and width of an image that is convolved by minimal filtering."""
    filtered_places: int = 48
    """Least places of such images, together: fewer share a weight, transformed 16/9 as large."""
    filtered_places_each: int = 1024
    """The same, if a call transforms the weight, too: with 200 to 400 places that takes as long as
    it saves (256 and 512 channels, 2026-11-26)."""
    part_ratio: int = 8
    """Least ratio of a tensor's elements to those of a part that is written by itself."""
    constant_growth: int = 4
    """A constant may have up to this many times the bytes of the weights it is computed from."""
    cheap: int = 6
    """Multiply-adds an element that cost less than a round trip through memory (about 8 bytes)."""
    inlined_nodes: int = 400
    """Most nodes of an inlined expression, for compile time and legibility."""
    wide: int = 3
    """A wide product has at least so many times its operands' elements: it is recomputed."""
    min_reused_input_bytes: int = 1 << 12
    """Bytes of a shared input from which fusing two consumers can pay."""
    siblings: int = 6
    """Each consumer of a shared buffer is paired with so many consumers before and after it."""
    alike_bytes: int = 1 << 24
    """Most bytes of reductions of equal shape that are paired although they only save a launch."""
    alike: int = 8
    """Most definitions in a kernel of reductions that have only their shape in common."""
    detour_launches: float = 1.2
    """Savings, in launches, that a merge must promise at best before it is tried together with all
    the groups between producer and consumer."""
    between: int = 4
    """Most groups between producer and consumer that one merge may include."""
    kernel_definitions: int = 64
    """Most definitions in one kernel, for compile time and legibility."""
    kernel_nodes: int = 4000
    """Most operations and loads in one kernel: g++ takes 0.5 to 3 ms for each, 10 s for all."""
    foreach: int = 3
    """Least members of a foreach kernel: its table of arguments costs the host about a launch."""
    scores_bytes: int = 1 << 20
    """Bytes of an attention's scores from which they are not saved for the backward."""
    chunk_ratio: int = 6
    """Least columns of an expansion for each of its operand's; an MLP's hidden layer has 4."""
    chunk_large: int = 4
    """A buffer with at least one of so many of the expansion's elements counts as equally large."""
    chunk_recomputed: int = 2
    """Expansions of so many times the options' ``chunk_bytes`` are recomputed rather than saved:
    that costs one product more beside three, which shows where all else takes little time."""
    chunk_bytes: int = 1 << 25
    """Bytes of an expansion in one chunk: few enough to bound memory, many enough for a GEMM whose
    other operand, read once a chunk, is as large (measured 2026-11: no difference between 16 and
    128 MiB)."""
    chunk_rows: int = 256
    """Least rows of a chunk: weights are read, and their gradient is read and written, once a
    chunk; the arithmetic of so many rows hides that traffic."""
    chunk_sum_rows: int = 1
    """Least rows of a chunk where products of 16 bits are added up in f32: each chunk reads and
    writes the sum, in 8 bytes an element beside 6 operations for each of its rows."""
    chunk_gain: float = 1.5
    """Least ratio of the memory of whole rows to that of a sum in f32, for there to be a sum."""
    chunk_alignment: int = 16
    """Chunks begin at multiples of so many rows, which keeps addresses aligned."""


@dataclass(frozen=True, slots=True)
class RaceTuning:
    """What is raced, on a part of what, and what goes by rule."""

    product: int = 1 << 21
    """Multiply-adds from which libraries race for a product: below, the overhead of a call decides,
    and ATen's is the least (64 x 64 x 64: 6 us, oneDNN 20)."""
    product_share: float = 0.03
    """Share of a graph's multiply-adds from which equal products race: others decide nothing."""
    timed_product: int = 1 << 28
    """Multiply-adds of a product that is timed, some 4 ms: rows and columns are halved down to it.
    On a quarter of that, another library was fastest than on the whole in three of eight products
    (2026-11)."""
    timed_images: int = 1 << 26
    """Multiply-adds of a convolution that is timed: its batch is halved down to it."""
    image_rounds: int = 5
    """Rounds in which a convolution is timed: a network has tens of them."""
    gains: float = 0.75
    """Share of the expected gains of channels-last whose convolutions are timed."""
    gain: float = 1.5
    """How many times the conversions the gains must be: a kernel that reads or writes across the
    order of memory may take several times what its bytes say (3.3 in a GroupNorm of 32 x 32)."""
    saved_share: float = 0.03
    """Share of the timed convolutions' time that must be saved."""
    clear: float = 2.0
    """Ratio of a group's modelled times from which a CPU does not race: builds take 0.5 s."""
    configurations: int = 4
    """Configurations of a kernel that a short race tries. A long one (``long_s``) tries all; a CPU
    without a time limit of the user's tries the first."""
    long_s: float = 120.0
    """Seconds that a user has to allow for a long race."""
    groups: int = 4
    """The first groups of a graph, which a CPU without a time limit of the user's races."""


@dataclass(frozen=True, slots=True)
class RowTuning:
    """Rows, columns and elements of a GPU's kernels without products."""

    resident_row: int = 32768
    """Elements of a row that stay in a GPU's registers."""
    row_tile: int = 4096
    """Elements of a tile where a loop walks the row."""
    warp_row: int = 1024
    """Elements of a row that one warp holds, without barriers."""
    resident_bytes: int = 1 << 17
    """Most bytes of a row, over all summed tensors, without spills: 4 for each of 32768."""
    resident_parts: int = 1 << 16
    """Most bytes of a row in short parts, such as a channel of many small images, that stays in
    registers over all tensors: its lanes are loaded one by one, but once for all sweeps."""
    resident_tiles: int = 65536
    """Elements of column sums, and of the rows beside them, that registers hold (2026-11).

    Two sums beside two rows of 16384 take all of 255 registers in 8 warps, if rows stay packed.
    """
    resident_bytes_beside: int = 3 << 15
    """Most bytes of a row beside column sums: three tensors of 8192 in f32.

    Longer rows in f32 spill 350 to 670 bytes a thread, which costs more than reading them again.
    """
    loop_row: int = 256
    """Elements of a part of a row from which a loop over parts keeps a warp busy."""
    wide_bytes: int = 6
    """Bytes of an element's operands from which a thread has half of the elements beside column
    sums: with f32, or a residual's gradient, registers would spill (sm_90, Triton 3.7)."""
    many_sums: int = 3
    """Column sums beside a row from which a thread gets half as many elements."""
    loop_elements: int = 4096
    """Elements of an iteration over rows beside column sums: 8 KB of each 16-bit tensor. Two
    programs with longer rows take more registers than a multiprocessor has."""
    loop_warps: int = 4
    """Warps of a program that loops over a row: some ten programs share a multiprocessor."""
    kept_bytes: int = 40_000_000
    """Bytes that the L2 cache keeps until they are read again: of 60 MB, in two halves (H200)."""
    concurrent: int = 4
    """Programs with a loop, of 512 threads, that share a multiprocessor."""
    step_us: float = 1.0
    """Time from a load to the sum over a program of what was loaded: memory, then barriers."""
    alone: int = 8
    """Factor on the elements of an iteration with fewer programs than multiprocessors."""
    turns_bytes: int = 16
    """Iterations, times bytes of an element's operands, from which few programs load rows ahead."""
    folded: int = 8
    """Most vectors of a row that a thread loads and folds at once: the accumulators are rescaled
    once for all of them. 64 elements of 16 bits take 72 registers (cross-entropy, Triton 3.7.1)."""
    reloaded: int = 16384
    """Elements of an iteration from which weights shared by all rows do not fit the registers."""
    program_bytes: int = 1 << 13
    """Least bytes that a program reads and writes, where there are very many programs: at 2.4 KB a
    clock of an H200's memory, rows of 768 elements, two read and one written in 16 bits, would
    need 0.5 program launches a clock of the GPU's single block scheduler."""
    waves: int = 2
    """Least one-warp programs for each slot of a multiprocessor (``Resources.programs``): the idle
    time at the end grows with the work of each program."""
    ahead_bytes: int = 1 << 16
    """Shared memory of a program for prefetched rows."""
    warps: int = 4
    """Warps of a pointwise program."""
    short_row: int = 64
    """Rows of as many elements or more stay rows, also where no vector divides them."""
    narrow: int = 128
    """Least width to which a pointwise tile is narrowed to fit rows better."""
    waste: float = 1.1
    """Lanes that a wider tile may use in all, relative to the narrower tile that wastes least."""
    parts: int = 6
    """Most equal parts of an axis that one program computes side by side: seven of a LayerNorm's
    gradient spill (7168 columns, 392 bytes; sm_90, Triton 3.7.1)."""
    least_part: int = 256
    """Least elements of a part of a row: with 16 bits, 16 bytes for each lane of a warp."""
    part_row: int = 4096
    """Elements of a part of a row beside column sums."""
    thread_values: int = 168
    """Most values of column sums, and rows beside them, in a thread's registers: of more, rows stay
    as they were loaded. 0: they never do, and all parts of a row are whole."""
    thread_parts: int = 5
    most_parts: int = 8
    """Parts of a row beside column sums of which registers hold vectors, the second packed."""
    packed_row: int = 2048
    column_rows: int = 32
    """Rows of a column reduction's tile."""
    final_rows: int = 512
    """Rows up to which a column reduction is a final sum, whose tiles load all rows at once."""
    final_programs: int = 4
    """Programs for each multiprocessor up to which the tiles of a final sum are narrowed."""
    column_programs: int = 256
    """Programs that keep a GPU busy: tiles of few rows are widened only while so many remain."""


@dataclass(frozen=True, slots=True)
class TileTuning:
    """Tiles of a GPU's kernels with products, for tensor cores."""

    side: int = 128
    """Rows and columns of the widest tile that is chosen by rule."""
    sides: Sides = ((128, 128), (128, 64), (64, 64), (64, 32), (32, 32), (16, 64), (16, 32))
    """Rows and columns of a product's tile, best first; in 8 warps or 4, and 3 stages."""
    others: tuple[tuple[tuple[int, int], int, int], ...] = (
        *(((128, 256), 8, 3), ((128, 128), 8, 4), ((256, 128), 8, 3), ((64, 128), 4, 4)),
        *(((128, 64), 4, 4), ((128, 128), 4, 4), ((64, 256), 8, 3), ((64, 64), 4, 5)),
    )
    """Sides, warps and stages that a race may try, likeliest first."""
    nested: Shapes = (
        *((128, 64, 8, 2), (128, 32, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2), (64, 32, 4, 2)),
        *((64, 32, 8, 2), (32, 64, 4, 2), (32, 32, 8, 2), (16, 32, 4, 2), (16, 32, 8, 2)),
    )
    """Rows, terms of an iteration, warps and stages of a kernel with nested products."""
    small_programs: int = 0
    """Programs of nested products with ``full_rows`` rows in four warps for which shared memory has
    room, so that they are preferred to wider ones; 0: never. While one computes a softmax, others
    multiply: 0.87 to 0.90 of the time of 128 rows in eight warps with heads of 64 features, in a
    backward 0.63 (H100, 2026-11-26). Of heads of 128 features, two have room."""
    nested_others: Shapes = (
        *((128, 128, 8, 2), (64, 64, 4, 2), (128, 64, 8, 3), (64, 64, 8, 2)),
        *((64, 32, 4, 3), (128, 32, 8, 3), (128, 64, 4, 2)),
    )
    """The same that a race may try, likeliest first."""
    nested_gradients: Shapes = ()
    """Shapes that are preferred to ``nested`` for two inner products of 16 bits."""
    nested_skinny: Shapes = ((16, 64, 4, 3), (16, 32, 4, 3), (16, 32, 4, 2), (16, 16, 4, 2))
    """The same as ``nested`` where one tile holds all rows."""
    nested_vectors: Shapes = ((16, 32, 8, 3), (16, 32, 4, 3), (16, 64, 8, 3), (16, 64, 4, 3))
    """The same for a single row. One query of 512 heads against 4096 keys: 364, 365, 425 and 608 us
    (H100, 2026-11-26): with more elements a thread, ptxas waits for loads nine times, not twice."""
    skinny_others: tuple[tuple[int, int, int], ...] = (
        *((64, 4, 6), (32, 4, 6), (128, 4, 4), (64, 4, 4), (128, 8, 4), (256, 8, 3), (16, 4, 6)),
    )
    """Columns, warps and stages that a race may try where one tile holds all rows of a product."""
    full_rows: int = 64
    """Rows of the narrowest tile that four warps multiply at full rate."""
    loop_bytes: int = 128
    """Bytes of an operand's tile along the loop: a swizzled row of shared memory."""
    long_rows: int = 0
    """Rows of a tile up to which it may be one of ``skinny_long``, and has ``side`` terms else."""
    skinny_long: Shapes = (
        *((128, 256, 8, 3), (128, 128, 4, 4), (64, 512, 8, 3), (64, 256, 8, 4)),
        *((32, 1024, 8, 3), (32, 512, 8, 4)),
    )
    """Columns, terms, warps and stages of such tiles, best first: 16 rows of 4096 terms and 6144
    columns take 14.6 us with 512 terms, 15.2 with 256 (model of sm_90, 2026-11)."""
    skinny_bytes: int = 60 << 10
    """Bytes ahead on each multiprocessor, on average, that keep the memory busy, if programs for
    ``full_long`` of them load so many."""
    full_long: float = 0.66
    few_registers: int = 64
    """Registers of a thread for tiles up to which four warps suffice instead of eight."""
    by_fmas: tuple[int, int] = (2, 4)
    """Register factors of plain and nested products by FMAs (f32), which hold rows and columns."""
    drawn: int = 2
    """Tiles of f32 for one of random numbers: the backward of an attention with dropout spilled
    1260 bytes in 8 warps of 128 x 64, and none with half the step (Triton 3.7.1, 2026-11)."""
    offered: int = 8
    """Most tilings that a race may choose from."""
    preferred: int = 3
    """How many of the tilings preferred by rule are offered, the chosen one included."""
    skinny_rows: int = 64
    """Rows up to which a product takes longer to load its operands than to multiply them."""
    busy: float = 0.75
    """Least share of the multiprocessors that one wave of programs must occupy."""
    group: int = 8
    """Rows of tiles that run together along the columns, to share operands in the cache."""
    part_terms: tuple[int, int] = (512, 128)
    """Least terms of a part of a split loop; the second where each term is itself a product."""
    waves: int = 2
    """Programs for each multiprocessor at which a split loop aims."""
    full_skinny: float = 1.5
    """Programs for each multiprocessor, of tiles of few rows, that keep the memory busy."""
    spare: float = 0.9
    """Share of the registers for tiles up to which a loop is emitted twice, with and without its
    mask. At the limit itself the second one spills: 384 bytes of a gradient with 256 columns, 488
    of one with rotary embeddings (Triton 3.7.1, 2026-11)."""
    team_warps: int = 8
    """Consumer warps of a warp-specialized kernel."""
    team: Sides = ((128, 256), (256, 128), (128, 128))
    """Rows and columns of their tiles in plain products, best first."""
    team_gain: float = 1.2
    """Their speed over that of all warps, where both fill their waves (1.20 to 1.36,
    five products, and 1.10 with two accumulators; H100, 2026-11-26)."""
    team_waves: int = 2
    """Least tiles of a program with roles by rule: else nothing is loaded beside an epilogue."""
    nested_team: Sides = ((128, 128), (128, 64), (128, 32))
    """Their tiles in nested products: rows, and terms of an iteration."""
    slots: tuple[int, int] = (2, 6)
    """Fewest and most slots of a warp-specialized kernel's ring: one is multiplied while others are
    filled. One more is needed where a tile is used in two iterations."""
    barrier_bytes: int = 1024
    """Most bytes of shared memory for barriers and for the alignment of tiles to 1024 bytes."""
    library_side: int = 128
    """Rows and columns of a library's tile."""
    library_terms: int = 2048
    """Terms from which a library splits the loop of few tiles."""


@dataclass(frozen=True, slots=True)
class CodeTuning:
    """How programs are printed; each ``Program`` has its machine's."""

    converts_float8: bool = False
    """Does the GPU have instructions that convert float8_e4m3fn and float8_e5m2 (from sm_89 on)?"""
    ptx: bool = False
    """Is its assembly PTX?"""
    asynchronous_rows: int = 0
    """Fewest rows of a product that runs on beside its loop (wgmma, ``unread_sums``); 0: none."""
    chain: int = 4
    """Least operations on tiles beside products that Triton evaluates element by element."""
    store_cost: int = 5
    """Least cost, in operations, of a value of tiles that is stored and loaded if used twice."""
    jam: int = 4
    """Iterations of an inner loop side by side: additions take 4 cycles, maxima with NaN 8."""
    copied: float = 1.0
    """Cost of an element of a tile that is copied block-wise, for the order of lanes."""
    scattered: float = 4.0
    """The same of a scalar access."""
    packed: float = 0.06
    """The same of an operand of 16 or 8 bits that a product packs."""
    drawn: float = 8.0
    """The same of a scalar random draw."""
    folded: float = 0.02
    """The same of a horizontal reduction."""
    ordered: int = 6
    """Most lane axes of which all orders are tried."""
    cache_line: int = 64
    """Bytes that a prefetch fetches."""
    chunk: int = 8
    """Most adjacent tiles in a chunk of ``schedule(dynamic)`` where weights lie in panels: a core
    prefetches its next panel (1024 x 384 x 1536 takes 0.93 of the time of chunks of one; AVX-512,
    2026-11-27)."""
    chunks: int = 12
    """Least chunks of a kernel, so that no thread waits long for another's."""
    trips: int = 8
    """Assumed trips of a loop, unless they are known and fewer."""
    unrolled: int = 8
    """Greatest trip count of an unrolled loop."""
    instructions: int = 256
    """Greatest estimated size of an unrolled loop, in instructions, inner loops included."""
    loader_registers: int = 40
    """Registers of a producer thread of a warp-specialized kernel in Gluon. Consumers have those
    that it leaves: 240."""
    branch: int = 8
    """Instructions that a load under a scalar condition costs in addition: a branch."""
    gathers: int = 16
    """Most masked gathers that a kernel inlines; if it has more, all are calls."""
    parallel_work: int = 1 << 15
    """Iterations below which one thread is faster: waking OpenMP's threads takes some 5 us."""
    stack_bytes: int = 1 << 17
    """Private arrays up to this size are on the stack of their thread."""
    family: int = 3
    """Least programs that become one function: each C++ entry is an extra call."""
    unit_text: int = 1 << 16
    """Characters of kernels worth a unit of their own: half a second of g++, its prelude 0.1 s."""


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources and features of a GPU's multiprocessor that one program may use.

    Attributes:
        registers: 32-bit registers, which its programs share.
        thread_registers: most of them in a thread.
        warp: threads that run in step.
        programs, threads: most programs, and threads, that it holds.
        shared_bytes: shared memory of a block, without the 1 KB that the system takes.
        issue_budget: instructions of a thread that it can issue while its share of the memory moves
            one byte: 128 lanes * multiprocessors * clock / bandwidth. H200: 132, 1.755 GHz, 4.3
            TB/s; A100: 108, 1.41 GHz, 1.7 TB/s; B200: 148, 1.85 GHz, 7.2 TB/s; RTX 5090: 170, 2.4
            GHz, 1.6 TB/s. 0 for targets whose machine code no rule judges.
        tile_registers: registers of a thread for the f32 tiles of a loop with products; the rest is
            for addresses, and for operands where tensor cores do not read them from shared memory.
        nested_registers: the same of two inner products whose tiles are read once, as in an
            attention's backward: weights take the place of scores. 0: as ``tile_registers``.
        from_shared: tensor cores read operands from shared memory; otherwise operands go through
            registers, and a loop of n stages holds n - 1 tiles of each in shared memory.
        whole_operands: where products are nested, a warp's registers hold its rows of a left
            operand and all of a right one: Triton for AMD loads them before it multiplies.
        tf32: tensor cores multiply f32, rounded to 10 bits of mantissa; else FMAs do, exactly.
        coarse: tensor cores add products of 8 bits with 14 bits (``ir/scalar.py``).
        scaled: tensor cores multiply factors with a scale for each block (``ir/scaled.py``).
        scaled_tile: least rows and columns of such a product's tile.
        descriptors: hardware copies tiles described by a tensor descriptor (NVIDIA's TMA).
        dependent: a launch may begin while the one before it ends (``LaunchSettings.dependent``).
        adds: programs may add parts of a sum to memory, where two sums share what they sum.
        tensor_columns: columns, of 128 lanes of 32 bits, of the memory that tensor cores add in; 0
            where that is registers.
        group_registers: registers of a consumer warp's thread for f32 tiles under warp
            specialization, where the producer warp gives up most of its own; 0 for targets without
            it, whose products are not asynchronous (Hopper's wgmma) or have another form.
    """

    registers: int = 65536
    thread_registers: int = 256
    warp: int = 32
    programs: int = 32
    threads: int = 2048
    shared_bytes: int = 0
    issue_budget: float = 0.0
    tile_registers: int = 0
    nested_registers: int = 0
    from_shared: bool = False
    whole_operands: bool = False
    tf32: bool = False
    coarse: bool = False
    scaled: bool = False
    scaled_tile: tuple[int, int] = (16, 8)
    descriptors: bool = False
    dependent: bool = False
    adds: bool = False
    tensor_columns: int = 0
    group_registers: int = 0

    def tile_room(self, warps: int, nested: bool = False) -> int:
        """Return the registers of a thread for tiles, in a program of so many warps."""
        most = min(self.thread_registers, self.registers // (self.warp * warps))
        each = (nested and self.nested_registers) or self.tile_registers
        return each * max(1, most // 256)


@dataclass(frozen=True, slots=True)
class ProductRates:
    """Rates of matrix products, as fractions of the rate of the library's single product.

    Attributes:
        tiled: fusec's single product (Triton beside cuBLAS: 0.8 to 1.0).
        roles: the same where its warps have roles; what follows the product is not hidden then.
        narrow_roles: the same of tiles, all products' together, below 128 x 256.
        nested: fusec's products of products in one kernel, as in an attention.
        library_nested: the library's attention.
        library_biased: its forward where it adds a tensor as wide as the scores.
        alone: whether fusec's product may win outside an attention.
    """

    tiled: float = 0.85
    roles: float = 1.0
    narrow_roles: float = 1.0
    nested: float = 0.55
    library_nested: float = 0.75
    library_biased: float = 0.75
    alone: bool = True


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates and sizes of one machine.

    Attributes:
        bytes_per_us: memory traffic, reads and writes together.
        operations_per_us: scalar f32 multiply-adds of the whole machine.
        launch_us: time from one kernel to the next, host and device.
        units: grid points that keep the machine busy: a GPU's multiprocessors.
        threads: CPU threads that share a grid: few long grid points leave some of them idle.
        parts: partial results of a split reduction, where their bytes allow so many.
        part_share: bytes that partial results may move, as a share of the bytes that are summed;
            where ``parts`` of them would move more, there is one for each of ``units``.
        tile: elements of the fastest axis that one grid point takes where that axis is on the grid.
        vector: f32 lanes of a CPU's vector registers.
        products_per_us: multiply-adds of 16-bit matrix products; 0 where no schedule has them.
        slow_exact: slowdown of the library's products in f32, unless operands round to TF32.
        float8: time of products of 8 bits, as a share of that of 16 bits.
        bf16: how a CPU's kernels multiply bf16 (``processors.Bf16``).
        widened: types that fusec's own products widen to f32, for want of instructions.
        slow_widened: slowdown of these products beside the library's, which has instructions.
        slow_types: types for which a CPU's library has no instructions, either.
        rates: rates of products, relative to the library's.
        cache_bytes: bytes of a CPU core's second-level cache that the tiles of a product may take;
            0 where tiles are in registers.
        lanes: longest axis of a kernel with products that is lanes without a loop: a row of an
            operand, so that scores are recomputed.
        skinny_rows: most rows of a skinny product, which a kernel of plain loops may compute.
        sm: resources of a multiprocessor.
        fusion, races, code: thresholds and sizes of graph passes and fusion, of races, of printers.
        rows, tiles: those of the schedules of a GPU.
        cached, loops: those of the schedules of a CPU.
    """

    bytes_per_us: float
    operations_per_us: float
    launch_us: float
    units: int
    parts: int
    tile: int
    vector: int = 1
    products_per_us: float = 0.0
    slow_exact: int = 8
    float8: float = 1.0
    bf16: str = "widened"
    widened: frozenset[DType] = frozenset()
    slow_widened: int = 1
    slow_types: frozenset[DType] = frozenset()
    rates: ProductRates = ProductRates()
    cache_bytes: int = 0
    lanes: int = 256
    skinny_rows: int = 0
    threads: int = 1
    sm: Resources = Resources()
    part_share: float = 1.0
    fusion: FusionTuning = FusionTuning()
    races: RaceTuning = RaceTuning()
    rows: RowTuning = RowTuning()
    tiles: TileTuning = TileTuning()
    cached: CachedTuning = field(default_factory=CachedTuning)
    transformed: TransformedTuning = field(default_factory=TransformedTuning)
    loops: LoopTuning = field(default_factory=LoopTuning)
    code: CodeTuning = CodeTuning()

    def sized(self, units: int, bytes_per_us: float) -> Machine:
        """Return the machine of a GPU that differs in multiprocessors or memory; 0: as here."""
        share = (units or self.units) / self.units
        return replace(
            self,
            units=units or self.units,
            parts=round(self.parts * share),
            bytes_per_us=bytes_per_us or self.bytes_per_us,
            operations_per_us=self.operations_per_us * share,
            products_per_us=self.products_per_us * share,
        )

    @property
    def is_cpu(self) -> bool:
        """Whether products keep their tiles in a core's cache; else in registers, as on a GPU."""
        return self.cache_bytes > 0

    @property
    def multiplies(self) -> bool:
        """Whether kernels may compute matrix products; else all products are library calls."""
        return self.products_per_us > 0

    @property
    def slow_f32(self) -> int:
        """Slowdown of products in f32, relative to 16 bits."""
        return 2 if self.sm.tf32 else self.slow_exact

    @property
    def product_times(self) -> dict[DType, float]:
        """Type of operands -> time of their product in a library, relative to 16 bits."""
        return {F32: self.slow_f32, F4X2: self.float8 / 2, **dict.fromkeys(F8, self.float8)}

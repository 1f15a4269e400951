"""The plots of a report: where lines, points and ticks are, in pixels of an SVG.

The roofline's axes are logarithms: operations a byte, operations a second. A launch is a point at
the rate of its time, under the roof of its machine; launches without arithmetic are left out. The
operations of a kernel are those that ``passes/fusion/cost.py`` counts, an expensive function as
several, and two for each multiply-add of a matrix product; of a library's kernel only its products
are known. The roof is the machine's highest rate at so many operations a byte: its memory's rate
times these, or the rate of its vector lanes or of its matrix products.

The memory plot has the steps of a call across, and bytes upwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fusec.ir.dtype import BF16
from fusec.ir.expr import postorder
from fusec.ir.graph import Extern, ForeachKernel, Kernel
from fusec.ir.machine import Machine
from fusec.passes.fusion.cost import call_cost, kernel_operations, multiplied
from fusec.passes.traffic import work_of
from fusec.tools.report.html.drawn import Launched
from fusec.tools.report.traffic import Usage
from fusec.tools.terminal import format_bytes, in_units

if TYPE_CHECKING:
    from fusec.tools.report.html.document import Drawing

# -- costs and roofs -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The peak rate of a machine for one kind of operation, a microsecond."""

    name: str
    rate: float


@dataclass(frozen=True, slots=True)
class Roof:
    """A machine's roof: bytes a microsecond, and its ceilings, the highest first."""

    bytes_us: float
    ceilings: tuple[Ceiling, ...]


@dataclass(frozen=True, slots=True)
class Cost:
    """The operations of a launch, and its modelled microseconds."""

    operations: float
    us: float


def roof_of(machine: Machine) -> Roof:
    """Return the roof of a target's machine."""
    wide = machine.slow_widened if BF16 in machine.widened else 1
    found = [Ceiling("lanes", machine.operations_per_us)]
    if machine.multiplies:
        found += [
            Ceiling("products in 16 bits", 2 * machine.products_per_us / wide),
            Ceiling("products in f32", 2 * machine.products_per_us / machine.slow_f32),
        ]
    rates = {ceiling.rate: ceiling for ceiling in reversed(found)}
    return Roof(machine.bytes_per_us, tuple(rates[rate] for rate in sorted(rates, reverse=True)))


def cost_of(step: Launched, machine: Machine) -> Cost:
    """Return the cost of a launch."""
    match step:
        case Kernel() | ForeachKernel():
            work = work_of(step, machine)
            own = sum(map(kernel_operations, step.kernels))
            return Cost(own + 2 * sum(work.multiplied.values()), work.us or 0.0)
        case Extern():
            products = multiplied(postorder(line.expr for line in step.decomposition))
            return Cost(2.0 * products.total(), call_cost(step, machine).us)


# -- the roofline ----------------------------------------------------------------------------------


WIDTH, HEIGHT = 480, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 14, 40
LABELLED = 5
"""The number of points with a label: the launches that move the most bytes."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A line of the grid, at so many pixels from the left or the top."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Point:
    """A launch in the roofline: box is its position."""

    box: int
    x: float
    y: float
    kind: str
    word: str
    label: str
    title: str


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the roof, with its name at its end."""

    path: str
    label: str
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class RooflinePlot:
    """A roofline; ``left_out`` are boxes without arithmetic."""

    columns: tuple[Tick, ...]
    rows: tuple[Tick, ...]
    roof: tuple[Line, ...]
    points: tuple[Point, ...]
    left_out: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MemoryPlot:
    """Memory over a call: two stacked areas, and the position of the peak."""

    rows: tuple[Tick, ...]
    given: str
    made: str
    peak_x: float
    peak_y: float
    label: str


@dataclass(frozen=True, slots=True)
class _Log:
    """A logarithmic axis from ``low`` to ``high`` powers of ten: its first and its last pixel."""

    low: int
    high: int
    first: int
    last: int

    def at(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return round(self.first + min(max(share, 0.0), 1.0) * (self.last - self.first), 1)

    def ticks(self, label: Callable[[float], str]) -> tuple[Tick, ...]:
        powers = (10.0**power for power in range(self.low, self.high + 1))
        return tuple(Tick(self.at(value), label(value)) for value in powers)


def roofline_plot(drawing: Drawing) -> RooflinePlot | None:
    """Return the roofline of a graph; None where nothing in it does arithmetic."""
    rated = [(k, box) for k, box in enumerate(drawing.boxes) if box.operations and box.bytes]
    if not rated:
        return None
    found = [(box.operations / box.bytes, box.operations / box.timing.us) for _, box in rated]
    roof = drawing.roof
    ridge = roof.ceilings[0].rate / roof.bytes_us
    across = _axis([x for x, _ in found] + [ridge * 2], LEFT, WIDTH - RIGHT)
    up = _axis([y for _, y in found] + [roof.ceilings[0].rate * 1.5], HEIGHT - BOTTOM, TOP)
    own = [row for row in rated if row[1].kind != "library"]
    named = {k for k, _ in sorted(own, key=lambda row: -row[1].share)[:LABELLED]}
    points = tuple(
        Point(
            k,
            across.at(x),
            up.at(y),
            box.kind,
            box.timing.word,
            box.names[0] if k in named else "",
            f"{box.names[0]}: {x:.3g} operations a byte, {_rate(y)}, {box.timing.word}",
        )
        for (k, box), (x, y) in zip(rated, found, strict=True)
    )
    left_out = tuple(k for k, box in enumerate(drawing.boxes) if not (box.operations and box.bytes))
    columns = across.ticks(lambda value: f"{value:g}")
    return RooflinePlot(columns, up.ticks(_rate), _roof(roof, across, up), points, left_out)


def _axis(values: Sequence[float], first: int, last: int) -> _Log:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return _Log(low, max(high, low + 1), first, last)


def _roof(roof: Roof, across: _Log, up: _Log) -> tuple[Line, ...]:
    """Return the slope of memory and a flat line for each ceiling."""
    start = max(10.0**across.low, 10.0**up.low / roof.bytes_us)
    x, y = across.at(start), up.at(start * roof.bytes_us)
    top = roof.ceilings[0].rate
    top_x, top_y = across.at(top / roof.bytes_us), up.at(top)
    slope = f"memory, {format_bytes(int(roof.bytes_us * 1e6))}/s"
    lines = [Line(f"M{x} {y}L{top_x} {top_y}", slope, (x + top_x) / 2, (y + top_y) / 2)]
    for ceiling in roof.ceilings:
        x, y, end = across.at(ceiling.rate / roof.bytes_us), up.at(ceiling.rate), across.last
        lines.append(Line(f"M{x} {y}H{end}", f"{ceiling.name}, {_rate(ceiling.rate)}", end, y))
    return tuple(lines)


def _rate(per_us: float) -> str:
    """Format operations a microsecond as operations a second: ``4.2 Gop/s``."""
    return in_units(per_us * 1e6, ("op/s", "kop/s", "Mop/s", "Gop/s", "Top/s", "Pop/s"))


# -- memory ----------------------------------------------------------------------------------------


def memory_plot(usage: Usage) -> MemoryPlot:
    """Return the plot of the memory that a graph holds."""
    peak = usage.peak
    step = _round_step(peak.bytes)
    most = max(step * math.ceil(peak.bytes / step), 1)
    width = (WIDTH - LEFT - RIGHT) / len(usage.moments)

    def at(size: float) -> float:
        return HEIGHT - BOTTOM - size / most * (HEIGHT - TOP - BOTTOM)

    rows = tuple(
        Tick(round(at(k * step), 1), format_bytes(int(k * step)))
        for k in range(math.ceil(peak.bytes / step) + 1)
    )
    totals = [moment.bytes for moment in usage.moments]
    where = usage.moments.index(peak)
    return MemoryPlot(
        rows,
        _area([at(moment.given) for moment in usage.moments], width),
        _area([at(total) for total in totals], width),
        round(LEFT + (where + 0.5) * width, 1),
        round(at(peak.bytes), 1),
        f"{format_bytes(peak.bytes)} at {peak.step}",
    )


def _area(heights: Sequence[float], width: float) -> str:
    """Return the area under stairs, a step for each height; equal ones are one step."""
    parts = [f"M{LEFT} {HEIGHT - BOTTOM}"]
    before = math.nan
    for position, height in enumerate(heights):
        if height != before:
            parts.append(f"H{LEFT + position * width:.1f}V{height:.1f}")
        before = height
    return "".join([*parts, f"H{WIDTH - RIGHT}V{HEIGHT - BOTTOM}Z"])


def _round_step(most: int) -> float:
    """Return a step of 1, 2 or 5 times a power of ten, some four of which make the whole."""
    rough = max(most, 1) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    return next(k * power for k in (1, 2, 5, 10) if k * power >= rough)

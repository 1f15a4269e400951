"""The table that ``fusec profile`` prints."""

from __future__ import annotations

from fusec.tools.report.profile import VIEWS, Entry, Profile
from fusec.tools.terminal import fitted_table, format_bytes, format_seconds

_ROWS = 24
"""Rows of the table; the JSON form has all."""
_HEADER = ("time", "step", "calls", "bytes", "floor", "predicted", "")
_TITLES = {"kernel": "kernels", "module": "modules", "line": "lines"}


def profile_page(profile: Profile, by: str = "kernel") -> str:
    """Return a profile as text, one row for each kernel, module or line of the user's."""
    entries = VIEWS[by](profile)
    shown, more = entries[:_ROWS], entries[_ROWS:]
    rows = [_HEADER, *(_row(entry, profile.step_seconds) for entry in shown)]
    if more:
        others = Entry(f"{len(more)} more, which --json lists", sum(e.seconds for e in more))
        rows.append(_row(others, profile.step_seconds))
    rows += [_row(Entry(r.name, r.seconds), profile.step_seconds) for r in profile.rest]
    rows.append(_row(Entry("the step", profile.step_seconds), profile.step_seconds))
    table = fitted_table(rows, right=range(6), indent=2)
    return "\n".join([*_head(profile), "", f"{_TITLES[by]}, by time", *table, "", *_rates(profile)])


def _head(profile: Profile) -> list[str]:
    launched = sum(one.seconds for one in profile.launches)
    floor = sum(one.floor_seconds for one in profile.launches)
    of = "one step, not warm" if profile.cold else f"the mean of the middle half of {profile.steps}"
    threads = f", {profile.threads} thread{'s' * (profile.threads != 1)}"
    device = profile.device + threads * profile.device.startswith("cpu")
    calls = sum(one.calls for one in profile.launches)
    return [
        f"{profile.what} on {device}: {format_seconds(profile.step_seconds)} a step ({of})",
        f"{calls:.0f} launch{'es take' if calls != 1 else ' takes'} {format_seconds(launched)}, "
        f"of which their floor is {format_seconds(floor)}",
    ]


def _row(entry: Entry, step: float) -> tuple[str, ...]:
    measured = entry.calls > 0
    return (
        format_seconds(entry.seconds),
        f"{entry.seconds / step:.1%}",
        _calls(entry.calls) if measured else "",
        format_bytes(round(entry.bytes)) if measured else "",
        f"{entry.floor_seconds / entry.seconds:.0%}" if measured and entry.seconds else "",
        "" if entry.predicted_seconds is None else format_seconds(entry.predicted_seconds),
        entry.name,
    )


def _calls(calls: float) -> str:
    return f"{calls:.0f} x" if calls == int(calls) else f"{calls:.1f} x"


def _rates(profile: Profile) -> list[str]:
    """Return the rates that the floor was computed from."""
    copies = [f"{format_bytes(size)} at {rate / 1e9:.3g} GB/s"
              for size, rate in profile.copies.items()]  # fmt: skip
    products = [f"{dtype} at {2 * rate / 1e9:.3g} GFLOP/s"
                for dtype, rate in profile.products.items()]  # fmt: skip
    lines = ["floor: the share of the time that PyTorch's own copy of as many bytes, or product,"]
    lines.append("takes on this machine; predicted: its time by the cost model")
    return [*lines, *(f"  {', '.join(part)}" for part in (copies, products) if part)]

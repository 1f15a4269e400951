"""The backend under its public name: what the entry point of torch and programs of users import.

``import fusec.backend`` also registers fusec's kind of artifact with ``torch.compiler``, and the
observers of logs, dumps and ``verify``. The compiler itself is ``fusec/driver/``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from fusec.driver import backend
from fusec.driver.backend import refreeze
from fusec.tools import dumps, summary, verify  # noqa: F401  each puts an observer in the list
from fusec.torch_interior import is_shipping

__all__ = ["fusec", "refreeze"]


def fusec(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph; called by ``torch.compile``.

    Args:
        mode: "default", "reduce-overhead", "max-autotune" or "max-autotune-no-cudagraphs".
        options: fields of ``fusec.options.Options`` by name.
    Raises:
        UsageError: for an unknown mode or option; the message names the nearest one.
        SkipFrame: for a graph that only Python runs as eager does; Dynamo then runs its frame so.
        Exception: under ``strict``, what AOTAutograd raises for a graph that cannot be cut around
            the operations that it does not trace; else that runs as it is, with one warning.
    """
    begin: Callable[..., Callable[..., Any]] = backend.start
    if is_shipping():
        # Local: only ``torch.compile(...).aot_compile`` writes archives.
        from fusec.export.packing import ship

        begin = ship
    return backend.compile_captured(gm, example_inputs, begin, mode=mode, options=options)


fusec.reset = backend.reset  # type: ignore[attr-defined]

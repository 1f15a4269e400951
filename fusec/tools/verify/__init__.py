"""``options={"verify": True}``: compare kernels and whole graphs with eager while a program runs.

``import fusec.backend`` puts the verifier among the compiler's observers. What compares is imported
once a compile asks for it: kernels in ``kernels.py``, whole graphs in ``graphs.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from fusec.driver.observers import OBSERVERS, Around, Observer
from fusec.frontend.origin import input_names
from fusec.options import Options
from fusec.runtime.calls.executable import CallHooks


class Verifier(Observer):
    """Looks at graphs whose options have ``verify``."""

    def looks(self, options: Options) -> bool:
        return options.verify

    def watch_trace(
        self,
        traced: fx.GraphModule,
        rewritten: fx.GraphModule,
        outputs: int | None,
        names: Sequence[str],
        options: Options,
    ) -> Around | None:
        from fusec.tools.verify.graphs import Reference, draws  # local: only under `verify`

        own_draws = not options.fallback_random and draws(traced)
        gm = rewritten if own_draws else traced
        return Reference(gm, outputs, input_names(gm, names), strict=options.strict).around

    def watch_calls(self, gm: fx.GraphModule, name: str, options: Options) -> CallHooks | None:
        from fusec.tools.verify.kernels import Verification  # local, as above

        return Verification(gm, name, strict=options.strict).hooks()


OBSERVERS.append(Verifier())

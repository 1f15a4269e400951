"""fusec: an operator-fusion compiler for PyTorch: ``torch.compile(model, backend="fusec")``.

Importing this package is cheap: torch and the compiler's stages are loaded at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"
__all__ = [
    "__version__", "expect", "explain", "kernels", "load", "name_size", "refreeze",
    "register_decomposition", "register_pass", "watch",
]  # fmt: skip


def __dir__() -> list[str]:
    names = {name for name in globals() if name.startswith("__")}
    return sorted({*names, *__all__})


if TYPE_CHECKING:  # what `__getattr__` loads has its types here; no other name is typed
    from fusec.archive.model import load
    from fusec.driver.backend import refreeze
    from fusec.driver.user_passes import register_pass
    from fusec.frontend.aot.custom_operations import register_decomposition
    from fusec.frontend.named_sizes import name_size
    from fusec.tools.report import explain, kernels
    from fusec.tools.report.expect import expect
    from fusec.tools.report.watching import watch
else:

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'fusec' has no attribute {name!r}")
        return getattr(importlib.import_module(f"fusec.{_HOMES[name]}"), name)


_HOMES = {
    "expect": "tools.report.expect",
    "explain": "tools.report",
    "kernels": "tools.report",
    "load": "archive.model",
    "name_size": "frontend.named_sizes",
    "refreeze": "driver.backend",
    "register_decomposition": "frontend.aot.custom_operations",
    "register_pass": "driver.user_passes",
    "watch": "tools.report.watching",
}
"""Name -> its module, imported at first use: `import fusec` must not import torch."""

"""fusec: an operator-fusion compiler for PyTorch: ``torch.compile(model, backend="fusec")``.

Importing this package is cheap: torch and the compiler's stages are loaded at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"
__all__ = [
    "__version__",
    "expect",
    "explain",
    "kernels",
    "load",
    "name_size",
    "refreeze",
    "register_decomposition",
    "register_pass",
    "watch",
]


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
        if name in ("explain", "kernels"):
            # Local: `import fusec` must not import torch, Dynamo and the compiler's stages.
            from fusec.tools import report

            return getattr(report, name)
        if name == "expect":
            from fusec.tools.report import expect  # local, as above

            return expect.expect
        if name == "watch":
            from fusec.tools.report import watching  # local, as above

            return watching.watch
        if name == "load":
            from fusec.archive import model  # local, as above

            return model.load
        if name == "register_decomposition":
            from fusec.frontend.aot import custom_operations  # local, as above

            return custom_operations.register_decomposition
        if name == "register_pass":
            from fusec.driver import user_passes  # local, as above

            return user_passes.register_pass
        if name == "name_size":
            from fusec.frontend import named_sizes  # local, as above

            return named_sizes.name_size
        if name == "refreeze":
            from fusec.driver import backend  # local, as above

            return backend.refreeze
        raise AttributeError(f"module 'fusec' has no attribute {name!r}")

"""The backend under its public name: what the entry point of torch and programs of users import.

``import fusec.backend`` also registers fusec's kind of artifact with ``torch.compiler``. The
compiler itself is ``fusec/driver/``.
"""

from fusec.driver.backend import fusec, refreeze

__all__ = ["fusec", "refreeze"]

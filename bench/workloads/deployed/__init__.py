"""What is measured beside OpenVINO and ONNX Runtime: whole models of many kinds, and four parts.

The group "core" has the 16 cases whose times are kept from release to release; "further" has other
kinds of models. Forward and in training, but for what nobody trains. Weights are random: nothing is
downloaded.
"""

from __future__ import annotations

from bench.workload import Workload
from bench.workloads.deployed import images, language, parts, pictures, sequences, tables

MODULES = (images, language, parts, pictures, sequences, tables)
CORE, FURTHER = "core", "further"


def rows() -> list[Workload]:
    """Return the core's rows and then the further ones, each forward and then in training."""
    found = [workload for module in MODULES for workload in module.rows()]
    return sorted(found, key=lambda workload: workload.group != CORE)

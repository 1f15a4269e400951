"""Find the repeated layers of a model, so that a report has each once: "h.*.mlp", 48 times.

Children of one container are layers if they are of the class that is most frequent among them.
Children that are torch's containers are distinguished by their content, and children without any
parts (``nn.Linear``) are layers only if no other child is between them: the first and the third of
``nn.Sequential(nn.Linear(..), nn.GELU(), nn.Linear(..))`` are not.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from fusec.frontend.modules import BETWEEN, CONTAINERS

ANY = "*"
"""Replaces the number of a layer in a path."""


@dataclass(frozen=True, slots=True)
class Layers:
    """The paths of modules that are repeated layers: "h.0", "h.1"."""

    paths: frozenset[str] = frozenset()

    @classmethod
    def of(cls, *graphs: Mapping[str, str]) -> Layers:
        """Return the layers among the modules of some graphs, path -> class."""
        kinds = {path: kind for graph in graphs for path, kind in graph.items() if kind}
        kinds = {path: "" for graph in graphs for path in graph} | kinds
        parts: dict[str, list[str]] = defaultdict(list)
        for path in kinds:
            parts[path.rpartition(".")[0]].append(path)
        alike = (_alike(children, parts, kinds) for children in list(parts.values()))
        return cls(frozenset(path for group in alike for path in group))

    def folded(self, module: str) -> str:
        """Return a module's path with "*" for the numbers of layers: "h.*.mlp" for "h.3.mlp"."""
        return BETWEEN.join(dict.fromkeys(map(self._folded, module.split(BETWEEN))))

    def _folded(self, module: str) -> str:
        return ".".join(ANY if p in self.paths else p.rpartition(".")[2] for p in _prefixes(module))

    def layer_of(self, module: str) -> tuple[str, str]:
        """Return the frame and the number of a module's layer: ("h.*", "3") for "h.3.mlp".

        Outside of layers, and for a path from one frame to another, ("", "").
        """
        first, *more = (self._layer_of(path) for path in module.split(BETWEEN))
        return first if all(frame == first[0] for frame, _ in more) else ("", "")

    def _layer_of(self, module: str) -> tuple[str, str]:
        for prefix in _prefixes(module):
            outer, _, number = prefix.rpartition(".")
            if prefix in self.paths or number == ANY:
                return f"{outer}.{ANY}".lstrip("."), number
        return "", ""


def _prefixes(module: str) -> Iterable[str]:
    return accumulate(module.split("."), lambda outer, part: f"{outer}.{part}")


def _alike(
    children: Iterable[str], parts: Mapping[str, list[str]], kinds: Mapping[str, str]
) -> list[str]:
    """Return the children of one module that are repeated layers."""
    numbered = {path: int(n) for path in children if (n := path.rpartition(".")[2]).isdigit()}
    counts = Counter(_kind(path, parts, kinds) for path in numbered)
    if not counts:
        return []
    most, count = counts.most_common(1)[0]
    alike = [path for path in numbered if _kind(path, parts, kinds) == most]
    numbers = [numbered[path] for path in alike]
    together = max(numbers) - min(numbers) < count
    return alike if count > 1 and (together or all(path in parts for path in alike)) else []


def _kind(path: str, parts: Mapping[str, list[str]], kinds: Mapping[str, str]) -> Hashable:
    """Return a key that is equal for repeated modules."""
    kind = kinds[path]
    if kind not in CONTAINERS:
        return kind
    inside = parts.get(path, [])
    return kind, *sorted((p.rpartition(".")[2], str(_kind(p, parts, kinds))) for p in inside)

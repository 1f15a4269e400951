"""The module that a kernel belongs to, from the nodes between what it stores and what others do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from fusec.frontend.modules import calling, kernel_modules, module_kinds
from fusec.frontend.origin import dotted, module_path


def graph(*rows: str) -> fx.GraphModule:
    """Return nodes given as "name module input", each in its module, all of class Block."""
    made = fx.Graph()
    nodes = {"x": made.placeholder("x")}
    for row in rows:
        name, module, before = row.split()
        node = made.call_function(abs, (nodes[before],), name=name)
        outer = [module.rsplit(".", cut)[0] for cut in range(module.count("."), -1, -1)]
        node.meta["nn_module_stack"] = {
            path: (f"L['self'].{path}", "pkg.Block")
            for path in outer
            if path != "-" and path != "h"
        }
        nodes[name] = node
    made.output(nodes[name])
    return fx.GraphModule({}, made)


CHAIN = ("a h.0.ln x", "b h.0.mlp.up a", "c h.0.mlp.act b", "d h.0 c", "e h.1.ln d", "f - e")


@pytest.mark.parametrize(
    ("stored", "eager", "module"),
    [
        (["a"], [], "h.0.ln"),
        (["c"], ["a"], "h.0.mlp"),  # b and c: what is around both
        (["c"], [], "h.0"),
        (["d"], ["c"], "h.0"),
        (["e"], ["c"], "h.0..h.1.ln"),
        (["e"], ["b"], "h.0.mlp.act..h.1.ln"),  # h has no class that says more
        (["f"], ["d"], "h.1.ln"),
        (["f"], ["e"], ""),
    ],
)
def test_a_kernel_is_called_after_all_that_it_computes(
    stored: list[str], eager: list[str], module: str
) -> None:
    assert kernel_modules(graph(*CHAIN), {"k": stored}, eager) == {"k": module}


def test_what_another_kernel_stores_is_its_own() -> None:
    found = kernel_modules(graph(*CHAIN), {"k0": ["c"], "k1": ["f"]}, [])
    assert found == {"k0": "h.0", "k1": "h.0..h.1.ln"}


def test_what_several_kernels_compute_again_is_of_none_of_them() -> None:
    stored = {"k0": ["b"], "k1": ["c"]}
    found = kernel_modules(graph("a turn x", "b h.0.attn a", "c h.1.attn a"), stored, [])
    assert found == {"k0": "h.0.attn", "k1": "h.1.attn"}
    found = kernel_modules(graph("a turn x", "b - a", "c - a"), stored, [])
    assert found == {"k0": "turn", "k1": "turn"}  # nothing else says more


def test_a_constant_is_of_no_module() -> None:
    made = graph(*CHAIN)
    node = next(node for node in made.graph.nodes if node.name == "a")
    node.args = ()
    assert kernel_modules(made, {"k": ["b"]}, []) == {"k": "h.0.mlp.up"}


def test_a_name_that_is_no_identifier_is_a_part_of_the_path() -> None:
    assert dotted("getattr(L['self'].h._modules['0'], '<a b>')") == "h.0.<a b>"
    assert dotted("getattr(getattr(L['self'], 'a-b'), 'c-d').up") == "a-b.c-d.up"


@pytest.mark.parametrize(
    ("expression", "path"),
    [
        ("L['self'].__dict__['_modules']['up_blocks'].0", "up_blocks.0"),
        ("L['self'].__dict__['_modules']['up']._modules['0']._parameters['weight']", "up.0.weight"),
        ("L['self'].__dict__['_buffers']['mean']", "mean"),
        ("L['self']._modules['a'].__dict__['_modules']['b']", "a.b"),
        ("L['step'].__closure__[0].cell_contents._modules['up']", "up"),
        ("L['step'].__self__.__dict__['_modules']['up']", "up"),
        ("G['net']._modules['up']", "net.up"),
        ("L['self'].__dict__['_modules']['blocks'].__dict__['_modules']['0']", "blocks.0"),
    ],
)
def test_a_path_has_the_user_s_names_alone(expression: str, path: str) -> None:
    assert dotted(expression) == path


def test_a_class_with_a_getattr_of_its_own_has_paths_as_others() -> None:
    class Found(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up_blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def __getattr__(self, name: str) -> Any:
            return super().__getattr__(name)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up_blocks[1](self.up_blocks[0](x))

    paths: list[str] = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        paths.extend(path for node in gm.graph.nodes if (path := module_path(node)))
        return gm

    torch.compile(Found(), backend=backend)(torch.ones(2, 4))
    assert list(dict.fromkeys(paths)) == ["up_blocks.0", "up_blocks.1"]


def test_the_module_that_is_being_called_is_known_by_its_path() -> None:
    found = []

    class Part(nn.Module):
        def forward(self) -> None:
            found.append(calling())

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h = nn.ModuleList([Part(), Part()])

        def forward(self) -> None:
            found.append(calling())
            for part in self.h:
                part()

    Whole()()
    assert found == ["Whole", "h.0 (Part)", "h.1 (Part)"]
    assert calling() == ""


def test_modules_have_their_class_and_containers_have_none() -> None:
    kinds = module_kinds(graph("a h.0.ln x"))
    assert kinds == {"h": "", "h.0": "Block", "h.0.ln": "Block"}

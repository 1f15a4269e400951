"""How many bytes a forward keeps for its backward: eager's, Inductor's and fusec's.

Counted are distinct storages beyond the outputs, the inputs, the parameters and the buffers, on
tensors without memory. So nothing is computed, and blocks may have their real size.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._functorch import config
from torch._subclasses.fake_tensor import FakeCopyMode

from fusec.codegen.targets import find_target
from fusec.options import Options
from fusec.tools.report.observe import new_fake_mode, observe

PRODUCTS = ("aten.mm.default", "aten.bmm.default")


class DropoutBlock(nn.Module):
    """GPT-2's block with its dropout; attention written out has a dropout of its own."""

    def __init__(self, width: int, heads: int, *, written_out: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.written_out = heads, written_out

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (p.view(b, t, self.heads, c // self.heads).transpose(1, 2) for p in parts)
        if not self.written_out:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.mT / (c // self.heads) ** 0.5
            past = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
            scores = scores.masked_fill(~past, torch.finfo(scores.dtype).min)
            y = F.dropout(scores.softmax(-1), 0.1) @ v
        return F.dropout(self.out(y.transpose(1, 2).reshape(b, t, c)), 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm1(x))
        hidden = F.gelu(self.up(self.norm2(x)), approximate="tanh")
        return x + F.dropout(self.down(hidden), 0.1)


def cut(
    module: nn.Module, x: torch.Tensor, *, target: str = "cpu", **options: Any
) -> tuple[fx.Graph, fx.Graph]:
    """Return the forward and the backward that fusec compiles a module to."""
    torch._dynamo.reset()
    chosen = Options.from_compile(None, options)
    row = find_target(target)
    forward, backward = observe(module, (x,), train=True, target=row, options=chosen)
    return forward.graph.graph, backward.graph.graph


def saved_bytes(forward: fx.Graph, backward: fx.Graph) -> int:
    """Return the bytes of what a backward reads beside gradients, inputs and outputs."""
    given = [n for n in backward.nodes if n.op == "placeholder" and "tangents" not in n.name]
    (output,) = forward.find_nodes(op="output")
    results = list(output.args[0])
    known = forward.find_nodes(op="placeholder") + results[: len(results) - len(given)]
    seen = {storage(n.meta["val"]) for n in known if is_tensor(n)}
    sizes = {
        storage(n.meta["val"]): n.meta["val"].untyped_storage().nbytes()
        for n in results[len(results) - len(given) :]
        if is_tensor(n)
    }
    return sum(size for key, size in sizes.items() if key not in seen)


def eager_bytes(module: nn.Module, x: torch.Tensor) -> int:
    """Return what eager's autograd keeps of a call."""
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        return kept.setdefault(storage(tensor), tensor)

    fake, given = without_memory(module, x)
    with given.fake_mode, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = fake(given)
    for own in (*fake.parameters(), *fake.buffers(), given, result):
        kept.pop(storage(own), None)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def inductor_bytes(module: nn.Module, x: torch.Tensor) -> int:
    """Return what Inductor's graphs keep, by its own settings of the partitioner."""
    from torch._inductor.compile_fx import compile_fx  # local: slow, and for this one question

    graphs: list[fx.Graph] = []

    def keep(graph: fx.GraphModule, *_: Any, **__: Any) -> Any:
        graphs.append(graph.graph)

        def call(args: list[Any]) -> Any:
            inputs = list(args)
            args.clear()
            return graph(*inputs)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    torch._dynamo.reset()
    fake, given = without_memory(module, x)
    with given.fake_mode, config.patch(enable_autograd_cache=False):
        backend = lambda gm, inputs: compile_fx(gm, inputs, inner_compile=keep)  # noqa: E731
        result = torch.compile(fake, backend=backend, dynamic=False)(given)
        torch.autograd.grad(result, (given, *fake.parameters()), torch.ones_like(result))
    return saved_bytes(*graphs)


def without_memory(module: nn.Module, x: torch.Tensor) -> tuple[nn.Module, torch.Tensor]:
    """Return a module and its input as fake tensors; the input requires a gradient."""
    mode = new_fake_mode()
    with mode, FakeCopyMode(mode):
        return copy.deepcopy(module), mode.from_tensor(x.detach()).requires_grad_()


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def products(graph: fx.Graph) -> int:
    return sum(str(n.target) in PRODUCTS for n in graph.nodes)

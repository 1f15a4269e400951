"""What a caller sees of a function's results: values, objects, memory, gradients, later writes.

``outcome_of(fn, inputs, plan)`` calls a function once and looks at all of it, in the order of a
plan that a seed draws: which results get gradients, how large, how often; which are written then.
``differences`` compares what eager leaves behind with what a compiled function does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

RELATIVE, ABSOLUTE = 2e-4, 2e-5


@dataclass(frozen=True)
class Plan:
    """What is done with the results, by a seed.

    Attributes:
        rounds: how often gradients are asked for.
        hooked: leaves may have hooks.
        late: something is written between forward and backward.
    """

    seed: int
    rounds: int = 2
    hooked: bool = True
    late: bool = False


@dataclass
class Outcome:
    """What was seen.

    Attributes:
        facts: what must be equal: objects, memory, flags, strides.
        values: what must be close, by what it is.
        refusal: what the backward raised; "" if nothing.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    refusal: str = ""


def outcome_of(fn: Callable[..., Any], inputs: Sequence[Tensor], plan: Plan) -> Outcome:
    """Call a function with inputs of one's own, and look at what it leaves."""
    seen = Outcome()
    pick = random.Random(plan.seed)
    results = fn(*inputs)
    flat, tree = pytree.tree_flatten(results)
    seen.facts["structure"] = str(tree)
    everything = [*inputs, *flat]
    names = [f"input {k}" for k in range(len(inputs))] + [f"result {k}" for k in range(len(flat))]
    _look_at_objects(seen, everything, names)
    _keep(seen, "after the call", everything, names)
    _look_at_gradients(seen, inputs, flat, plan, pick)
    _look_at_writes(seen, everything, names)
    return seen


def _look_at_objects(seen: Outcome, everything: list[Any], names: list[str]) -> None:
    """Note of each tensor which is the first one that is it, and which has its memory."""
    for k, (one, name) in enumerate(zip(everything, names, strict=True)):
        if not isinstance(one, Tensor):
            seen.facts[name] = one
            continue
        same = next(names[j] for j in range(k + 1) if everything[j] is one)
        memory = one.untyped_storage().data_ptr()
        near = next(
            j
            for j in range(k + 1)
            if isinstance(everything[j], Tensor)
            and everything[j].untyped_storage().data_ptr() == memory
        )
        seen.facts[name] = {
            "shape": tuple(one.shape),
            "strides": _significant(one),
            "dtype": one.dtype,
            "requires_grad": one.requires_grad,
            "is_leaf": one.is_leaf,
            "object": same,
            "memory": names[near],
            "offset": (one.data_ptr() - everything[near].data_ptr()) // one.element_size(),
        }


def _significant(tensor: Tensor) -> tuple[int, ...]:
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple(step if extent > 1 else 0 for extent, step in pairs)


def _keep(seen: Outcome, when: str, everything: list[Any], names: list[str]) -> None:
    for one, name in zip(everything, names, strict=True):
        if isinstance(one, Tensor):
            seen.values[f"{name} {when}"] = one.detach().clone()


def _look_at_gradients(
    seen: Outcome, inputs: Sequence[Tensor], flat: list[Any], plan: Plan, pick: random.Random
) -> None:
    roots = [r for r in flat if isinstance(r, Tensor) and r.requires_grad and not r.is_leaf]
    leaves = [leaf for one in inputs for leaf in _leaves_of(one)]
    if not roots:
        return
    for leaf in leaves if plan.hooked else ():
        if pick.random() < 0.2:
            leaf.register_hook(_larger)
    if plan.late:
        _write_late(inputs, flat, pick)
    try:
        for again in range(plan.rounds):
            chosen = [r for r in roots if pick.random() < 0.6] or [pick.choice(roots)]
            sent = [_drawn(r, pick.randrange(10**6)) for r in chosen]
            kept = again + 1 < plan.rounds
            torch.autograd.backward(chosen, sent, retain_graph=kept)
    except Exception as error:  # by autograd, or a hook that gets no gradient
        seen.refusal = str(error)
    for k, leaf in enumerate(dict.fromkeys(leaves)):
        seen.values[f"gradient of input {k}"] = _gradient(leaf)


def _larger(gradient: Tensor | None) -> Tensor | None:
    """Change a gradient; there is none where AOTAutograd's backward returns none."""
    return None if gradient is None else gradient * 1.5


def _leaves_of(tensor: Tensor) -> list[Tensor]:
    """Return the leaf that an input was made of (see `training.tensors`), or the input itself."""
    found: Tensor = getattr(tensor, "leaf", tensor)
    return [found] if found.requires_grad and found.is_leaf else []


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.clone()


def _drawn(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=like.dtype)


def _write_late(inputs: Sequence[Tensor], flat: list[Any], pick: random.Random) -> None:
    written = pick.choice([t for t in (*inputs, *flat) if isinstance(t, Tensor)])
    if _writable(written):
        with torch.no_grad():
            written.mul_(0.5)


def _writable(tensor: Tensor) -> bool:
    """Return True where each element has a place of its own."""
    return all(s != 0 or n < 2 for n, s in zip(tensor.shape, tensor.stride(), strict=True)) and (
        tensor.is_floating_point()
    )


def _look_at_writes(seen: Outcome, everything: list[Any], names: list[str]) -> None:
    """Write to one tensor after the other: which others see it, and without gradients count it?

    With gradients AOTAutograd hides from autograd that parts of one ``split`` share memory.
    """
    counts = not any(isinstance(t, Tensor) and t.requires_grad for t in everything)
    for one, name in zip(everything, names, strict=True):
        if not isinstance(one, Tensor) or not _writable(one):
            continue
        before = [t._version if isinstance(t, Tensor) else 0 for t in everything]
        with torch.no_grad():
            one.detach().add_(1)
        after = [t._version if isinstance(t, Tensor) else 0 for t in everything]
        pairs = zip(names, before, after, strict=True) if counts else ()
        seen.facts[f"counted by, {name} written"] = [n for n, a, b in pairs if a != b]
    _keep(seen, "after writes", everything, names)


def differences(eager: Outcome, compiled: Outcome) -> list[str]:
    """Return what a compiled function leaves otherwise than eager, as lines.

    Where eager's backward raises there is no gradient to compare.
    """
    found = []
    for name, expected in eager.facts.items():
        actual = compiled.facts.get(name)
        if isinstance(expected, dict) and isinstance(actual, dict):
            for key in expected:
                if expected[key] != actual[key]:
                    found.append(f"{name}: {key} is {actual[key]}, in eager {expected[key]}")
        elif expected != actual:
            found.append(f"{name}: {actual}, in eager {expected}")
    if eager.refusal:
        return found
    if compiled.refusal:
        return [*found, f"the backward raises: {compiled.refusal}"]
    for name, value in eager.values.items():
        other = compiled.values.get(name)
        if other is None or other.shape != value.shape:
            found.append(f"{name} is {None if other is None else tuple(other.shape)}")
        elif not torch.allclose(other, value, RELATIVE, ABSOLUTE, equal_nan=True):
            found.append(
                f"{name} is {other.flatten().tolist()}, in eager {value.flatten().tolist()}"
            )
    return found

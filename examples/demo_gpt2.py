"""GPT-2 (124M) compiled by fusec: checked against eager, timed, and its kernels shown.

Run by `make demo`; needs no GPU and no network. The weights are random with a fixed seed, dropout
is 0, and the input is Lincoln's Gettysburg Address (text.txt, public domain), one token a byte. On
a machine with a GPU everything runs there, in bf16; else on the CPU, in fp32.

A result is accepted by the rule of PyTorch's own benchmark suite (`torch._dynamo.utils.same`):
close to eager, or no further from an fp64 run of the same model than eager is, up to a small
factor.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import same

import fusec

try:
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging as transformers_logging
except ImportError as missing:
    sys.exit(f'error: {missing.name} is missing: pip install -e ".[demo]"')

TIMED_SECONDS = 15.0
"""How long each of the two comparisons is timed; at least three rounds of each."""
START = time.perf_counter()


class Forward(nn.Module):
    """Logits of the next token: f32 or bf16[batch, position, vocabulary]."""

    def __init__(self, gpt: nn.Module) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.gpt(ids, use_cache=False).logits


class Loss(Forward):
    """Mean cross-entropy of the next token."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = super().forward(ids)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def say(message: str = "") -> None:
    print(message, flush=True)


def progress(message: str) -> None:
    print(f"[{time.perf_counter() - START:5.0f} s] {message}", file=sys.stderr, flush=True)


def title(text: str) -> None:
    say(f"\n{text}\n{'-' * len(text)}")


def make_model(device: str, dtype: torch.dtype) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return GPT2LMHeadModel(config).to(device=device, dtype=dtype)


def make_tokens(batch: int, length: int, device: str) -> torch.Tensor:
    """Return i64[batch, length]: the text's bytes, from the start again where it ends."""
    text = (Path(__file__).parent / "text.txt").read_bytes()
    repeated = text * (1 + batch * length // len(text))
    return torch.tensor(list(repeated[: batch * length]), device=device).view(batch, length)


def step(fn: Callable[..., torch.Tensor], model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Run one training step's forward and backward; return the loss."""
    model.zero_grad()
    loss = fn(ids)
    loss.backward()
    return loss.detach()


def gradients(fn: Callable[..., torch.Tensor], model: nn.Module, ids: torch.Tensor) -> list[Any]:
    """Return the loss of one training step and every gradient."""
    loss = step(fn, model, ids)
    return [loss, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def check(name: str, eager: Any, compiled: Any, reference: Any) -> None:
    """Accept or refuse the compiled results by the fp64 rule; end the demo if refused."""
    error = max(float((a - b).abs().max()) for a, b in zip(eager, compiled, strict=True))
    tol = 1e-4 if eager[0].dtype is torch.float32 else 1e-2
    if not same(eager, compiled, fp64_ref=reference, cos_similarity=False, tol=tol):
        say(f"{name}: WRONG, largest difference from eager {error:.1e}")
        raise SystemExit(1)
    say(f"{name}: agrees with eager; largest difference {error:.1e}")


def time_both(name: str, eager: Callable[[], Any], compiled: Callable[[], Any]) -> None:
    """Time two functions in turns and print the medians."""
    progress(f"timing {name}")
    seconds: dict[Callable[[], Any], list[float]] = {eager: [], compiled: []}
    begin = time.perf_counter()
    while len(seconds[eager]) < 3 or time.perf_counter() - begin < TIMED_SECONDS:
        for fn, times in seconds.items():
            wait()
            start = time.perf_counter()
            fn()
            wait()
            times.append(time.perf_counter() - start)
    before, after = (statistics.median(times) * 1e3 for times in seconds.values())
    rounds = len(seconds[eager])
    say(
        f"{name:<14} eager {before:8.1f} ms   fusec {after:8.1f} ms   "
        f"{before / after:.2f}x   ({rounds} rounds, in turns, medians)"
    )


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def show_plan(name: str, explanation: Any) -> None:
    """Print launches and bytes of each graph, before and after."""
    for graph in explanation.graphs:
        say(
            f"{name + ', ' + graph.name:<24} launches {graph.launches_eager:4d} -> "
            f"{graph.launches:3d} ({len(graph.kernels)} kernels of fusec)   "
            f"bytes {graph.bytes_eager / 1e6:5.0f} -> {graph.bytes_moved / 1e6:5.0f} MB, "
            f"floor {graph.bytes_floor / 1e6:5.0f} MB"
        )


def show_kernel(model: nn.Module, ids: torch.Tensor) -> None:
    """Print the kernel of bias, residual and a LayerNorm's rows for Hopper GPUs, and a load of it.

    Whether it has the norm or its statistics alone depends on the number of tokens: behind few of
    them the product normalizes the rows that it reads.
    """
    target = "sm_90"
    made = fusec.kernels(model, ids, target=target)
    norm = ("rsqrt", "mean")
    kernel = max(
        made, key=lambda k: ("mm" in k.notation) + any(word in k.notation for word in norm)
    )
    title(f"One kernel as Triton, for {target}: {kernel.name}")
    say(kernel.source)
    sass = [line.strip() for line in kernel.assembly("sass").splitlines()]
    loads = [line for line in sass if "LDG" in line]
    wide = [line for line in loads if "LDG.E.128" in line]
    title(f"A load of its machine code ({len(wide)} of {len(loads)} are 16 bytes wide)")
    say((wide or loads)[0])


def main() -> None:
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    transformers_logging.set_verbosity_error()
    gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    ids = make_tokens(8, 512, device) if gpu else make_tokens(1, 128, device)
    progress("building GPT-2, 124M parameters, random weights")
    gpt = make_model(device, dtype)
    forward, loss = Forward(gpt), Loss(gpt)
    title(f"GPT-2 124M, {str(dtype)[6:]}, {ids.shape[0]} x {ids.shape[1]} tokens, on {device}")

    progress("explaining the forward")
    show_plan("inference", fusec.explain(forward, ids))
    progress("explaining the training step")
    show_plan("training", fusec.explain(loss, ids, train=True))

    title("Correctness")
    progress("eager and fp64 runs")
    wide = copy.deepcopy(gpt).double()
    few = ids[:1, :128]
    with torch.no_grad():
        expected, reference = Forward(gpt)(few), Forward(wide)(few)
    expected_step, reference_step = (gradients(Loss(m), m, few) for m in (gpt, wide))
    compiled_forward = torch.compile(forward, backend="fusec")
    compiled_loss = torch.compile(loss, backend="fusec")
    progress("compiling the forward")
    with torch.no_grad():
        check("forward", [expected], [compiled_forward(few)], [reference])
    progress("compiling the training step")
    check("training step", expected_step, gradients(compiled_loss, gpt, few), reference_step)
    del wide, reference, reference_step

    title("Time")
    with torch.no_grad():
        time_both("forward", lambda: forward(ids), lambda: compiled_forward(ids))
    time_both(
        "training step",
        lambda: step(loss, gpt, ids),
        lambda: step(compiled_loss, gpt, ids),
    )
    progress("compiling a kernel for a GPU")
    show_kernel(forward, ids)
    progress("done")


if __name__ == "__main__":
    main()

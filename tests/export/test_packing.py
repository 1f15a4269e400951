"""Graphs that are saved in one process and run in another, which compiles nothing."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusec.archive.graph import FORMAT, BadArchive, unpack
from fusec.archive.shipped import Shipped
from fusec.codegen.targets import find_target
from fusec.export.packing import Packed, pack
from fusec.runtime.cache.entry import decode, encode
from fusec.runtime.calls.convention import Convention
from tests.support import BACKEND, values

pytestmark = pytest.mark.skipif(BACKEND != "fusec", reason="is about fusec's own archives")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = F.gelu(self.up(x))
        return y, y.sum()


@pytest.fixture(autouse=True, scope="module")
def _torch_compiles_ahead() -> Iterator[None]:
    """Torch 2.11 has `aot_compile` only where it is asked for it."""
    with torch._dynamo.config.patch(enable_aot_compile=True):
        yield


@pytest.fixture(scope="module")
def block() -> Block:
    torch.manual_seed(0)
    return Block()


@pytest.fixture(scope="module")
def made(block: Block) -> Any:
    """A block that was compiled ahead of time for training."""
    torch._dynamo.reset()
    compiled = torch.compile(block, backend="fusec", fullgraph=True).forward
    return compiled.aot_compile(((values(4, 8),), {}))


@pytest.fixture(scope="module")
def content(made: Any) -> bytes:
    """Its archive."""
    return Shipped.serialize_compile_artifacts(made._artifacts.compiled_fn)


@pytest.fixture(scope="module")
def saved(made: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of torch's around that."""
    path = tmp_path_factory.mktemp("saved") / "block.bin"
    made.save_compiled_function(str(path))
    return path


def loaded(saved: Path) -> Any:
    with saved.open("rb") as file:
        return torch.compiler.load_compiled_function(file)


def test_a_loaded_function_does_what_the_module_does(block: Block, saved: Path) -> None:
    call = loaded(saved)
    x = values(4, 8, seed=3)
    for made, expected in zip(call(block, x), block(x), strict=True):
        torch.testing.assert_close(made, expected)
    found, wanted = (
        torch.autograd.grad(fn(x)[1], list(block.parameters()))
        for fn in (lambda x: call(block, x), block)
    )
    for made, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(made, expected)


def test_torch_s_guards_refuse_another_shape(block: Block, saved: Path) -> None:
    with pytest.raises(RuntimeError, match="GuardManager check failed"):
        loaded(saved)(block, values(5, 8))


def test_a_graph_of_any_size_is_saved(block: Block, tmp_path: Path) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(block, backend="fusec", fullgraph=True, dynamic=True).forward
    compiled.aot_compile(((values(4, 8),), {})).save_compiled_function(str(tmp_path / "any.bin"))
    call, weights = loaded(tmp_path / "any.bin"), list(block.parameters())
    for rows in (2, 4, 37):
        x = values(rows, 8, seed=rows)
        made, expected = call(block, x), block(x)
        torch.testing.assert_close(made[0], expected[0])
        found, wanted = (torch.autograd.grad(one[1], weights) for one in (made, expected))
        torch.testing.assert_close(found, wanted)


def shared(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = torch.sin(x)
    return y.view(-1).detach(), y, y[0].detach()


def test_results_that_share_memory_are_saved_as_objects_of_their_own(tmp_path: Path) -> None:
    torch._dynamo.reset()
    x = values(2, 3).requires_grad_()
    compiled = torch.compile(shared, backend="fusec", fullgraph=True)
    compiled.aot_compile(((x,), {})).save_compiled_function(str(tmp_path / "shared.bin"))
    made, expected = loaded(tmp_path / "shared.bin")(x), shared(x)
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other)
        assert one.requires_grad == other.requires_grad
    assert len({t.untyped_storage().data_ptr() for t in made}) == 1
    (found,), (wanted,) = (torch.autograd.grad(one[1].sum(), x) for one in (made, expected))
    torch.testing.assert_close(found, wanted)


CHECK = """
import sys, torch
from tests.export.test_packing import Block, values
torch.manual_seed(0)
block, x = Block(), values(4, 8, seed=3)
with open(sys.argv[1], "rb") as file:
    call = torch.compiler.load_compiled_function(file)
torch.testing.assert_close(call(block, x)[0], block(x)[0])
"""


def python(code: str, *args: object, **variables: str) -> None:
    command = [sys.executable, "-c", code, *map(str, args)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **variables},
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


IMPORTED = """
import sys, torch
with open(sys.argv[1], "rb") as file:
    torch.compiler.load_compiled_function(file)
parts = {name.split(".")[1] for name in sys.modules if name.startswith("fusec.")}
assert not parts & {"codegen", "driver", "export", "frontend", "ir", "passes", "tools"}, parts
"""


def test_what_loads_it_imports_no_compiler(tmp_path: Path) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(shared, backend="fusec", fullgraph=True)
    compiled.aot_compile(((values(2, 3),), {})).save_compiled_function(str(tmp_path / "f.bin"))
    python(IMPORTED, tmp_path / "f.bin")


@pytest.mark.slow
def test_another_process_loads_it_without_a_compiler(saved: Path, tmp_path: Path) -> None:
    python(CHECK, saved, FUSEC_CACHE_DIR=str(tmp_path), FUSEC_CXX="/bin/false")


SAVE = """
import sys, torch
from tests.export.test_packing import Block, values
block = torch.compile(Block(), backend="fusec")
block(values(4, 8))[1].backward()
content, info = torch.compiler.save_cache_artifacts()
assert len(info.artifacts["fusec"]) == 4, info
open(sys.argv[1], "wb").write(content)
"""
LOAD = """
import sys, torch
import fusec.driver.backend
from tests.export.test_packing import Block, values
info = torch.compiler.load_cache_artifacts(open(sys.argv[1], "rb").read())
assert len(info.artifacts["fusec"]) == 4, info
def traced(*args, **named): raise AssertionError("AOTAutograd runs")
fusec.driver.backend.compile_with = traced
torch.compile(Block(), backend="fusec", options={"strict": True})(values(4, 8))[1].backward()
"""


@pytest.mark.slow
def test_artifacts_of_torch_hold_entries_and_starts(tmp_path: Path) -> None:
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    python(SAVE, tmp_path / "artifacts", FUSEC_CACHE_DIR=one)
    python(LOAD, tmp_path / "artifacts", FUSEC_CACHE_DIR=other, PATH="")


def scaled(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x * 2, x.view(-1)


def test_what_cannot_be_saved_is_said() -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match="a result that is a view cannot be saved"):
        torch.compile(scaled, backend="fusec", fullgraph=True).aot_compile(((values(3, 4),), {}))


def with_about(content: bytes, **changed: Any) -> bytes:
    blobs = decode("fusec archive", content)
    assert blobs is not None
    about = json.loads(blobs["about.json"])
    about["machine"] |= changed.pop("machine", {})
    blobs["about.json"] = json.dumps(about | changed).encode()
    return encode("fusec archive", blobs)


REFUSED = {
    "format": ({"format": 99}, f"format 99, this fusec reads {FORMAT}"),
    "torch": ({"machine": {"torch": "1.0.0"}}, "made with torch 1.0.0, and"),
    "fusec": ({"machine": {"fusec": "9.9"}}, "made with fusec 9.9, and"),
    "processor": ({"machine": {"processor": "avx9000 amx-tomorrow"}}, "amx-tomorrow avx9000"),
    "device": (
        {"machine": {"target": "sm_90", "device": "cuda", "processor": ""}},
        "no CUDA device|this device is",
    ),
    "graphs": ({"parts": {}}, "graphs"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_machine_is_told_what_it_lacks(content: bytes, name: str) -> None:
    changed, said = REFUSED[name]
    with pytest.raises(BadArchive, match=said):
        unpack(with_about(content, **changed))


def test_the_page_says_the_format() -> None:
    page = Path(__file__).parents[2] / "docs" / "deploy.md"
    assert f"This is format {FORMAT}." in " ".join(page.read_text().split())


def test_a_thousand_mutations_are_errors(content: bytes) -> None:
    draw, end = random.Random(0), len(content)
    for _ in range(1000):
        changed = bytearray(content)
        match draw.randrange(3):
            case 0:
                changed[draw.randrange(end)] ^= 1 << draw.randrange(8)
            case 1:
                del changed[draw.randrange(end) :]
            case _:
                at = draw.randrange(end)
                changed[at : at + draw.randrange(64)] = draw.randbytes(draw.randrange(64))
        if bytes(changed) != content:
            with pytest.raises(BadArchive):
                unpack(bytes(changed))


def test_an_archive_without_kernels_is_an_error(content: bytes) -> None:
    blobs = decode("fusec archive", content)
    assert blobs is not None
    del blobs["forward/wrapper.py"]
    with pytest.raises(BadArchive, match="no whole graph 'forward'"):
        unpack(encode("fusec archive", blobs))


def test_bytes_of_a_graph_are_those_that_it_was_made_of() -> None:
    part = Packed("inference", {}, {"wrapper.py": b""})
    content = pack(Convention((None,), ()), [part], find_target("cpu"))
    assert Shipped.serialize_compile_artifacts(Shipped(len, content)) == content

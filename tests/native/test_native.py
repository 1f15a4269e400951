"""Models that C runs: `fusec build --native`, fusec.h, and a program that is compiled with it."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.while_loop import while_loop

import fusec
import fusec.native
from fusec.archive import graph as loading
from fusec.archive import sizes
from fusec.archive.model import KEY
from fusec.errors import UsageError
from fusec.export import Call, build, weights_of
from fusec.export.native_code import print_formula
from fusec.ir.dtype import DTYPES, F4X2
from fusec.options import Options
from fusec.processors import PROCESSORS
from fusec.runtime.cache.entry import decode, encode
from fusec.runtime.kernels.processor import cpu_features
from fusec.tools.cli import main
from tests.support import BACKEND, on_processor, values

save_file = pytest.importorskip("safetensors.torch").save_file
COMPILER = shutil.which("gcc") or shutil.which("clang")
pytestmark = [
    pytest.mark.skipif(BACKEND != "fusec", reason="is about fusec's own archives"),
    pytest.mark.skipif(COMPILER is None, reason="needs a C compiler"),
]

HERE = Path(__file__).parent
NATIVE = [Options.from_compile(None, {"native": True})]
# Its warnings are those of -O1 for the programs that are not sanitized.
SANITIZED = ("-O0", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


class Net(nn.Module):
    """Products of many rows, a norm, a value that no state_dict has, results of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 24)
        self.down = nn.Linear(24, 5)
        self.register_buffer("scale", torch.full((5,), 2.0), persistent=False)

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> dict[str, Any]:
        h = F.gelu(self.up(self.norm(x)))
        y = self.down(h) * self.scale
        return {"y": torch.where(mask, y, 0.0), "rest": (h.sum(-1), y.t(), 3, x)}


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def inputs_of(seed: int = 1) -> dict[str, torch.Tensor]:
    return {"x": values(33, 16, seed=seed), "mask": values(33, 5, seed=2) > 0}


def archive(folder: Path, model: nn.Module | Callable[..., Any], *args: Any, **named: Any) -> Path:
    """Write a model's archive and weights; return where."""
    torch._dynamo.reset()
    path = folder / "net.fusec"
    path.write_bytes(build(model, Call(args, named), NATIVE))
    if isinstance(model, nn.Module):
        save_file(weights_of(model), path.with_suffix(".safetensors"))
    return path


def compiled(folder: Path, *flags: str, source: str = "program.c") -> Path:
    """Compile a program with the library, warnings being errors."""
    warnings = ("-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O1")
    path = folder / source.removesuffix(".c")
    own = (HERE / source, *fusec.native.flags(), "-lpthread", "-o", path)
    command = [COMPILER, *warnings, *flags, *own]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return path


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("program"), *SANITIZED)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return archive(tmp_path_factory.mktemp("net"), net(), **inputs_of())


def run(
    program: Path,
    path: Path,
    *tensors: torch.Tensor,
    like: tuple[torch.Tensor, ...] = (),
    weights: str | Path | None = None,
    threads: int = 1,
    **environment: str,
) -> tuple[str, list[torch.Tensor]]:
    """Run a model in C; return what is printed, and results of the types of `like`."""
    folder = path.parent
    given, made = [], []
    for k, tensor in enumerate(tensors):
        given.append(folder / f"in{k}")
        flat = tensor.contiguous().reshape(-1)
        given[-1].write_bytes(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    results = [folder / f"out{k}" for k in range(len(like))]
    beside = path.with_suffix(".safetensors") if weights is None else weights
    command = [program, path, beside, threads, *given, "--", *results]
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert "runtime error" not in done.stderr and "Sanitizer" not in done.stderr, done.stderr
    assert done.returncode < 90, (done.returncode, done.stderr)
    if not done.returncode:
        for file, one in zip(results, like, strict=True):
            flat = torch.frombuffer(bytearray(file.read_bytes()), dtype=one.dtype)
            made.append(flat.reshape(one.shape))
    return done.stdout, made


def test_c_computes_what_python_does_bit_for_bit(program: Path, built: Path) -> None:
    given = inputs_of(seed=7)
    found = fusec.load(built)(**given)
    expected = found["y"], found["rest"][0], found["rest"][1]
    said, made = run(program, built, given["x"], given["mask"], like=expected)
    assert said.splitlines() == [
        "input x: f32[33, 16]",
        "input mask: bool[33, 5]",
        "output result['y']: f32[33, 5]",
        "output result['rest'][0]: f32[33]",
        "output result['rest'][1]: f32[5, 33]",
    ]
    assert all(map(torch.equal, made, expected))
    torch.testing.assert_close(found["y"], net()(**given)["y"])


def test_several_threads_call_one_model_at_the_same_time(program: Path, built: Path) -> None:
    given = inputs_of()
    expected = (fusec.load(built)(**given)["y"],)
    _, made = run(program, built, *given.values(), like=expected, threads=2, CALLERS="4")
    assert torch.equal(made[0], expected[0])


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_the_header_is_one_of_c_plus_plus_too() -> None:
    flags = ("-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only", "-xc++")
    header = fusec.native.path() / "fusec.h"
    subprocess.run(["g++", *flags, "-include", str(header), "/dev/null"], check=True)


@pytest.mark.skipif(shutil.which("readelf") is None, reason="reads the library's table")
def test_the_kernels_need_no_library_but_openmp_s_and_c_s(built: Path, tmp_path: Path) -> None:
    variants = decode(KEY, built.read_bytes())
    blobs = decode(loading.KEY, variants["cpu"]) if variants else None
    assert blobs is not None
    (tmp_path / "kernels.so").write_bytes(blobs["inference/kernels.so"])
    command = ["readelf", "-d", str(tmp_path / "kernels.so")]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(\w+)", table)
    assert {"libgomp", "libomp", "libiomp5"} & {*needed}
    assert {*needed} <= {"libgomp", "libomp", "libiomp5", "libc", "libm"}


class Cell(nn.Module):
    """Loops of which all states are read, the last one, and one that data ends."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.cell = nn.Linear(6, 6), nn.GRUCell(6, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h, states = torch.zeros_like(x[:, 0]), []
        for t in range(12):
            h = torch.tanh(self.w(h) + x[:, t])
            states.append(h)
        g = h * 0
        for t in range(12):
            g = self.cell(x[:, t], g)
        start = torch.zeros((), dtype=torch.int64), g.abs() * 100
        halve = (lambda n, g: g.max() > 1), (lambda n, g: (n + 1, g / 2))
        return (torch.stack(states, 1), g, *while_loop(*halve, start))


def test_loops_are_calls_that_run_all_iterations(program: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Cell().eval()
    path = archive(tmp_path, model, values(3, 12, 6))
    for factor in (1.0, 1e3, 0.0):
        x = values(3, 12, 6, seed=4) * factor
        with torch.no_grad():
            wanted = model(x)
        _, made = run(program, path, x, like=wanted)
        for one, other in zip(wanted, made, strict=True):
            torch.testing.assert_close(one, other)


# -- what is refused -------------------------------------------------------------------------------


def test_a_digest_pins_an_archive(program: Path, built: Path) -> None:
    digest = hashlib.sha256(built.read_bytes()).hexdigest()
    given = tuple(inputs_of().values())
    for pin in (digest, digest.upper()):
        assert "error" not in run(program, built, *given, PIN=pin)[0]
    said, _ = run(program, built, *given, PIN=digest.replace(digest[0], "f0"[digest[0] == "f"]))
    assert said == "error 2: the archive has not the SHA-256 that is wanted\n"


def test_a_library_is_its_own_where_a_daemon_has_closed_the_files(
    program: Path, tmp_path: Path
) -> None:
    """A number of a file that was closed is given again: dlopen knows libraries by their paths."""
    x = values(64)
    for name, factor in (("before", 2), ("after", 5)):
        (tmp_path / name).mkdir()
        archive(tmp_path / name, partial(_scaled, factor), x)
    before, after = (next((tmp_path / name).glob("*.fusec")) for name in ("before", "after"))
    _, (made,) = run(program, after, x, like=(x,), weights="-", BEFORE=str(before))
    assert torch.equal(made, fusec.load(after)(x))


def _scaled(factor: int, x: torch.Tensor) -> torch.Tensor:
    return x * factor + 1


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@pytest.mark.parametrize("order", [("first", "second"), ("second", "first")])
def test_of_tied_weights_that_differ_in_a_file_the_first_name_counts(
    program: Path, tmp_path: Path, order: tuple[str, str]
) -> None:
    torch._dynamo.reset()
    path, x = archive(tmp_path, Tied(), values(2, 3)), values(2, 3, seed=3)
    file = {f"{name}.bias": torch.zeros(3) for name in order}
    for name in order:
        file[f"{name}.weight"] = torch.full((3, 3), 1.0 if name == "first" else 2.0)
    header, body = {}, b""
    for name, tensor in file.items():  # in this order, which safetensors' own writer changes
        content = tensor.numpy().tobytes()
        ends = [len(body), len(body) + len(content)]
        header[name] = {"dtype": "F32", "shape": [*tensor.shape], "data_offsets": ends}
        body += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    weights = tmp_path / "two.safetensors"
    weights.write_bytes(len(text).to_bytes(8, "little") + text + body)
    expected = fusec.load(path, weights=weights)(x)
    _, (made,) = run(program, path, x, like=(expected,), weights=weights)
    assert torch.equal(made, expected)


def test_wrong_calls_have_codes_and_words(program: Path, built: Path) -> None:
    x, mask = inputs_of().values()
    said, _ = run(program, built, x[:32], mask)
    assert said.endswith("error 6: x has 2112 bytes, not 2048\n")
    assert "error 6: 0 threads, not 1 to 1024" in run(program, built, x, mask, threads=0)[0]
    said, _ = run(program, built, weights="-")
    assert said == "error 5: the model has weights\n"
    said, _ = run(program, built, weights="nowhere")
    assert said == "error 1: cannot read nowhere: No such file or directory\n"
    said, _ = run(program, built, weights=str(built.parent))
    assert said.startswith("error 1: cannot map ")
    said, _ = run(program, built.with_suffix(".safetensors"))
    assert said == "error 2: the file is no archive of fusec build, or damaged\n"


def test_a_damaged_variant_is_none_without_native(
    program: Path, built: Path, tmp_path: Path
) -> None:
    whole = built.read_bytes()
    assert whole.count(b"fusec archive") == 1
    damaged = tmp_path / "damaged.fusec"
    damaged.write_bytes(whole.replace(b"fusec archive", b"fusec archivE"))
    said, _ = run(program, damaged, *inputs_of().values())
    assert said == "error 2: the archive is not the one that was written\n"


def test_weights_that_do_not_fit_are_named(program: Path, built: Path, tmp_path: Path) -> None:
    own = weights_of(net())
    for changed, problem in (
        ({"up.weight": own["up.weight"].double()}, "the weight up.weight has another type"),
        ({"up.weight": own["up.weight"].t().contiguous()}, "the weight up.weight has another type"),
        ({"up.bias": None}, "the weight up.bias is missing"),
    ):
        kept = {name: t for name, t in {**own, **changed}.items() if t is not None}
        save_file(kept, tmp_path / "w.safetensors")
        said, _ = run(program, built, weights=tmp_path / "w.safetensors")
        assert said.startswith(f"error 5: {problem}")


def repacked(content: bytes, change: Callable[[dict[str, bytes]], object]) -> bytes:
    """Return an archive with blobs of its variant changed, and every digest made right again."""
    variants = decode(KEY, content)
    assert variants is not None
    blobs = decode(loading.KEY, variants["cpu"])
    assert blobs is not None
    change(blobs)
    return encode(KEY, {"cpu": encode(loading.KEY, blobs)})


def described(blobs: dict[str, bytes]) -> None:
    """Let the code of an archive say that it was made with what stands beside it."""
    wrapper = blobs["inference/wrapper.py"].decode()
    end = replace(loading.read_contract(wrapper), beside=loading.digest_beside(blobs))
    body = wrapper.rpartition("\n# described: ")[0]
    blobs["inference/wrapper.py"] = (body + str(end)).encode()


def changing(name: str, old: bytes, new: bytes, *, honest: bool) -> Callable[[Any], None]:
    def change(blobs: dict[str, bytes]) -> None:
        assert old in blobs[name]
        blobs[name] = blobs[name].replace(old, new, 1)
        if honest:
            described(blobs)

    return change


LIES: dict[str, tuple[Callable[..., Any], str]] = {
    "a processor": (
        changing("names.txt", b"\n", b" avx9000\n", honest=True),
        "error 4: this processor lacks for cpu: avx9000\n",
    ),
    "names": (
        changing("names.txt", b"weight norm.weight", b"weight norm.bias", honest=False),
        "error 2: the archive is not the one that was written\n",
    ),
    "a size": (
        changing("inference/native.txt", b"f32 33 16", b"f32 99 16", honest=True),
        "error 2: the archive describes another function than it has\n",
    ),
    "a check": (
        changing("inference/native.txt", b"argument ", b"check < 1 2\nargument ", honest=True),
        "error 2: the archive describes another function than it has\n",
    ),
    "a version": (
        changing("inference/native.txt", b"native 2", b"native 1", honest=True),
        "error 3: the archive is of another version of fusec\n",
    ),
    "a held value": (
        lambda blobs: (blobs.update({"held/scale": b"1234"}), described(blobs)),
        "error 2: the archive does not hold what it says\n",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_archive_that_lies_is_an_error(
    program: Path, built: Path, tmp_path: Path, lie: str
) -> None:
    change, problem = LIES[lie]
    path = tmp_path / "net.fusec"
    path.write_bytes(repacked(built.read_bytes(), change))
    said, _ = run(program, path, weights=built.with_suffix(".safetensors"))
    assert said == problem


def test_an_archive_without_native_code_is_an_error(program: Path, tmp_path: Path) -> None:
    path = tmp_path / "net.fusec"
    torch._dynamo.reset()
    path.write_bytes(build(net(), Call((), inputs_of()), [Options.from_compile(None, None)]))
    said, _ = run(program, path)
    assert said == "error 3: the archive was built without --native\n"


def test_an_index_out_of_range_is_an_error(program: Path, tmp_path: Path) -> None:
    def look_up(table: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return table[i] * 2

    table, i = values(5, 8), torch.tensor([1, 4])
    path = archive(tmp_path, look_up, table, i)
    _, (made,) = run(program, path, table, i, like=(look_up(table, i),), weights="-")
    assert torch.equal(made, look_up(table, i))
    said, _ = run(program, path, table, torch.tensor([1, 5]), weights="-")
    assert said.endswith("error 7: an index among the inputs is out of range\n")


def test_the_command_refuses_what_c_cannot_do(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["torch.nn:Softsign", "--input", "f32[4]", "--native"]
    assert main(["build", *given, "--train"]) == 2
    assert "--native is for inference: leave out --train." in capsys.readouterr().err
    assert main(["build", *given, "--target", "sm_90"]) == 2
    assert "--native is for CPUs: put cpu into --target." in capsys.readouterr().err


def test_what_needs_torch_is_listed_with_its_line() -> None:
    def sorts(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(x + 1)

    torch._dynamo.reset()
    with pytest.raises(UsageError, match=r"without Python.*\n  aten\.linalg_inv_ex.*test_native"):
        build(sorts, Call((values(4, 4),)), NATIVE)


def test_a_loop_within_a_loop_needs_torch_and_says_so() -> None:
    def nested(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def body(h: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return while_loop(lambda h: h.sum() > 2, lambda h: (h * 0.5,), (h.sin(),))

        return while_loop(lambda h: h.sum() > 1, body, (x,))

    torch._dynamo.reset()
    with pytest.raises(UsageError, match=r"a loop: C runs .* within no other loop, at test_native"):
        build(nested, Call((values(8),)), NATIVE)


# -- sizes that a call chooses ---------------------------------------------------------------------


class Rows(nn.Module):
    """An attention over a table of positions, results of other sizes, parts that are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 24)
        self.places = nn.Parameter(torch.randn(12, 8))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        rows, steps, _ = x.shape
        h = self.up(x + self.places[:steps]).view(rows, steps, 3, 2, 4)
        z = F.scaled_dot_product_attention(*h.permute(2, 0, 3, 1, 4), is_causal=True)
        z = z.transpose(1, 2).reshape(rows, steps, 8) * y.softmax(1)
        return {"z": z, "last": z[:, 1:].sum(-1).t(), "twice": torch.cat((x, z), 1)}


def rows() -> Rows:
    torch.manual_seed(0)
    return Rows().eval()


def of_rows(count: int, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    return values(count, steps, 8, seed=3), values(count, steps, 8, seed=4)


@pytest.fixture(scope="module")
def sized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = of_rows(8, 10)
    path = tmp_path_factory.mktemp("sized") / "net.fusec"
    torch._dynamo.reset()
    call = Call(given, sizes=tuple((one, ("B", "T", None)) for one in given))
    path.write_bytes(build(rows(), call, NATIVE))
    save_file(weights_of(rows()), path.with_suffix(".safetensors"))
    return path


@pytest.mark.sampled(7)
@pytest.mark.parametrize("sizes", [(3, 5), (1, 12), (7, 2), (40, 9)])
def test_a_call_chooses_sizes_in_c_too(program: Path, sized: Path, sizes: tuple[int, int]) -> None:
    count, steps = sizes
    given = of_rows(count, steps)
    expected = tuple(fusec.load(sized)(*given).values())
    own = f"B={count} T={steps}"
    said, made = run(program, sized, *given, like=expected, SIZES=own, threads=2)
    assert said.splitlines() == [
        f"size B: 1 to {2**63 - 1}",
        "size T: 2 to 12",
        f"input x: f32[{count}, {steps}, 8]",
        f"input y: f32[{count}, {steps}, 8]",
        f"output result['z']: f32[{count}, {steps}, 8]",
        f"output result['last']: f32[{steps - 1}, {count}]",
        f"output result['twice']: f32[{count}, {2 * steps}, 8]",
    ]
    assert all(map(torch.equal, made, expected))
    for one, wanted in zip(made, rows()(*given).values(), strict=True):
        torch.testing.assert_close(one, wanted)


def test_what_is_chosen_shows_before_it_is_and_memory_follows(program: Path, sized: Path) -> None:
    said, _ = run(program, sized)
    assert "input x: f32[-1, -1, 8]\n" in said
    assert said.endswith("error 6: B is to be chosen first, by fusec_choose\n")
    needed = []
    for count in (1, 10, 100):
        given = of_rows(count, 4)
        said, _ = run(program, sized, *given, SIZES=f"B={count} T=4", WORKSPACE="1", like=())
        needed.append(int(said.splitlines()[-1].removeprefix("workspace ")))
    assert needed[0] < needed[1] < needed[2] <= 10 * needed[1]


BAD_SIZES = {
    "B=2 T=13": "T is 13; the model was built for T <= 12",
    "B=2 T=1": "T is 1; the model was built for T >= 2",
    "B=0 T=4": "B is 0; the model was built for B >= 1",
    "B=-4 T=4": "B is -4",
    "T=4": "the size B is missing",
    "B=2 T=4 C=8": "2 sizes are to be chosen, not 3",
    "B=2 T=4 B=3": "the size B is given twice",
    f"B={2**62} T=4": "tensors of these sizes are too large",
    f"B={2**53} T=4": "a run of these sizes needs too much memory",
}


@pytest.mark.parametrize("sizes", BAD_SIZES)
def test_sizes_that_it_was_not_built_for_are_errors(program: Path, sized: Path, sizes: str) -> None:
    said, _ = run(program, sized, SIZES=sizes)
    assert said.endswith(f"error 10: {BAD_SIZES[sizes]}\n")


def test_inputs_that_share_a_size_s_name_share_its_value(program: Path, tmp_path: Path) -> None:
    places = values(12, 4, seed=5)

    def scores(x: torch.Tensor, y: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return (x + places[: x.shape[1]]) @ y[:, 1:].transpose(1, 2)

    def given(steps: int) -> tuple[torch.Tensor, ...]:
        return values(2, steps, 4, seed=3), values(2, steps, 4, seed=4), places

    x, y, _ = given(10)
    torch._dynamo.reset()
    call = Call((x, y, places), sizes=((x, (None, "T", None)), (y, (None, "T", None))))
    path = tmp_path / "net.fusec"
    path.write_bytes(build(scores, call, NATIVE))
    expected = scores(*given(5))
    said, (made,) = run(program, path, *given(5), like=(expected,), weights="-", SIZES="T=5")
    assert said.startswith("size T: 2 to 12\ninput x: f32[2, 5, 4]\ninput y: f32[2, 5, 4]\n")
    torch.testing.assert_close(made, expected)
    said, _ = run(program, path, weights="-", SIZES="T=5 T=7")
    assert said.endswith("error 10: the size T is given twice\n")


def test_a_call_of_other_bytes_than_were_chosen_is_refused(program: Path, sized: Path) -> None:
    x, y = of_rows(3, 5)
    said, _ = run(program, sized, x, y[:2], SIZES="B=3 T=5")
    assert said.endswith("error 6: y has 480 bytes, not 320\n")


KNOWN, OPEN, NO_NUMBER, NO_FORMULA = range(4)
ODD = (0, 1, 2, 3, 7, 64, 2**31, 2**32 + 1, 2**62, 2**63 - 1, -1)


def drawn(draw: random.Random, depth: int) -> Any:
    """Return a formula of two sizes."""
    if not depth or draw.random() < 0.3:
        return draw.choice(("s0", "s1", draw.choice((0, 1, 8, 63, -1, -7, 10**17))))
    parts = [drawn(draw, depth - 1) for _ in range(2)]
    return draw.choice(("+", "*", "min", "//", "%")), *parts


def outcome(formula: Any, known: dict[str, int]) -> tuple[int, int]:
    """Return what comes of a formula, and its number: each part has to be one of 64 bits."""
    if isinstance(formula, int | str):
        number = known[formula] if isinstance(formula, str) else formula
        return (OPEN, 0) if isinstance(formula, str) and number < 0 else (KNOWN, number)
    sides = [outcome(part, known) for part in formula[1:]]
    worst = max(state for state, _ in sides)
    if worst != KNOWN:
        return worst, 0
    numbers = [number for _, number in sides]
    if formula[0] in ("//", "%") and numbers[1] <= 0:
        return NO_NUMBER, 0
    made = sizes.value((formula[0], *numbers), {})
    return (KNOWN, made) if -(2**63) <= made < 2**63 else (NO_NUMBER, 0)


@pytest.fixture(scope="module")
def formulas(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[list[str]]]:
    """What C says of formulas: a state, a number, and words."""
    path = compiled(tmp_path_factory.mktemp("formulas"), *SANITIZED, source="formulas.c")

    def ask(lines: list[str]) -> list[list[str]]:
        text = "\n".join(lines)
        done = subprocess.run([str(path)], input=text, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [line.split(" ", 2) for line in done.stdout.splitlines()]

    return ask


def test_formulas_are_in_c_what_they_are_in_python(formulas: Callable[..., Any]) -> None:
    draw = random.Random(0)
    asked = [(drawn(draw, 4), {"s0": draw.choice(ODD), "s1": draw.choice(ODD)})
             for _ in range(4000)]  # fmt: skip
    said = formulas([f"{k['s0']} {k['s1']} {print_formula(one)}" for one, k in asked])
    states = set()
    for (one, known), (state, number, _) in zip(asked, said, strict=True):
        expected = outcome(one, known)
        states.add(expected[0])
        assert int(state) == expected[0], (one, known)
        if expected[0] == KNOWN:
            assert int(number) == expected[1], (one, known)
    assert states == {KNOWN, OPEN, NO_NUMBER}


def test_conditions_are_read_and_shown(formulas: Callable[..., Any]) -> None:
    asked = ("or", ("<=", "s0", 8), ("==", ("%", ("+", "s0", ("*", 2, "s1")), 4), 0))
    text = print_formula(asked)
    said = formulas([f"?{a} {b} {text}" for a, b in ((8, 1), (9, 1), (10, 1), (-1, 1))])
    assert [(int(state), int(holds)) for state, holds, _ in said[:3]] == [(0, 1), (0, 0), (0, 1)]
    assert int(said[3][0]) == OPEN
    assert said[1][2] == "A is 9, B is 1; the model was built for A <= 8 or (A + 2*B)%4 == 0"
    least = print_formula(("<", ("min", "s0", ("//", "s1", 2)), ("+", "s0", 1)))
    assert formulas([f"?9 1 {least}"])[0][2].endswith("built for min(A, B//2) < A + 1")


def test_what_is_no_formula_is_told_from_one(formulas: Callable[..., Any]) -> None:
    draw = random.Random(1)
    lines = []
    for _ in range(2000):
        text = list(print_formula((">=", drawn(draw, 3), drawn(draw, 3))))
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(text))
            text[at : at + draw.randint(0, 3)] = draw.choice((" ", "+ ", "9" * 19, "s2", "- ", ""))
        lines.append(f"{draw.choice(('', '?'))}5 6 {''.join(text)}")
    lines.append(f"5 6 {'+ ' * 5000}")
    states = [int(state) for state, *_ in formulas(lines)]
    assert states.count(NO_FORMULA) > 1000
    assert states[-1] == NO_FORMULA


def test_numbers_of_63_bits_and_long_sums_are_read(formulas: Callable[..., Any]) -> None:
    most, total = 2**63 - 1, reduce(lambda a, b: ("+", a, b), ["s0"] * 300)
    said = formulas([f"5 6 {most}", f"5 6 {most + 1}", f"5 6 {print_formula(total)}"])
    assert [(int(state), int(number)) for state, number, _ in said[::2]] == [
        (KNOWN, most),
        (KNOWN, 1500),
    ]
    assert int(said[1][0]) == NO_FORMULA


def test_writes_go_to_where_sizes_say(program: Path, tmp_path: Path) -> None:
    step, place = stepping(by_copy), torch.tensor([5, 2])
    x, cache = values(4, 8), values(4, 9, 8, seed=2)
    path = tmp_path / "net.fusec"
    names = (x, ("N", None)), (cache, ("N", "T", None))
    torch._dynamo.reset()
    path.write_bytes(build(step, Call((x, cache, place), sizes=names), NATIVE))
    x, cache = values(3, 8), values(3, 7, 8, seed=2)
    _, (made,) = run(program, path, x, cache, place, like=(x,), weights="-", SIZES="N=3 T=7")
    torch.testing.assert_close(made, step(x, cache, place))
    changed = torch.frombuffer(bytearray((tmp_path / "in1").read_bytes()), dtype=torch.float32)
    assert torch.equal(changed.reshape(cache.shape), cache)
    said, _ = run(program, path, x, cache, place + 4, weights="-", SIZES="N=3 T=7")
    assert said.endswith("error 7: an index among the inputs is out of range\n")


# -- convolutions ----------------------------------------------------------------------------------


class Images(nn.Module):
    """Convolutions of each kind, with a network's norms, activations, pools and product."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 7, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.deep = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.wide = nn.Conv2d(16, 24, 1)
        self.down = nn.Conv2d(24, 24, 3, 2, 1, groups=2)
        self.up = nn.ConvTranspose2d(24, 8, 2, 2)
        self.head = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x - torch.tensor([0.485, 0.456, 0.406])[:, None, None]
        h = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, 2, 1)
        h = self.down(F.silu(self.wide(self.deep(h) + h)))
        return self.head(F.adaptive_avg_pool2d(h, 1).flatten(1)), self.up(h)


def images() -> Images:
    torch.manual_seed(0)
    return Images().eval()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sized", (False, True), ids=("fixed", "any size"))
def test_convolutions_run_in_c(program: Path, tmp_path: Path, sized: bool) -> None:
    x, path = values(2, 3, 32, 40), tmp_path / "net.fusec"
    names: Any = ((x, ("N", None, "H", "W")),) if sized else ()
    torch._dynamo.reset()
    path.write_bytes(build(images(), Call((x,), sizes=names), NATIVE))
    save_file(weights_of(images()), path.with_suffix(".safetensors"))
    for shape in ((1, 3, 48, 36), (3, 3, 32, 64)) if sized else (x.shape,):
        given = values(*shape, seed=5)
        expected = fusec.load(path)(given)
        own = {"SIZES": f"N={shape[0]} H={shape[2]} W={shape[3]}"} if sized else {}
        _, made = run(program, path, given, like=expected, threads=2, **own)
        assert all(map(torch.equal, made, expected))
        for one, wanted in zip(made, images()(given), strict=True):
            torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-4)


# -- several processors ----------------------------------------------------------------------------

LEVELS = ("cpu:sse4", "cpu:avx512", "cpu:avx2")


@pytest.fixture(scope="module")
def levels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive for several processors, given in another order than that of their worth."""
    path = tmp_path_factory.mktemp("levels") / "net.fusec"
    targets = [Options.from_compile(None, {"native": True, "target": name}) for name in LEVELS]
    torch._dynamo.reset()
    path.write_bytes(build(net(), Call((), inputs_of()), targets))
    save_file(weights_of(net()), path.with_suffix(".safetensors"))
    return path


MACHINES = {
    "cpu:avx512": PROCESSORS["cpu:avx512"].features,
    "cpu:avx2": PROCESSORS["cpu:avx512"].features.replace("avx512dq ", ""),
    "cpu:sse4": PROCESSORS["cpu:avx2"].features.replace("fma ", ""),
}
"""What is taken, by what a processor can do."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("expected", MACHINES)
def test_the_best_that_a_processor_can_run_is_taken(
    levels: Path, tmp_path: Path, expected: str
) -> None:
    features, here = MACHINES[expected], cpu_features().split()
    if not {*PROCESSORS[expected].features.split()} <= {*here}:
        pytest.skip("this machine cannot run it")
    with on_processor(features):
        model = fusec.load(levels)
    given = inputs_of(seed=7)
    assert model.target == expected
    found = model(**given)["y"]
    torch.testing.assert_close(found, net()(**given)["y"])
    own = compiled(tmp_path, *pretending(tmp_path, features))
    said, made = run(own, levels, *given.values(), like=(found,), TARGET="1")
    assert said.splitlines()[0] == expected
    assert torch.equal(made[0], found)


def pretending(folder: Path, features: str) -> tuple[str, ...]:
    """Return what a program is compiled with that believes to be on another processor."""
    flags = features.partition(" ")[2]
    (folder / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: fpu {flags}\n")
    return (f'-DFUSEC_CPUINFO="{folder / "cpuinfo"}"',)


def test_a_processor_that_runs_none_is_told_what_each_lacks(levels: Path, tmp_path: Path) -> None:
    features = MACHINES["cpu:sse4"].replace("popcnt ", "")
    lacks = r"(?s)cpu:avx2: .*lacks: fma popcnt.*cpu:sse4: .*popcnt"
    with on_processor(features), pytest.raises(UsageError, match=lacks):
        fusec.load(levels)
    said, _ = run(compiled(tmp_path, *pretending(tmp_path, features)), levels)
    assert said == (
        "error 4: this processor lacks for cpu:avx512: popcnt fma avx512bw avx512cd avx512dq "
        "avx512f avx512vl; for cpu:avx2: popcnt fma; for cpu:sse4: popcnt\n"
    )


# -- what is written, types ------------------------------------------------------------------------


def by_slice(cache: torch.Tensor, place: torch.Tensor, part: torch.Tensor) -> None:
    cache[:, 3:5] = part


def by_copy(cache: torch.Tensor, place: torch.Tensor, part: torch.Tensor) -> None:
    cache.index_copy_(1, place, part)


def by_index(cache: torch.Tensor, place: torch.Tensor, part: torch.Tensor) -> None:
    cache[:, place - 6] = part


def by_value(cache: torch.Tensor, place: torch.Tensor, part: torch.Tensor) -> None:
    cache[:, place] = part[:, :1] * 2


def stepping(write: Callable[..., None]) -> Callable[..., torch.Tensor]:
    """Return a step with a cache, as a decoder's: it writes places, and reads all."""

    def step(x: torch.Tensor, cache: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        write(cache, place, torch.stack((x, x + 1), 1))
        return cache.sum(1)

    return step


@pytest.mark.sampled(3)
@pytest.mark.parametrize("write", [by_slice, by_copy, by_index, by_value])
def test_an_input_that_the_model_changes_is_changed(
    program: Path, tmp_path: Path, write: Callable[..., None]
) -> None:
    step, place = stepping(write), torch.tensor([5, 2])
    x, cache = values(4, 8), values(4, 6, 8, seed=2)
    path = archive(tmp_path, step, x, cache, place)
    said, (made,) = run(program, path, x, cache, place, like=(x,), weights="-")
    assert "input cache: f32[4, 6, 8] written" in said
    torch.testing.assert_close(made, step(x, cache, place))
    changed = torch.frombuffer(bytearray((tmp_path / "in1").read_bytes()), dtype=torch.float32)
    assert torch.equal(changed.reshape(cache.shape), cache)
    if write is not by_slice:
        said, _ = run(program, path, x, cache, place + 7, weights="-")
        assert said.endswith("error 7: an index among the inputs is out of range\n")


def test_buffers_that_the_model_changes_are_refused() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(x)
            return self.count * 2

    torch._dynamo.reset()
    with pytest.raises(UsageError, match="writes to count, and a model in C has no state"):
        build(Counts(), Call((values(3),)), NATIVE)


def whole(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x // y + x.cumsum(0)).to(torch.int16)


TYPES = {
    "i64, i32, i16": (whole, torch.arange(24).reshape(4, 6), torch.arange(1, 7, dtype=torch.int32)),
    "bf16": (lambda x, y: F.gelu(x @ y), values(12, 16).bfloat16(), values(16, 20).bfloat16()),
    "f16": (lambda x, y: F.gelu(x @ y), values(12, 16).half(), values(16, 20).half()),
    "bool": (lambda x, y: (x > 0) & y, values(5, 7), values(5, 7, seed=2) > 0),
    "f8e4m3fn": (
        lambda x, y: x.to(torch.float8_e4m3fn).float() * y.float(),
        values(5, 7),
        values(5, 7).to(torch.float8_e4m3fn),
    ),
    "f64": (lambda x, y: (x * y).sum(1), values(5, 7).double(), values(5, 7).double()),
    "f64, products": (lambda x, y: F.relu(x @ y), values(5, 7).double(), values(7, 3).double()),
    "pads": (
        lambda x, y: F.pad(x, (2, 1, 1, 3), "reflect") + F.pad(y, (2, 1, 1, 3), "replicate"),
        values(2, 3, 4, 5),
        values(2, 3, 4, 5, seed=2),
    ),
    "a number": (lambda x, y: x.sum() * y, values(5, 7), torch.tensor(2.5)),
}


def test_convolutions_of_one_place_need_no_torch(program: Path, tmp_path: Path) -> None:
    def gated(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return x * F.conv2d(x.mean((2, 3), keepdim=True), w, b).sigmoid()

    given = values(3, 8, 4, 5), values(8, 8, 1, 1, seed=2), values(8, seed=3)
    path = archive(tmp_path, gated, *given)
    _, (made,) = run(program, path, *given, like=given[:1], weights="-")
    torch.testing.assert_close(made, gated(*given))


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.sampled(5)
def test_every_type_goes_in_and_out(program: Path, tmp_path: Path, name: str) -> None:
    call, *given = TYPES[name]
    path = archive(tmp_path, call, *given)
    expected = fusec.load(path)(*given)
    _, (made,) = run(program, path, *given, like=(expected,), weights="-")
    assert torch.equal(made, expected)


class Stored(nn.Module):
    """A weight of each type that C has."""

    def __init__(self) -> None:
        super().__init__()
        powers = values(5, 7).sign().exp2()  # which floats without a sign, or a mantissa, hold
        for dtype in DTYPES.values():
            if not dtype.is_opaque and dtype is not F4X2:
                self.register_buffer(f"w_{dtype}", powers.to(getattr(torch, dtype.torch_name)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x * weight.float() for weight in self.buffers()])


def test_weights_of_every_type_are_read(program: Path, tmp_path: Path) -> None:
    model, x = Stored(), values(5, 7, seed=2)
    path = archive(tmp_path, model, x)
    _, (made,) = run(program, path, x, like=(model(x),))
    assert torch.equal(made, model(x))


def test_a_division_by_zero_is_an_error(program: Path, tmp_path: Path) -> None:
    call, x, y = TYPES["i64, i32, i16"]
    path = archive(tmp_path, call, x, y)
    said, _ = run(program, path, x, y - 1, weights="-")
    assert said.endswith("error 8: an integer is divided by zero\n")


# -- hostile files ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("fuzzer"), *SANITIZED, source="fuzz.c")


def fuzz(fuzzer: Path, path: Path, *arguments: object) -> tuple[int, int]:
    """Return how many files were refused, and how many ran, under sanitizers."""
    command = [fuzzer, path, path.with_suffix(".safetensors"), *arguments]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    refused, ran = re.findall(r"\d+", done.stdout)
    return int(refused), int(ran)


@pytest.mark.parametrize("count", [200, pytest.param(4000, marks=pytest.mark.slow)])
def test_damaged_files_are_errors_without_an_access_out_of_bounds(
    fuzzer: Path, built: Path, count: int
) -> None:
    refused, ran = fuzz(fuzzer, built, count, count)
    assert refused + ran == count
    assert refused > 0.6 * count  # a weight may have another value


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("which", ["built", "sized"])
def test_archives_that_lie_with_right_digests_are_errors(
    fuzzer: Path, which: str, request: pytest.FixtureRequest, tmp_path: Path, count: int
) -> None:
    chosen, original = random.Random(count), request.getfixturevalue(which)
    described_by = ["names.txt", "inference/native.txt", *["held/scale"] * (which == "built")]
    files = []
    for k in range(count):
        path = tmp_path / f"{k}.fusec"
        change = partial(spoil, chosen, chosen.choice(described_by))
        path.write_bytes(repacked(original.read_bytes(), change))
        files.append(path)
    refused, ran = fuzz(fuzzer, original, 0, 0, *files)
    assert (refused + ran, refused > count / 2) == (count, True)


def test_sizes_of_any_kind_are_errors_or_run(fuzzer: Path, sized: Path) -> None:
    assert fuzz(fuzzer, sized, 0, 1, *[sized] * 60) == (0, 60)


def spoil(chosen: random.Random, name: str, blobs: dict[str, bytes]) -> None:
    """Change a blob somewhere, as an honest author."""
    content = bytearray(blobs[name])
    for _ in range(chosen.randint(1, 3)):
        at = chosen.randrange(len(content))
        part = chosen.choice(
            (
                b"",
                b"\n",
                b" ",
                b"9" * 18,
                b"unread\n",
                b"input 0 ",
                b"\xff",
                b"or ",
                b"size B\n",
                b"check < s0 8\n",
                b"+ ",
                b"% 0 ",
                b"-1",
                b"and " * 200,
            )
        )
        content[at : at + chosen.randint(0, 4)] = part
    blobs[name] = bytes(content)
    described(blobs)

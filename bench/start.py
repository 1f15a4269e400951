"""What it takes to start a model that was built: `python -m bench.start [--quick]`.

GPT-2 (124M, random weights) is built once, with its weights beside it. Then processes of their own
load it and compute the logits of 8 tokens; each reports of itself, from its start to the first
output, with torch's import:

* `wall_s`: by the clock, the parent's before it starts the process included;
* `cpu_s`: CPU seconds;
* `import_s`: CPU seconds before fusec is imported: Python's own, and torch's.

The weights' pages are in the page cache. Logits are compared with eager's once. The bar is 1.5 s.

The same in C, without Python (`fusec build --native`, examples/gpt2.c): `wall_s` alone, on as many
threads as torch has. The bar is 0.3 s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import record

PROCESSES = 5
CHILD = """
import json, sys, time
import torch
imported = time.process_time()
import fusec
logits = fusec.load(sys.argv[1])(torch.arange(8)[None])
found = {"wall_s": time.time() - float(sys.argv[2]), "cpu_s": time.process_time(),
         "import_s": imported}
assert "torch._dynamo" not in sys.modules
torch.save(logits, sys.argv[1] + ".logits")
print(json.dumps(found))
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.start", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model: a check")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="default %(default)s")
    options = parser.parse_args(arguments)
    run = record.Record("start", options.out, quick=options.quick, peers=["fusec"])
    count = 2 if options.quick else PROCESSES
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gpt2.fusec"
        expected = build(path, quick=options.quick)
        samples = [start(path) for _ in range(count)]
        check(path, expected)
        program = compile_example(Path(folder))
        in_c = [start_in_c(program, path, expected) for _ in range(count)]
    row = {f"median_{name}": statistics.median(s[name] for s in samples) for name in samples[0]}
    row |= {"samples": len(samples), "least_wall_s": min(s["wall_s"] for s in samples)}
    name = "tiny gpt2, 8 tokens" if options.quick else "gpt2 124M, 8 tokens"
    run.add({"group": "fusec.load", "name": name, "mode": "inference", "peers": {"fusec": row},
             "ratios": {}})  # fmt: skip
    print(f"{name}: {row['median_wall_s']:.2f} s to the first output ({row['least_wall_s']:.2f} at "
          f"least), {row['median_cpu_s']:.2f} CPU-seconds, of which {row['median_import_s']:.2f} "
          "are Python's and torch's import")  # fmt: skip
    in_c_row = {
        "median_wall_s": statistics.median(in_c),
        "least_wall_s": min(in_c),
        "samples": count,
    }
    run.add({"group": "fusec.h", "name": name, "mode": "inference", "peers": {"fusec": in_c_row},
             "ratios": {}})  # fmt: skip
    print(f"{name}, in C: {in_c_row['median_wall_s']:.3f} s to the first output "
          f"({in_c_row['least_wall_s']:.3f} at least)")  # fmt: skip
    print(f"numbers: {run.path}")
    return 0


def build(path: Path, *, quick: bool) -> Any:
    """Write the archive and its weights; return eager's logits."""
    # Local: a benchmark's --help needs neither.
    import torch
    from safetensors.torch import save_file
    from transformers import GPT2Config, GPT2LMHeadModel

    from fusec.export import Call, weights_of
    from fusec.export import build as build_archive
    from fusec.options import Options

    size = {"n_layer": 2, "n_embd": 64, "n_head": 2} if quick else {}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(use_cache=False, **size)).eval()
    call = Call((torch.arange(8)[None],))
    for name, native in ((path, False), (native_path(path), True)):
        torch._dynamo.reset()
        options = Options.from_compile(None, {"native": native})
        name.write_bytes(build_archive(model, call, [options]))
    save_file(weights_of(model), path.with_suffix(".safetensors"))
    with torch.no_grad():
        return model(*call.args).logits


def start(path: Path) -> dict[str, float]:
    """Load the archive in a process of its own."""
    command = [sys.executable, "-c", CHILD, str(path), str(time.time())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def native_path(path: Path) -> Path:
    return path.with_suffix(".native.fusec")


def compile_example(folder: Path) -> Path:
    """Return the program of examples/gpt2.c."""
    import fusec.native  # local, as above

    program = folder / "gpt2"
    example = Path(__file__).parents[1] / "examples" / "gpt2.c"
    subprocess.run(["cc", "-O2", example, *fusec.native.flags(), "-o", program], check=True)
    return program


def start_in_c(program: Path, path: Path, expected: Any) -> float:
    """Return the seconds from the start of a process to its first token, which is eager's."""
    import torch  # local, as above

    threads = str(torch.get_num_threads())
    command: list[Any] = [program, native_path(path), path.with_suffix(".safetensors"), threads]
    began = time.time()
    command += map(str, range(8))
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **streams) as run:
        assert run.stdout is not None
        first = run.stdout.readline()
        wall = time.time() - began
        run.stdout.read()
    if run.returncode or int(first) != int(expected[0, -1].argmax()):
        raise RuntimeError(f"{program} says {first!r}")
    return wall


def check(path: Path, expected: Any) -> None:
    """Compare the logits that a process computed with eager's."""
    import torch

    made = torch.load(f"{path}.logits")
    torch.testing.assert_close(made["logits"], expected, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    sys.exit(main())

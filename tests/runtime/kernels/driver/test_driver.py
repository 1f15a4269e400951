"""What reaches the driver through Triton's own launcher: each byte of each launch, and no wait.

A library of ``libcuda.c`` takes the place of CUDA's driver in a process of its own
(``process.py``), with the Triton that is installed. Nothing is computed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
GRAPHS = (
    *("pointwise", "rows", "product", "product by descriptors", "dynamic product", "attention"),
    *("product with roles", "attention with roles", "autocast", "optimizer", "unaligned"),
    "family",
)
DESCRIBED = ("product by descriptors", "dynamic product", "attention")
ROLES = ("product with roles", "attention with roles")
FOREACH = ("autocast", "optimizer")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what each case of ``process.py`` called, and what arrived."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc, which builds the stand-in for the driver")
    triton = pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("driver")
    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    library = str(folder / "libcuda.so.1")
    flags = ("-shared", "-fPIC", "-O1", f"-I{include}", "-Wl,-soname,libcuda.so.1")
    subprocess.run([compiler, *flags, "-o", library, str(HERE / "libcuda.c")], check=True)
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(folder),
        "TRITON_LIBCUDA_PATH": str(folder),
        "STANDIN_CUDA_LOG": str(folder / "log"),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.runtime.kernels.driver.process"]
    done = subprocess.run(
        command, env=environment, cwd=HERE.parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    cases: dict[str, Any] = json.loads(done.stdout)["cases"]
    return cases


def is_foreach(function: str) -> bool:
    return re.fullmatch(r"\w+_b\d+", function) is not None


def of(case: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [line for line in case["arrived"] if kind in line]


@pytest.mark.parametrize("name", GRAPHS)
def test_each_parameter_of_each_launch_arrives(report: dict[str, Any], name: str) -> None:
    case = report[name]
    launches = of(case, "launch")
    assert case["problem"] == ""
    assert [one["launch"] for one in launches] == [one["name"] for one in case["calls"]]
    for one, called in zip(launches, case["calls"], strict=True):
        assert one["parameters"] == called["parameters"]
        assert one["grid"] == called["grid"]
        assert (one["stream"], one["attributes"], one["wrong"]) == (7000, 0, "")
    assert launches and not of(case, "queried")


def test_maps_of_tiles_follow_the_rules(report: dict[str, Any]) -> None:
    for name in (*DESCRIBED, *ROLES):
        maps = of(report[name], "map")
        assert maps and {one["wrong"] for one in maps} == {""}
    assert not of(report["product"], "map")
    x, w, _ = of(report["dynamic product"], "map")
    assert (x["extents"], x["strides"], w["extents"]) == ([256, 200], [512], [256, 512])


def test_kernels_of_a_family_pass_their_numbers(report: dict[str, Any]) -> None:
    launches = of(report["family"], "launch")
    assert len({one["launch"] for one in launches}) == 1
    assert [one["parameters"][-3] for one in launches] == ["01000000", "02000000", "03000000"]


@pytest.mark.parametrize("name", FOREACH)
def test_a_foreach_kernel_waits_for_its_first_call_alone(report: dict[str, Any], name: str) -> None:
    """Sizes and places of each table are copied once; addresses are not."""
    case = report[name]
    launches = {one["name"] for one in case["calls"] if is_foreach(one["name"])}
    assert len(of(case, "waits")) == 2 * len(launches) > 0
    assert not of(case, "refused")


@pytest.mark.parametrize("name", FOREACH)
def test_a_recording_fills_the_tables_that_it_reads(report: dict[str, Any], name: str) -> None:
    found = [one for one in of(report[name], "launch") if one["captured"]]
    tables = [n for n, one in enumerate(found) if is_foreach(one["launch"])]
    assert tables
    for n in tables:
        assert found[n - 1]["launch"] == "store_addresses"
        assert found[n - 1]["parameters"][0] == found[n]["parameters"][0]


def test_a_known_address_is_stored_once(report: dict[str, Any]) -> None:
    """The optimizer's graph ran with the same tensors twice, with others, and in a capture."""
    names = [one["launch"] for one in of(report["optimizer"], "launch")]
    (first,) = {name for name in names if name.endswith("_b0")}
    assert names.count(first) == 4 and names.count("store_addresses") == 3 * len(
        set(names) - {"store_addresses"}
    )


def test_code_is_loaded_while_a_stream_captures(report: dict[str, Any]) -> None:
    case = report["unaligned"]
    assert len(of(case, "load")) == 2
    assert [one["captured"] for one in of(case, "launch")] == [0, 1]


def test_a_profile_times_each_launch_by_events_on_its_stream(report: dict[str, Any]) -> None:
    """By the stand-in's clock a launch takes 10 us; a graph is an event before and behind all."""
    case = report["profile"]
    assert case["problem"] == ""
    made = case["result"]
    assert (made["device"], made["steps"]) == ("cuda:0", 3)
    names = {one["launch"] for one in of(case, "launch")}
    assert len(made["launches"]) == len(names) >= 3
    for one in made["launches"]:
        assert one["computes"] and one["calls"] == 1
        assert one["seconds"] == pytest.approx(1e-5)
    rest = {part["name"].partition(":")[0]: part["seconds"] for part in made["rest"]}
    assert rest["between launches of a graph"] == pytest.approx(0, abs=1e-9)
    spent = sum(one["seconds"] for one in made["launches"]) + sum(rest.values())
    assert spent == pytest.approx(made["step_seconds"])
    around = [line for line in case["arrived"] if "event" in line or "launch" in line]
    for before, line, behind in zip(around, around[1:], around[2:], strict=False):
        if "launch" in line:
            assert before == behind == {"event": line["stream"]}
    waits = [one["waits"] for one in of(case, "waits")]
    assert waits.count("cuCtxSynchronize") >= made["steps"]  # a lap waits for what it counts


def test_the_stand_in_refuses_what_cuda_refuses(report: dict[str, Any]) -> None:
    assert of(report["refused"], "refused") == [{"refused": "cuMemcpyHtoD"}]
    assert report["refused"]["problem"] == "RuntimeError: CUDA error 901"


def test_the_stand_in_finds_maps_that_break_a_rule(report: dict[str, Any]) -> None:
    assert [one["wrong"] for one in of(report["wrong maps"], "map")] == [
        "",
        "the address is not aligned to 16 bytes",
        "an extent is not 1 to 2^32",
        "a stride is no multiple of 16 bytes below 2^40",
        "a side of the box is not 1 to 256",
        "a row of the box is wider than the swizzle",
        "a row of the box is no multiple of 16 bytes",
    ]

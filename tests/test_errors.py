"""The error catalogue: every message says what was seen, and errors survive a process boundary."""

from __future__ import annotations

import pickle

import pytest

from fusec import errors
from fusec.errors import (
    BuildError,
    ContractBroken,
    EnvironmentProblem,
    FusecError,
    InternalError,
    InvalidIR,
    KernelFault,
    ModelError,
    NotWritable,
    OutOfMemory,
    PassError,
    StageError,
    Unsupported,
    UsageError,
    WrongGraph,
    WrongKernel,
    WrongResult,
    describe_failure,
    nearest,
)

ONE_OF_EACH = [
    Unsupported("no lowering for complex numbers"),
    UsageError("unknown stage 'spam'"),
    NotWritable("cannot write to /proc"),
    OutOfMemory("memory is full"),
    EnvironmentProblem("no C++ compiler"),
    ModelError("ValueError: no such layer"),
    BuildError(["g++", "-c", "a b.cpp"], "error: expected ';'", 2),
    InvalidIR("buffer x is defined twice", stage="simplify"),
    KernelFault("did not end in 20 s"),
    InternalError(object(), stage="lower"),
    WrongKernel("k0", "forward", "add", "add.Tensor", "max error 1", ("model.py:1 in forward",)),
    WrongGraph("forward", "result 0", "add.Tensor", "strides [1], eager [2]", ("model.py:1 in f",)),
    ContractBroken("kernels: 2, expected 1"),
    PassError("no_clamp", "returned None"),
]


def test_one_of_each_is_one_of_each() -> None:
    classes = {c for c in vars(errors).values() if isinstance(c, type)}
    assert {type(error) for error in ONE_OF_EACH} == {
        c for c in classes - {FusecError, StageError, WrongResult} if issubclass(c, FusecError)
    }


@pytest.mark.parametrize("error", ONE_OF_EACH, ids=lambda error: type(error).__name__)
def test_errors_are_of_the_family_and_survive_pickling(error: FusecError) -> None:
    assert isinstance(error, FusecError)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_exit_codes_tell_usage_environment_and_compile_errors_apart() -> None:
    codes = {type(error).__name__: error.exit_code for error in ONE_OF_EACH}
    assert codes == {
        "Unsupported": 3,
        "UsageError": 2,
        "EnvironmentProblem": 4,
        "NotWritable": 4,
        "OutOfMemory": 4,
        "ModelError": 3,
        "BuildError": 3,
        "InvalidIR": 3,
        "InternalError": 3,
        "KernelFault": 3,
        "WrongGraph": 3,
        "WrongKernel": 3,
        "ContractBroken": 1,
        "PassError": 2,
    }


def test_unsupported_carries_its_reason() -> None:
    assert Unsupported("strides overlap").reason == "strides overlap"
    assert str(Unsupported("strides overlap")) == "strides overlap"


def test_a_build_error_shows_the_command_and_the_end_of_the_output() -> None:
    output = "\n".join(f"line {n}" for n in range(100))
    error = BuildError(["g++", "-o", "a b.so"], output, 1)
    shown = str(error).splitlines()
    assert shown[0] == "build failed with exit status 1: g++ -o 'a b.so'"
    assert [line.strip() for line in shown[1:-1]] == [f"line {n}" for n in range(80, 100)]
    assert "fusec doctor" in shown[-1]
    assert error.output == output


@pytest.mark.parametrize("error", ONE_OF_EACH[10:12], ids=lambda error: type(error).__name__)
def test_what_is_off_in_a_graph_that_passes_rewrote_may_be_theirs(error: FusecError) -> None:
    assert "please report" in str(error) and "rewrote" not in str(error)
    copy = pickle.loads(pickle.dumps(error))
    copy.passes = ("no_clamp",)
    assert "The pass 'no_clamp' rewrote this graph, and has to compute" in str(copy)
    copy.passes = ("no_clamp", "quick_tanh")
    assert "The passes 'no_clamp', 'quick_tanh' rewrote this graph, and have to" in str(copy)
    assert "please report" not in str(copy) and str(pickle.loads(pickle.dumps(copy))) == str(copy)


def test_no_smaller_program_is_asked_for_where_a_pass_failed() -> None:
    assert "bisect" not in describe_failure(PassError("no_clamp", "returned None"))


def test_what_stopped_a_compile_ends_with_one_full_stop() -> None:
    for error in (BuildError(["g++"], ""), ValueError("odd")):
        assert ". `fusec bisect --crash" in describe_failure(error)
        assert ".." not in describe_failure(error)


def test_a_build_error_without_output_says_so() -> None:
    assert "(it printed nothing)" in str(BuildError(["g++"], " \n"))


def test_an_internal_error_names_stage_and_node() -> None:
    message = str(InternalError(("load", 3), stage="lower"))
    assert "'lower'" in message
    assert "unexpected tuple: ('load', 3)" in message
    assert "verify" in message


def test_a_stage_is_filled_in_once() -> None:
    error = InvalidIR("rank 2 into rank 3")
    assert "stage" not in str(error).splitlines()[0]
    assert error.in_stage("fuse") is error
    assert error.in_stage("compile_graph").stage == "fuse"
    assert "invalid IR in stage 'fuse': rank 2 into rank 3" in str(error)


@pytest.mark.parametrize("family", [InternalError, InvalidIR])
def test_a_defect_seen_in_something_unpicklable_still_crosses_processes(
    family: type[StageError],
) -> None:
    error = family(lambda: None, stage="fuse")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize(
    ("seen", "meant"),
    [
        ("kernel", "kernels"),
        ("KERNELS", "kernels"),
        ("triton.cudagraphs", "cudagraphs"),
        ("qqqqqq", None),
    ],
)
def test_the_nearest_name_is_what_a_slip_meant(seen: str, meant: str | None) -> None:
    assert nearest(seen, ["graph", "kernels", "cudagraphs"]) == meant


def test_an_unknown_name_lists_what_is_valid() -> None:
    error = UsageError.unknown("stage", "kernel", ["graph", "kernels"])
    assert str(error) == "unknown stage 'kernel'. Did you mean 'kernels'? Valid: graph, kernels."
    assert "mean" not in str(UsageError.unknown("stage", "qqq", ["graph"]))

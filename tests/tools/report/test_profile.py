"""A profile: each launch has a name, what it moves and a floor, and rows add up to the step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusec.errors import UsageError
from fusec.tools.clock import Clock
from fusec.tools.report.profile import Profile, Steps, profile_model, profile_of, profile_page
from fusec.tools.summary import GraphSummary
from tests.tools.report.test_steps import lap_of, steps_with

SIDE = 64


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(SIDE), nn.Linear(SIDE, SIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.fft.fft(self.up(self.norm(x))).real


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([Layer() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.h:
            x = layer(x)
        return F.relu(x).sum()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Profile, Path]:
    """The profile of a training step, and the trace of it."""
    torch._dynamo.reset()
    file = tmp_path_factory.mktemp("profile") / "trace.json"
    ended: list[Steps] = []

    def steps(clock: Clock) -> Steps:
        ended.append(Steps(clock, file))
        return ended[0]

    found = profile_model(
        "net",
        Net(),
        [torch.randn(8, SIDE)],
        4,
        train=True,
        dynamic=False,
        options={"strict": True, "race": "library"},
        found=steps,
    )
    launched = {key for lap in ended[0].laps for key in lap.spent if key[1]}
    assert launched == {(one.graph, one.name) for one in found.launches}
    return found, file


@pytest.fixture
def profile(made: tuple[Profile, Path]) -> Profile:
    return made[0]


def test_rows_of_every_view_and_the_rest_add_up_to_the_step(profile: Profile) -> None:
    rest = sum(part.seconds for part in profile.rest)
    for entries in (profile.by_kernel(), profile.by_module(), profile.by_line()):
        launched = sum(entry.seconds for entry in entries)
        assert launched + rest == pytest.approx(profile.step_seconds)
        assert [e.seconds for e in entries] == sorted((e.seconds for e in entries), reverse=True)
    assert all(part.seconds > 0 for part in profile.rest)
    assert profile.steps == 4 and not profile.cold


def test_launches_of_layers_are_one_row_by_what_and_where(profile: Profile) -> None:
    entries = {entry.name: entry for entry in profile.by_kernel()}
    product = entries["h.*.up: addmm, eager"]
    assert (product.calls, product.bytes) == (2, 2 * 4 * (2 * 8 * SIDE + SIDE * SIDE + SIDE))
    assert product.predicted_seconds is not None and product.floor_seconds > 0
    assert entries["h.*: fft_r2c, eager"].predicted_seconds is None
    assert any(name.startswith("h.*.norm: ") and "layer_norm" in name for name in entries)
    assert any(name.startswith("h.*.norm backward: ") for name in entries)
    multiplied = {one.where: one.multiplied for one in profile.launches if "addmm" in one.computes}
    assert multiplied["h.0.up"] == {"f32": 8 * SIDE * SIDE}


def test_every_launch_has_a_name(profile: Profile) -> None:
    assert all(one.computes and one.calls == 1 for one in profile.launches)
    assert {one.graph.partition(" ")[0] for one in profile.launches} == {"forward", "backward"}


def test_a_view_by_module_or_by_line_has_the_user_s(profile: Profile) -> None:
    assert {"h.*.up", "h.*.up backward"} <= {entry.name for entry in profile.by_module()}
    lines = [entry.name for entry in profile.by_line()]
    assert any("test_profile.py" in line and "self.up(self.norm(x))" in line for line in lines)


def test_the_json_form_has_its_schema(profile: Profile) -> None:
    document = json.loads(profile.to_json())
    assert document["schema"] == 1
    assert {"what", "device", "threads", "steps", "step_seconds", "launches", "rest"} <= set(
        document
    )
    assert {"graph", "name", "where", "layers", "computes", "eager", "source", "calls", "seconds",
            "bytes", "multiplied", "floor_seconds", "predicted_seconds"} == set(
        document["launches"][0]
    )  # fmt: skip
    assert document["multiply_adds_per_second"]["f32"] > 0
    assert set(document["copy_bytes_per_second"]) == {str(1 << 20)}


def test_the_page_is_a_table_that_ends_with_the_step(profile: Profile) -> None:
    for by, name in {
        "kernel": "h.*.up: addmm, eager",
        "module": "h.*.up",
        "line": "forward",
    }.items():
        lines = profile_page(profile, by).splitlines()
        assert lines[0].startswith("net on cpu, ")
        assert f"{by}s, by time" in lines
        assert any(name in line for line in lines)
        end = lines.index("", 4) - 1
        assert lines[end].endswith("the step") and "100.0%" in lines[end]
        assert any("Python, guards, autograd" in line for line in lines)
    assert "one step, not warm" in profile_page(replace(profile, cold=True))


def test_a_trace_has_the_names_of_launches(made: tuple[Profile, Path]) -> None:
    events = json.loads(made[1].read_text())["traceEvents"]
    names = [event["name"] for event in events]
    assert names.count("h.1.up: addmm.default") == 2  # the steps that are traced


def test_a_function_that_compiles_nothing_has_no_profile() -> None:
    torch._dynamo.reset()
    with pytest.raises(UsageError, match="nothing is compiled"):
        profile_model(
            "same",
            lambda x: x,
            [torch.ones(2)],
            3,
            train=False,
            dynamic=False,
            options={},
            found=Steps,
        )


GRAPH = GraphSummary("0/0", "forward", "cpu", False, "", (), (), {})


def test_the_rest_is_split_in_what_is_known_of_it() -> None:
    steps = steps_with([lap_of(n) for n in (9, 9, 10, 30, 10, 2)])
    found = profile_of("script", torch.device("cpu"), [GRAPH], steps)
    assert found.step_seconds == 10
    assert [part.seconds for part in found.rest] == [5, 1, 4]
    assert found.rest[1].name == "the optimizer's step"


def test_a_program_of_few_steps_shows_one_that_is_not_warm() -> None:
    found = profile_of("script", torch.device("cpu"), [GRAPH], steps_with([lap_of(9), lap_of(8)]))
    assert (found.cold, found.step_seconds) == (True, 8)
    with pytest.raises(UsageError, match="script has no step"):
        profile_of("script", torch.device("cpu"), [GRAPH], Steps(Clock()))

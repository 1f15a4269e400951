"""What a report shows: every launch, alike ones as one, with what feeds them and their code."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fusec.ir.host import FreeBuffers
from fusec.ir.memory import bytes_of
from fusec.tools.report.html.document import Document, Timing, document_of
from fusec.tools.report.html.drawn import drawn_steps
from fusec.tools.report.run_report import Seen
from fusec.tools.report.stages import Staged
from fusec.tools.report.static_report import check_known
from fusec.tools.report.traffic import peak_bytes
from tests.tools.report.html.conftest import stage


def test_every_launch_is_in_one_box(document: Document, staged: list[Staged]) -> None:
    for graph, one in zip(document.graphs, staged, strict=True):
        drawn = [name for box in graph.boxes for name in box.names]
        assert len(drawn) == len(set(drawn)) == len(drawn_steps(one))
        assert {kernel.name for kernel in graph.report.kernels} <= set(drawn)
        assert len(drawn) == len(graph.report.kernels) + len(graph.report.externs)
        placed = [k for segment in graph.segments for k in segment.steps]
        assert sorted(placed) == list(range(len(graph.boxes))) == sorted(graph.layout.boxes)


def test_a_step_is_known_by_what_it_never_stores_too(staged: list[Staged]) -> None:
    """Decisions of fusion name definitions, most of which end up inside a kernel."""
    for one in staged:
        assert one.compiled is not None
        steps = {step.name: step for step in drawn_steps(one)}
        inner = 0
        for kernel in one.compiled.schedule.kernels:
            made = {buffer.name for buffer in kernel.defs}
            assert made <= steps[kernel.name].buffers
            inner += bool(made - {buffer.name for buffer in kernel.writes})
        assert inner


def test_every_eager_launch_is_drawn(document: Document) -> None:
    for graph in document.graphs:
        assert sum(call.count for call in graph.calls) == graph.report.launches_eager
        assert (
            sum(call.bytes for alike in graph.calls for call in alike.members)
            == graph.report.bytes_eager
        )
        placed = [k for segment in graph.segments for k in segment.calls]
        assert sorted(placed) == list(range(len(graph.calls)))


def test_alike_layers_are_one_frame_with_their_number(document: Document) -> None:
    for graph in document.graphs:
        (frame,) = [segment for segment in graph.segments if segment.frame]
        assert (frame.frame, frame.layers) == ("h.*", 3)
        transforms = [box for box in graph.boxes if "fft" in box.title]
        assert transforms and all(box.count == 3 for box in transforms)


def test_a_box_has_what_feeds_it_on_both_sides(document: Document) -> None:
    for graph in document.graphs:
        for k, box in enumerate(graph.boxes):
            assert all(k in graph.boxes[other].fed_by for other in box.feeds)
            assert all(k in graph.boxes[other].feeds for other in box.fed_by)
    forward = document.graphs[0]
    (transform,) = [box for box in forward.boxes if "fft" in box.title]
    before = [forward.boxes[k] for k in transform.fed_by]
    assert before and all("tanh" in box.title and box.kind == "kernel" for box in before)


def test_shares_of_bytes_add_up(document: Document) -> None:
    for graph in document.graphs:
        assert abs(sum(box.share for box in graph.boxes) - 1) < 1e-9


def test_texts_that_kernels_share_are_stored_once(document: Document) -> None:
    boxes = [box for graph in document.graphs for box in graph.boxes]
    numbers = [listing.text for box in boxes for listing in box.listings]
    assert len(document.texts) == len(set(document.texts)) == len(set(numbers))
    kernel = next(box for box in boxes if box.kind == "kernel")
    assert [listing.label for listing in kernel.listings] == ["Notation", "Schedule", "C++"]
    assert "kernel" in document.texts[kernel.listings[0].text]
    assert "for (" in document.texts[kernel.listings[2].text]


def test_a_kernel_is_beside_the_eager_launches_on_its_lines(document: Document) -> None:
    forward = document.graphs[0]
    norms = [box for box in forward.boxes if "layer_norm" in box.title and box.module[:2] == "h."]
    assert norms
    for box in norms:
        assert any("layer_norm" in forward.calls[k].first.op for k in box.calls)


def test_a_shared_line_counts_where_its_module_is() -> None:
    """Two linears call one line of a library: a kernel behind one of them has nothing of both."""

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.GELU(), torch.nn.GELU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.fft.fft(self.a(x)).real)

    (graph,) = document_of("twice", "cpu", stage(Twice(), [torch.randn(8, 8)]), Seen("")).graphs
    kernels = [box for box in graph.boxes if box.kind == "kernel"]
    assert [[graph.calls[k].module for k in box.calls] for box in kernels] == [["a"], ["b"]]


def test_a_measured_time_goes_before_the_model_s(staged: list[Staged]) -> None:
    modelled = document_of("net", "cpu", staged, Seen("net"))
    measured = document_of(
        "net", "cpu", staged, Seen("net"), measured=lambda one, step: Timing(7.0, "measured")
    )
    assert {box.timing.word for g in modelled.graphs for box in g.boxes} == {"modelled"}
    assert {box.timing for g in measured.graphs for box in g.boxes} == {Timing(7.0, "measured")}


def test_tensors_have_the_names_of_the_program(document: Document) -> None:
    read = {tensor.name for box in document.graphs[0].boxes for tensor in box.reads}
    assert {"x", "h.0.norm.weight", "last.weight"} <= read


def test_memory_is_followed_through_the_call(document: Document) -> None:
    for graph in document.graphs:
        assert graph.usage is not None
        assert graph.usage.peak.bytes == max(m.bytes for m in graph.usage.moments)
        assert sum(size for _, size in graph.usage.largest) <= graph.usage.peak.bytes
    # A forward lets go of nothing that its backward reads.
    forward = document.graphs[0].usage
    assert forward is not None and forward.peak.made > 0 and forward.moments[0].given > 0
    alike = [size for name, size in forward.largest if name.startswith("3 × h.*.")]
    assert max(alike) == 3 * 64 * 64 * 4  # the weights of three layers


def test_memory_is_what_the_plan_says(document: Document, staged: list[Staged]) -> None:
    for graph, one in zip(document.graphs, staged, strict=True):
        host = one.records["memory"].structure
        assert graph.usage is not None
        most = max(moment.made for moment in graph.usage.moments)
        assert most == peak_bytes(host) > 0
        held = [constant.buffer for constant in host.constants]
        held += [item for item in host.graph.inputs if host.statements[0] != FreeBuffers((item,))]
        assert graph.usage.moments[0].given == sum(map(bytes_of, held))


def test_a_loop_over_rows_is_a_frame_of_what_it_launches() -> None:
    def loss(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x @ w, y)

    inputs = torch.randn(1024, 64), torch.randn(64, 50257), torch.zeros(1024, dtype=torch.int64)
    staged = stage(loss, inputs)
    steps = drawn_steps(staged[0])
    inside = [step for step in steps if step.loop is not None]
    assert inside and all(step.loop is inside[0].loop for step in inside)
    (graph,) = document_of("loss", "cpu", staged, Seen("loss")).graphs
    (frame,) = [segment for segment in graph.segments if segment.frame]
    assert "rounds of" in frame.frame and len(frame.steps) == len(inside)
    # Each round counts; beside them the loop copies and adds up a little.
    assert 0.8 < sum(box.share for box in graph.boxes) <= 1
    # What a round makes is read within it, or behind the loop.
    assert all(box.feeds or box.fed_by for box in graph.boxes)


def test_a_kernel_that_writes_what_it_reads_does_not_feed_itself() -> None:
    staged = stage(lambda x, y: x.mul_(y).add_(1), [torch.randn(8, 8), torch.randn(8, 8)])
    (graph,) = document_of("bump", "cpu", staged, Seen("bump")).graphs
    (box,) = graph.boxes
    assert {tensor.name for tensor in box.writes} & {tensor.name for tensor in box.reads}
    assert box.feeds == box.fed_by == ()
    assert len(box.calls) == 2  # of no module, its line alone says where they are


def test_a_gpu_s_kernels_have_machine_code_and_a_verdict() -> None:
    staged = stage(lambda x: torch.softmax(x * 2, -1), [torch.randn(64, 512)], "sm_90")
    judged = check_known(staged, lambda _: None)
    assert judged is not None and judged.seconds > 0
    document = document_of("softmax", "sm_90", staged, Seen("softmax"), judged=judged)
    (box,) = document.graphs[0].boxes
    assert [listing.label for listing in box.listings][-3:] == ["Triton", "PTX", "SASS"]
    assert ".visible .entry" in document.texts[box.listings[-2].text]
    assert "EXIT" in document.texts[box.listings[-1].text]
    assert dict(box.facts)["registers a thread"].isdigit()
    assert box.timing.word == "expected" and box.expected and not box.faults


def test_what_runs_eagerly_says_why() -> None:
    staged = stage(lambda x: torch.sort(x)[0], [torch.randn(8)])
    (graph,) = document_of("sort", "cpu", staged, Seen("sort")).graphs
    assert {box.kind for box in graph.boxes} <= {"library"}
    assert graph.problem or all(box.reason for box in graph.boxes)

"""What a hunt draws programs from: one table of parts.

A part has a name and a function ``run(seed) -> Verdict`` that draws a program by the seed, compares
it with eager, and shrinks it where it fails. Whatever a part does besides, it does inside ``run``::

    def run(seed: int) -> Verdict:
        program = draw(seed)
        error = failure(program)
        return Verdict() if error is None else Verdict(FAILED, str(error), as_file(program, error))

    PARTS = {part.name: part for part in (..., Part("indices", run, share=2))}

A seed is one program for ever, so that a corpus can be run again. A part that compiles several
programs at once takes as many for each seed, and says so in ``Verdict.programs``. ``run`` may crash
or hang: it runs in a process of its own, with a limit of time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from tests.fuzz import indices, lowered, plans, test_products, training
from tests.fuzz.programs import SMALL, WIDE, Kit, Program, as_file, draw, failure, shrunk

RIGHT, FAILED, CRASHED, HUNG = "right", "failed", "crashed", "hung"
TOGETHER = 12
"""Training programs of one compile."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a seed.

    Attributes:
        kind: one of the four above.
        said: what is wrong, "" if nothing.
        source: Python that shows it again from the root of the repository.
        programs: how many were compared.
    """

    kind: str = RIGHT
    said: str = ""
    source: str = ""
    programs: int = 1


@dataclass(frozen=True, slots=True)
class Part:
    """A kind of programs.

    Attributes:
        share: seeds of it for each round of a hunt, in which every part has its turn.
        limit_s: seconds after which a seed counts as hung.
    """

    name: str
    run: Callable[[int], Verdict]
    share: int = 1
    limit_s: float = 600.0


def check_program(
    seed: int,
    compare: Callable[[Program], Exception | None] = failure,
    kit: Kit = WIDE,
    backend: str | None = None,
) -> Verdict:
    """Return what became of a program; ``compare`` returns what is wrong with one."""
    program = draw(seed, kit)
    error = compare(program)
    if error is None:
        return Verdict()
    small = shrunk(program, lambda p: type(compare(p)) is type(error))
    error = compare(small) or error
    return Verdict(FAILED, f"{type(error).__name__}: {error}", as_file(small, error, backend))


def _lowered(seed: int, target: str) -> Verdict:
    backend = lowered.backend_of(target, lowered.RACES[seed % 3 == 2])
    return check_program(seed, partial(failure, backend=backend), SMALL, backend)


def _models(seed: int, kind: str, backend: str = "triton_fused") -> Verdict:
    try:
        test_products.check_seed(seed, kind, backend)
    except AssertionError as error:
        said, _, code = str(error).partition("\nfrom tests.")
        lines = "".join(f"# {line}\n" for line in said.splitlines())
        return Verdict(FAILED, said, f"{lines}from tests.{code}\n")
    return Verdict()


def _training(seed: int) -> Verdict:
    drawn = [training.draw(n) for n in _seeds(seed, TOGETHER)]
    said, sources = [], []
    for program, differs in training.failures(drawn):
        if training.is_as_torch(program, differs):
            continue
        small = training.shrunk(program, lambda p: bool(training.wrong(p)))
        said.append(f"program {program.seed}: {'; '.join(differs)}")
        sources.append(training.as_file(small, training.wrong(small)))
    kind = FAILED if said else RIGHT
    return Verdict(kind, "\n".join(said), "\n".join(sources), len(drawn))


def _indices(seed: int) -> Verdict:
    seeds = _seeds(seed, indices.CASES)
    faults, _ = indices.run_seeds(seeds)
    if not faults:
        return Verdict(programs=len(seeds))
    said = "\n".join(map(str, faults))
    comment = "".join(f"# {line}\n" for line in said.splitlines())
    again = f"found, _ = run_seeds({seeds!r})\nassert not found, found\n"
    source = f"{comment}from tests.fuzz.indices import run_seeds\n\n{again}"
    return Verdict(FAILED, said, source, len(seeds))


def _plans(seed: int, kind: str, target: str) -> Verdict:
    return Verdict(programs=plans.check_seed(seed, kind, target))


def _architectures(seed: int) -> Verdict:
    from tests.models import every  # local: transformers takes seconds, and need not be there

    listed = every.names()
    if seed >= len(listed):
        return Verdict(programs=0)
    table, kind = listed[seed]
    try:
        every.check(every.small(table, kind))
    except every.NotBuiltError as error:
        return Verdict(said=str(error), programs=0)
    except Exception as error:
        said = f"{table} {kind}: {type(error).__name__}: {error}"
        again = (
            f"from tests.models.every import check, small\n\ncheck(small({table!r}, {kind!r}))\n"
        )
        return Verdict(FAILED, said, again)
    return Verdict()


def _seeds(seed: int, together: int) -> range:
    """Return the seeds of the programs that one seed of a part compiles together."""
    return range(seed * together, (seed + 1) * together)


PARTS: Mapping[str, Part] = {
    part.name: part
    for part in (
        Part("programs", check_program, share=20),
        *(
            Part(f"lowered_{target.replace(':', '_')}", partial(_lowered, target=target), share=5)
            for target in lowered.TARGETS
        ),
        Part("training", _training, share=2),
        Part("indices", _indices),
        Part("architectures", _architectures),
        *(Part(kind, partial(_models, kind=kind)) for kind in test_products.KINDS),
        *(
            Part(kind, partial(_models, kind=kind, backend="fusec"), share=4)
            for kind in test_products.CPU_KINDS
        ),
        *(
            Part(f"{kind}_plans_{target}", partial(_plans, kind=kind, target=target))
            for kind in plans.KINDS
            for target in plans.TARGETS
        ),
    )
}
"""All parts by name."""

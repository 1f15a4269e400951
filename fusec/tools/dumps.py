"""The output of each stage of a compile, kept as a record and written as a file.

Records are what an observer of a compile's context keeps. Structures are printed on demand:
printing a graph can cost more than compiling it::

    records = Records()
    compiled = compile_to_source(gm, replace(context, observe=(records.observe,)))
    records.add(compiled)
    print(records.kept["fuse"].text)

Files have the form of ``fusec dump -o DIR`` and of ``options={"dump_dir": "DIR"}``. Each graph has
a folder, named by the graph and Dynamo's number of the compile, as in logs; each stage is a file,
numbered by its place in the compile, so that two compiles can be compared::

    DIR/index.txt
    DIR/forward-0_1/NN-fx.py                 NN: the stage's place in a compile
                    NN-kernels.txt
                    NN-source-k0.cpp

``index.txt`` has a line for each graph. Files of an earlier process are removed first: only files
of this form in the folders that its index names. Processes of ``torchrun`` have a directory each,
``DIR/rank0``. ``import fusec.backend`` puts the observer that writes this in the compiler's list.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import fx

from fusec.codegen.parametrize import Functions, print_functions
from fusec.codegen.targets import find_target
from fusec.codegen.triton.form import Form, print_form
from fusec.driver.observers import OBSERVERS, CompileHooks, Observer
from fusec.driver.partition import Joint
from fusec.driver.pipeline import Compiled
from fusec.driver.stages import CAPTURE, DYNAMO, JOINT, PARTITION, all_stages
from fusec.driver.structures import Planned
from fusec.driver.trace import Trace
from fusec.errors import InternalError
from fusec.ir import text
from fusec.ir.graph import Graph, Kernel, Schedule
from fusec.ir.host import HostProgram, print_host
from fusec.ir.program import Program, print_program
from fusec.options import Options
from fusec.passes.schedule.plan import print_plan
from fusec.passes.stage import Stage
from fusec.torch_interior import compile_id, debug_directory

# -- records ---------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Record:
    """The output of one stage.

    Attributes:
        print: returns the structure's printed form.
        before: prints the stage's input; None where that is another kind of structure.
    """

    structure: Any
    print: Callable[[], str]
    before: Callable[[], str] | None = None
    _text: str | None = None

    @property
    def text(self) -> str:
        """The structure's printed form."""
        if self._text is None:
            self._text = self.print()
        return self._text

    @property
    def changed(self) -> bool:
        """Whether the stage changed what is printed."""
        return self.before is None or self.before() != self.text


@dataclass(slots=True, eq=False)
class Records:
    """The outputs of stages by name, and the structures between them: ``LEVELS``."""

    kept: dict[str, Record] = field(default_factory=dict)

    def observe(self, stage: Stage, structure: Any) -> Callable[[Any], None]:
        """Keep what a stage makes; a later run replaces an earlier one."""
        before = printed(structure)
        if stage.name == CAPTURE.name:
            self._keep("fx", structure, before)

        def done(made: Any) -> None:
            same = stage.takes == stage.gives
            self._keep(stage.name, made, printed(made), before if same else None)
            if stage.name == CAPTURE.name:
                self._keep("graph", made, printed(made))
            elif stage.gives == "Schedule":
                self._keep("kernels", made, printed(made))

        return done

    def add(self, compiled: Compiled) -> None:
        """Keep the plans, programs, sources and wrapper, which are made after all stages."""
        plans, programs, sources = compiled.plans, compiled.programs, compiled.sources
        self._keep("plan", plans, lambda: "\n".join(print_plan(k, p) for k, p in plans.items()))
        self._keep("program", programs, printed(programs))
        self._keep("source", sources, lambda: "\n\n".join(sources[k] for k in compiled.distinct))
        self._keep("wrapper", compiled, lambda: compiled.wrapper)

    def _keep(
        self,
        name: str,
        structure: Any,
        text: Callable[[], str],
        before: Callable[[], str] | None = None,
    ) -> None:
        self.kept.pop(name, None)
        self.kept[name] = Record(structure, text, before)


def printed(structure: Any) -> Callable[[], str]:
    """Return a function that prints a structure; FX graphs, which stages mutate, print at once."""
    match structure:
        case Graph():
            return partial(text.print_graph, structure)
        case Schedule():
            return partial(text.print_schedule, structure)
        case Kernel():
            return partial(text.print_kernel, structure)
        case HostProgram():
            return partial(print_host, structure)
        case Planned():
            return partial(print_plan, structure.kernel.name, structure.plan)
        case Program():
            return partial(print_program, structure)
        case Form():
            return partial(print_form, structure)
        case Functions():
            return partial(print_functions, structure)
        case fx.GraphModule():
            now = structure.print_readable(print_output=False)
            return lambda: now
        case Mapping():
            return partial(_joined, [printed(one) for one in structure.values()])
        case tuple():
            return partial(_joined, [printed(one) for one in structure])
        case Joint():
            return printed(structure.module)
        case _:
            raise InternalError(structure, stage="dump")


def _joined(prints: list[Callable[[], str]]) -> str:
    return "\n\n".join(one() for one in prints)


# -- files -----------------------------------------------------------------------------------------


logger = logging.getLogger("fusec.compile")

INDEX = "index.txt"
BEFORE_CAPTURE = tuple(stage.name for stage in (*DYNAMO, *JOINT, PARTITION))
"""Stages that a forward and its backward have in common."""
_FILE = re.compile(r"\d\d-[\w.-]+")
_FOLDER = re.compile(r"[\w.]+(-\d+_[\w-]+)?")
_OF_THE_USER = "passes"
_LEVELS = {"capture": ("fx", "capture", "graph", _OF_THE_USER), "memory": ("kernels", "memory")}
"""Names of a stage's records, where these are not its own name alone."""
_BEHIND = ("program", "source", "wrapper", "ttir", "ttgir", "llir", "ptx", "sass")


@dataclass(frozen=True, slots=True)
class File:
    """One stage of a graph as a file; ``kernel`` is "" for a file of all kernels."""

    stage: str
    kernel: str
    suffix: str
    text: str

    @property
    def name(self) -> str:
        of = f"-{self.kernel}" if self.kernel else ""
        return f"{place_of(self.stage):02}-{self.stage}{of}.{self.suffix}"


class Dump:
    """The directory of one process; creating it removes the files of an earlier process.

    Raises:
        OSError: if it cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        rank = os.environ.get("RANK")
        self.directory = directory / f"rank{rank}" if rank else directory
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lines: dict[str, str] = {}
        _remove_earlier(self.directory)

    def write(self, graph: str, compile_id: str, about: str, files: Iterable[File]) -> list[Path]:
        """Write one graph's files, and its line of the index; return their paths.

        Args:
            compile_id: Dynamo's number, "0/1", or "".
            about: the graph's description in the index.
        """
        folder = graph + (f"-{re.sub('[^0-9A-Za-z]', '_', compile_id)}" if compile_id else "")
        again = sum(re.fullmatch(rf"{re.escape(folder)}(-\d+)?", known) is not None
                    for known in self._lines)  # fmt: skip
        folder += f"-{again + 1}" if again else ""
        (self.directory / folder).mkdir(exist_ok=True)
        paths = []
        for file in sorted(files, key=lambda file: file.name):
            paths.append(self.directory / folder / file.name)
            text = file.text if file.text.endswith("\n") else f"{file.text}\n"
            paths[-1].write_text(text, encoding="utf-8")
        number = f" [{compile_id}]" if compile_id else ""
        self._lines[folder] = f"{folder}: graph {graph}{number}, {about}, {len(paths)} files"
        lines = "".join(f"{line}\n" for line in self._lines.values())
        (self.directory / INDEX).write_text(lines, encoding="utf-8")
        return paths


process_dump = functools.cache(Dump)
"""Return this process's dump in a directory."""


class Dumper(Observer):
    """Writes stages of compiles to ``dump_dir``, or where ``TORCH_COMPILE_DEBUG`` says."""

    def looks(self, options: Options) -> bool:
        return _directory(options) is not None

    def watch_compile(self, options: Options, trace: Trace) -> CompileHooks:
        directory, records = str(_directory(options)), Records()

        def write(compiled: Compiled) -> None:
            records.add(compiled)
            try:
                files = stage_files(records.kept, find_target(trace.target).language)
                process_dump(Path(directory)).write(trace.name, compile_id(), trace.target, files)
            except OSError as error:
                logger.warning("cannot write the stages to %s: %s", directory, error)

        return CompileHooks(write, records.observe, anew=True)


OBSERVERS.append(Dumper())


def _directory(options: Options) -> str | None:
    asked = debug_directory()
    return options.dump_dir or (None if asked is None else os.path.join(asked, "fusec"))


def suffix_of(stage: str, language: str) -> str:
    """Return the suffix of a stage's file.

    Args:
        language: of the target's kernels: "cpp" or "triton".
    """
    if stage == "source":
        return "cpp" if language == "cpp" else "py"
    return "py" if stage in ("fx", "wrapper", *BEFORE_CAPTURE) else "txt"


def stage_files(records: Mapping[str, Record], language: str) -> Iterator[File]:
    """Yield a file for each stage that changed something, and for each kernel's source."""
    for stage, made in records.items():
        suffix = suffix_of(stage, language)
        if stage == "source":
            for kernel, source in made.structure.items():
                yield File(stage, kernel, suffix, source)
        elif made.changed:
            yield File(stage, "", suffix, made.text)


def place_of(stage: str) -> int:
    """Return a stage's place in a compile, from 0; passes of the user have one place."""
    return _places().get(stage, _places()[_OF_THE_USER])


@functools.cache
def _places() -> Mapping[str, int]:
    """Return stage -> its place."""
    names = [name for s in all_stages() for name in _LEVELS.get(s.name, (s.name,))]
    return {name: place for place, name in enumerate(dict.fromkeys((*names, *_BEHIND)))}


def _remove_earlier(directory: Path) -> None:
    with suppress(FileNotFoundError):
        lines = (directory / INDEX).read_text(encoding="utf-8").splitlines()
        for folder in (directory / line.partition(":")[0] for line in lines):
            if not _FOLDER.fullmatch(folder.name) or folder.is_symlink() or not folder.is_dir():
                continue
            for file in folder.iterdir():
                if _FILE.fullmatch(file.name) and not file.is_dir():
                    file.unlink()
            with suppress(OSError):  # somebody else's files stay
                folder.rmdir()
        (directory / INDEX).unlink()

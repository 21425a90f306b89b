"""``sparkwright first-light``: run all that one machine can, in order, and make a page of it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from sparkwright import __version__
from sparkwright.audit import reproduce
from sparkwright.bench import quick_look
from sparkwright.bench.recipes import recipe as recipes
from sparkwright.bench.server import wheel_identity
from sparkwright.builder import host_info, pipeline
from sparkwright.builder.schedule import Costs
from sparkwright.cli import bench, doctor, gate, options
from sparkwright.core import process
from sparkwright.core.console import console, duration
from sparkwright.core.files import content_key, sha256_file
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import SourceError
from sparkwright.gates.core.builder import GateBuilder
from sparkwright.gates.core.ladder import machine_facts
from sparkwright.gates.core.server_under_test import GateOptions, model_digest
from sparkwright.gates.core.verdict import worst
from sparkwright.gates.throughput.experiment import Environment, ExperimentSpec
from sparkwright.lab.first_light import NOT_MEASURED, FirstLight, Step, StepRecord, redacted

#: What the quick A/B launches, in this order: the first and the last are one wheel.
LAUNCHES = ("candidate", "baseline", "candidate again")


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of ``first-light``."""
    parser = parsers["first-light"]
    parser.set_defaults(run=first_light)
    add = parser.add_argument
    add(
        "wheels",
        nargs="*",
        type=Path,
        metavar="WHEEL",
        help="wheels that are built already (default: build those of the stack)",
    )
    add("--recipe", default="", metavar="NAME", help="recipe of the model (ci/recipes)")
    add("--serve", type=Path, metavar="DIR", help="serve the model in this folder, for G3 and G4")
    add(
        "--against",
        type=Path,
        metavar="DIR",
        help="also run G5 and G6, with this reference: a folder written by `gate --record`",
    )
    add(
        "--python",
        type=Path,
        metavar="FILE",
        help="Python of the environment that the wheel is installed in (default: make one)",
    )
    add(
        "--baseline",
        type=Path,
        metavar="WHEEL",
        help="the wheel to compare with (default: the official one)",
    )
    add(
        "--baseline-python",
        type=Path,
        metavar="FILE",
        help="Python of the environment that it is installed in (default: make one)",
    )
    add(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder of page, evidence and bundle (default: dist/first-light)",
    )


def first_light(arguments: argparse.Namespace) -> dict[str, Any]:
    """
    Run the steps that are not done yet; write and show the page and the bundle.

    Raises:
        UsageError: The options do not go together.
        first-light-failed, first-light-incomplete: A step did not pass.
    """
    paths = ("serve", "against", "python", "baseline", "baseline_python")
    named = [*arguments.wheels, *filter(None, (getattr(arguments, name) for name in paths))]
    options.refuse(
        (arguments.recipe and not arguments.serve, "--recipe NAME needs --serve DIR."),
        (
            bool(arguments.baseline) != bool(arguments.baseline_python),
            "--baseline and --baseline-python belong together.",
        ),
        *((not path.exists(), f"There is no {path}.") for path in named),
    )
    context = options.checkout(arguments)
    root = context.project.root
    folder = (arguments.output or root / "dist" / "first-light").absolute()
    context = dataclasses.replace(context, output=root / "dist")
    name = content_key("output", str(folder))[:8]
    with context.store.lock(f"first-light-{name}", wait=False):
        steps = FirstSteps(context, arguments, folder)
        result = FirstLight(context.store, folder)
        result.run(steps.all())
        about = {"stack": context.project.stack, "arch": context.project.spec.arch, **steps.facts}
        wheels = {sha256_file(path): path.name for path in steps.wheels}
        bundle = result.write(about, wheels)
    result.show()
    console.result(f"page: {bundle.with_name('first-light.html')}")
    console.result(f"bundle: {bundle}, which you may send; sha256 {sha256_file(bundle)}")
    document = {"steps": result.records, "bundle": str(bundle)}
    result.raise_for_state(document)
    return document


class FirstSteps:
    """
    What the steps do, by the functions behind the other commands.

    Args:
        folder: Where evidence is written.

    Attributes:
        facts: Of the machine.
        gpu: Why no gate can run on a GPU; empty if it can.
    """

    def __init__(self, context: RunContext, arguments: argparse.Namespace, folder: Path) -> None:
        self._context, self._arguments, self._folder = context, arguments, folder
        self._environments = folder / "environments"
        self.facts, self.gpu = machine_facts(), "doctor did not run"

    def all(self) -> list[Step]:
        """Return the steps in their order."""
        given, wheel = self._arguments, self._needs_wheel
        steps = [
            Step(
                "doctor",
                "what this machine has and lacks",
                f"{host_info.PATIENCE:g} s at most, the time limit of its probes",
                self._doctor,
            )
        ]
        if not given.wheels:
            step = Step("build", "build the wheels", self._compile_time(), self._build)
            steps.append(step._replace(inputs=self._inputs))
        steps += [
            Step("audit", "G0: the machine code inside", NOT_MEASURED, self._audit, wheel),
            Step(
                "numerics",
                "G1: NVFP4 in the patched sources",
                "7 s where the wheel of docs/rehearsal was built",
                partial(self._gates, ("G1",)),
                wheel,
            ),
        ]
        if not (given.python and given.baseline_python):
            title = "install the wheels, and the official one"
            steps.append(Step("environments", title, NOT_MEASURED, self._install, self._needs_gpu))
        steps += [
            Step(
                "device",
                "G2: the wheel on the GPU",
                "99 s on an H100 (docs/explanation/gates.md)",
                self._device,
                self._needs_graft,
            ),
            Step(
                "serve",
                "G3 and later: a served model",
                NOT_MEASURED,
                self._serve,
                self._needs_model,
            ),
            Step(
                "quick",
                "quick A/B against the official wheel",
                f"{len(LAUNCHES)} looks of {quick_look.BUDGET_S:g} s at most, their time limit; "
                f"the launches: {NOT_MEASURED}",
                self._quick,
                self._needs_model,
            ),
        ]
        served = {"serve", "quick", "environments", "device"}
        return [
            step._replace(inputs=step.inputs or partial(self._inputs, served=step.name in served))
            if step.name != "doctor"
            else step
            for step in steps
        ]

    # What the steps need, and what determines their results.

    @property
    def wheels(self) -> list[Path]:
        """The wheels that were named, else those of the last build."""
        built = (pipeline.last_wheel(self._context, fork) for fork in self._context.forks)
        return self._arguments.wheels or [path for path in built if path]

    @property
    def _graft(self) -> Path | None:
        """The wheel that serves: that of a grafted fork."""
        project = self._context.project
        grafts = [fork for fork, spec in project.spec.forks.items() if spec.build == "graft"]
        matching = (p for p in self.wheels if any(p.match(f"*{fork}-*.whl") for fork in grafts))
        return next(matching, None)

    def _python(self, option: str, folder: str) -> Path | None:
        """Return the Python that *option* names, else that in *folder*; None if there is none."""
        own = self._environments / folder / "bin" / "python"
        return getattr(self._arguments, option) or (own if own.exists() else None)

    @property
    def _pythons(self) -> tuple[Path | None, Path | None]:
        """The Pythons of the candidate and of the baseline."""
        candidate = self._python("python", "candidate/current")
        return candidate, self._python("baseline_python", "stock")

    def _needs_wheel(self) -> str:
        return "" if self.wheels else "there is no wheel: the build did not end"

    def _needs_graft(self) -> str:
        forks = ", ".join(self._context.forks)
        return "" if self._graft else f"no wheel with device code was built or named ({forks})"

    def _needs_gpu(self) -> str:
        return self._needs_graft() or self.gpu

    def _needs_model(self) -> str:
        if self._needs_gpu():
            return self._needs_gpu()
        if not self._arguments.serve:
            return "no model was named: --serve DIR, and its --recipe NAME"
        return "" if all(self._pythons) else "there are no environments; see that step"

    def _inputs(self, *, served: bool = False) -> object:
        """Return what determines the result of a step; *served* also of one on the GPU."""
        project, given = self._context.project, self._arguments
        policies = (project.root / "ci").rglob("*.yaml")
        inputs: list[object] = [
            *(__version__, project.stack, project.spec.arch),
            {str(path.relative_to(project.root)): sha256_file(path) for path in policies},
            [self._context.source_inputs(fork) for fork in self._context.forks],
            [sha256_file(path) for path in self.wheels],
        ]
        if served:
            inputs += [
                *(self.facts["gpu"], self.facts["driver"], given.recipe, str(given.against)),
                model_digest(given.serve) if given.serve else "",
                sha256_file(given.baseline) if given.baseline else "",
                [python and wheel_identity.version(python) for python in self._pythons],
            ]
        return inputs

    # The steps.

    def _doctor(self) -> StepRecord:
        document = doctor.machine(self._context)
        text = redacted(msgspec.json.format(msgspec.json.encode(document)).decode())
        path = self._context.store.write(self._folder / "doctor.json", text.encode())
        checks = document["checks"]
        gpus = [check for check in checks if check.subject == "GPU"]
        usable = any(check.state == "ready" for check in gpus)
        self.gpu = "" if usable else f"no GPU: {gpus[0].meaning}" if gpus else "no GPU"
        others = [f"{one.subject}: {one.state}" for one in checks if one.state != "ready"]
        missing = any(check.state == "missing" for check in checks)
        message = ", ".join((f"{len(checks) - len(others)} checks ready", *others))
        return StepRecord("fail" if missing else "pass", message, files=(path.name,))

    def _compile_time(self) -> str:
        """Return how long the units take to compile, by their cost records."""
        context, cores = self._context, int(self.facts["cores"])
        seconds = sum(Costs.of(context, fork).total for fork in context.forks)
        if not seconds:
            return NOT_MEASURED
        source = f"build/{context.project.stack}/costs.yaml and the builds here"
        return f"{duration(seconds / cores)} to compile on {cores} cores, by {source}"

    def _build(self) -> StepRecord:
        built = [pipeline.build(self._context, fork) for fork in self._context.forks]
        return StepRecord("pass", ", ".join(wheel.filename for wheel in built))

    def _audit(self) -> StepRecord:
        records = [self._gates(("G0",), path) for path in self.wheels]
        return StepRecord(
            worst(verdict.state for record in records for verdict in record.verdicts),
            "; ".join(record.message for record in records),
            tuple(verdict for record in records for verdict in record.verdicts),
            files=tuple(name for record in records for name in record.files),
        )

    def _gates(self, names: Sequence[str], wheel: Path | None = None, **given: Any) -> StepRecord:
        """Run the gates *names* on *wheel*, by default the one that serves."""
        path = wheel or self._graft or self.wheels[0]
        # Another wheel of the same name must not replace this one's verdicts.
        output = self._folder / sha256_file(path)[:12]
        context = dataclasses.replace(self._context, output=output)
        inputs = GateOptions(wheel=path, **given)
        with GateBuilder(context, inputs, self.facts) as builder:
            verdicts = gate.climb(context, inputs, builder, names, self.facts).verdicts
        state = worst(verdict.state for verdict in verdicts)
        checks = [check for verdict in verdicts for check in verdict.checks if check.required]
        messages = [check.message for check in checks if check.state == state != "pass"]
        states = ", ".join(f"{verdict.label} {verdict.state}" for verdict in verdicts)
        more = f" ({len(messages) - 1} more)" if messages[1:] else ""
        message = f"{path.name.split('-')[0]}: {states}{': ' if messages else ''}"
        files = sorted(output.glob(f"{path.name.removesuffix('.whl')}.*"))
        return StepRecord(
            state,
            f"{message}{messages[0] if messages else ''}{more}",
            verdicts,
            files=tuple(str(file.relative_to(self._folder)) for file in files),
        )

    def _install(self) -> StepRecord:
        from sparkwright.release import staging

        if not self._arguments.python:
            # Other wheels may lie beside them.
            chosen = self._environments / "wheels"
            shutil.rmtree(chosen, ignore_errors=True)
            chosen.mkdir(parents=True)
            for path in self.wheels:
                shutil.copy2(path, chosen)
            staging.install_built(self._context, chosen, self._environments / "candidate")
        if not self._arguments.baseline_python:
            stock = self._environments / "stock"
            log = self._context.store.folder("logs") / "venv.log"
            process.run([sys.executable, "-m", "venv", stock], log=log)
            staging.install_stock(self._context, stock)
        return StepRecord("pass", "installed")

    def _device(self) -> StepRecord:
        return self._gates(("G2",), python=self._pythons[0])

    def _serve(self) -> StepRecord:
        given = self._arguments
        names = ("G3", "G4", *(("G5", "G6") if given.against else ()))
        options = {"serve": given.serve, "recipe": given.recipe, "against": given.against}
        return self._gates(names, python=self._pythons[0], **options)

    def _quick(self) -> StepRecord:
        given, (python, baseline_python) = self._arguments, self._pythons
        assert python
        assert baseline_python
        stock = next((self._environments / "stock" / "wheel").glob("*.whl"), None)
        baseline = given.baseline or stock
        name, root = given.recipe, self._context.project.root
        recipe = recipes.load(root, name) if name else None
        sides = {"baseline": Environment(baseline_python, baseline)}
        looks = {}
        for launch in LAUNCHES:
            side = sides.get(launch, Environment(python, self._graft))
            spec = ExperimentSpec("bench", side, model=given.serve, recipe=recipe)
            output = self._folder / "quick" / launch.replace(" ", "-")
            own = dataclasses.replace(self._context, output=output)
            with console.step(launch):
                looks[launch] = bench.quick(own, spec)
        arch = ""
        # The official wheel has no build record.
        with contextlib.suppress(SourceError):
            arch = reproduce.read_record(baseline).arch if baseline else ""
        message = f"{len(looks)} launches, one after the other; not a gate"
        return StepRecord("measured", message, looks=looks, baseline_arch=arch)

"""Whether Triton can compile for this GPU."""

from collections.abc import Iterator

from thor_spec import env
from thor_spec.device import ptxas
from thor_spec.device.board import Kind
from thor_spec.device.machine import Machine
from thor_spec.doctor.report import Check, Level

_LINE = "ptxas"


def check(machine: Machine) -> Iterator[Check]:
    """Yield what the assembler that Triton takes does; nothing where there is no GPU, or nothing can be tried out."""
    capability = (11, 0) if machine.board.kind is Kind.THOR else machine.gpu.capability if machine.gpu else None
    if not machine.live or capability is None:
        return
    number = capability[0] * 10 + capability[1]
    path = ptxas.chosen(number)
    if path is None:
        yield Check(
            name=_LINE, level=Level.WARN, detail="Triton does not say which it takes", remedy="Reinstall triton."
        )
        return
    if not (said := ptxas.complaint(path, number)):
        yield Check(name=_LINE, level=Level.OK, detail=f"{path} assembles {ptxas.target(number)}")
        return
    detail = f"{path}, which Triton takes, does not assemble {ptxas.target(number)}: {said}"
    set_now = ", ".join(name for name in ptxas.VARIABLES if env.engine_variable(name)) or "none"
    if machine.board.kind is Kind.THOR and (other := ptxas.alternative(number)):
        yield Check(
            name=_LINE,
            level=Level.WARN,
            detail=f"{detail}; thor-spec gives its engines {other}",
            remedy=f"For other programs: {ptxas.REMEDY} (set now: {set_now})",
        )
        return
    yield Check(name=_LINE, level=Level.FAIL, detail=detail, remedy=f"{ptxas.REMEDY} (set now: {set_now})")

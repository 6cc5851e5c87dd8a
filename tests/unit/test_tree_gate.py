"""The verdict of ``verify tree``: green only where everything was looked at, and every planted fault seen."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from thor_spec.errors import EngineStartError
from thor_spec.gates import tree
from thor_spec.gates.tree import FAULTS, INVARIANTS, verdict


def clean() -> dict[str, Any]:
    return {
        "checked": dict.fromkeys(INVARIANTS, 5), "violated": {}, "told": [], "layers": 3,
        "rows": {"tree": 9, "chain": 4, "accepted": 3},
    }  # fmt: skip


def planted() -> dict[str, Any]:
    return {fault: {"violated": {name: 1}} for fault, name in FAULTS.items()}


def test_every_invariant_has_a_fault() -> None:
    assert set(FAULTS.values()) == set(INVARIANTS) == {"I1", "I2", "I3", "I4", "I5", "I6"}


def test_green() -> None:
    found = verdict({"": clean(), **planted()})
    assert found.passed
    assert "I6 0/5" in found.summary
    assert f"{len(FAULTS)} of {len(FAULTS)} planted faults seen" in found.summary


@pytest.mark.parametrize("name", INVARIANTS)
def test_red_where_something_was_not_looked_at_or_violated(name: str) -> None:
    unseen, violated = clean(), clean()
    del unseen["checked"][name]
    violated["violated"] = {name: 1}
    assert not verdict({"": unseen}).passed
    assert f"{name} was never looked at" in verdict({"": unseen}).findings
    assert not verdict({"": violated}).passed


@pytest.mark.parametrize("fault", FAULTS)
def test_red_where_a_fault_is_not_seen_by_its_own(fault: str) -> None:
    found = {"": clean(), **planted(), fault: {"violated": {"I0": 7}}}
    assert not verdict(found).passed
    assert any(fault in finding for finding in verdict(found).findings)


def test_red_without_branches() -> None:
    found = clean()
    found["rows"] = {"chain": 9, "accepted": 3}
    assert not verdict({"": found}).passed


class DeadEngine:
    """A guarded job that has ended with status 1."""

    job = SimpleNamespace(wait=lambda _: 1)
    told: BaseException | None = None

    @classmethod
    def start(cls, *args: Any, output: Path, **options: Any) -> Self:
        with output.open("a") as log:
            log.write("INFO fine\n[rank0]: ValueError: No available memory for the cache blocks.\n[rank0]: more\n")
        return cls()

    def check(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        DeadEngine.told = error


def test_an_engine_that_dies_is_told_with_its_cause_before_the_guard_looks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tree, "GuardedJob", DeadEngine)
    log = tmp_path / "log"
    log.write_text("ValueError: what an earlier run died of\n")
    plan: Any = SimpleNamespace(
        environment={}, resolved=SimpleNamespace(config=SimpleNamespace(memory_floor=None))
    )  # fmt: skip
    with pytest.raises(
        EngineStartError, match=r"status 1: ValueError: No available memory.*\nSee .* --kv-cache-memory"
    ) as found:
        tree.run(plan, {}, log=log, say=print)
    assert DeadEngine.told is found.value  # else a guard that misses memory would tell of nothing else

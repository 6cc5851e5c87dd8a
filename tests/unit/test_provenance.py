"""A record names what was run, and no folder of the machine that ran it."""

import sys

import pytest

from thor_spec import provenance


def test_folders_of_a_machine_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [
        "benchmarks/x.py",
        "/home/me/target",
        "--out=/home/me/out",
        "--note",
        "a/b",
        "--ratio=1/2",
        "--url=http://x/y",
    ]
    monkeypatch.setattr(sys, "argv", given)
    assert provenance.collect().argv == (
        "benchmarks/x.py", "…/target", "--out=…/out", "--note", "a/b", "--ratio=1/2", "--url=http://x/y",
    )  # fmt: skip

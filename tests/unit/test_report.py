"""The report of records, as a page and as Markdown."""

import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from tests.unit.bench_outcomes import RED, outcome, written
from thor_spec import record
from thor_spec.bench import report, table


class Strict(HTMLParser):
    """What a page refers to outside itself, and whether its tables are whole."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.rows: list[int] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        assert tag not in ("script", "iframe", "link", "object"), tag
        for name in ("src", "href", "xlink:href"):
            (self.links if values.get(name, "#").startswith("#") else self.outside).append(values.get(name, "#"))
        if "id" in values:
            self.ids.append(values["id"])
        if tag == "tr":
            self.rows.append(0)
        if tag in ("td", "th"):
            self.rows[-1] += 1


def test_the_page_is_well_formed_self_contained_and_complete(records: list[record.Record], tmp_path: Path) -> None:
    page = report.html(records)
    root = ET.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
    space = {"h": "http://www.w3.org/1999/xhtml", "s": "http://www.w3.org/2000/svg"}
    assert len(root.findall(".//h:section", space)) == 4
    assert len(root.findall(".//s:svg", space)) == 3
    assert len(root.findall(".//h:table", space)) == 4
    strict = Strict()
    strict.feed(page)
    assert strict.outside == []
    assert len(strict.ids) == len(set(strict.ids))
    assert {link.removeprefix("#") for link in strict.links if link != "#"} <= set(strict.ids)
    text = "".join(root.itertext())
    assert "<b>3 wrong</b> & more" in text
    assert "median and 95 % interval" in text
    assert page == report.html(records)
    assert str(Path.home()) not in page


def test_a_refused_record_shows_why_and_no_figures(tmp_path: Path) -> None:
    written(tmp_path, "bench-chat", outcome(gates={"exact": RED}).as_dict())
    found = record.find(tmp_path)
    page = report.html(found)
    assert "lossless gate of exact is red" in page
    assert "<table" not in page
    assert "<svg" not in page
    assert "Not to be reported: the lossless gate of exact is red" in report.markdown(found)


def test_markdown_has_a_table_for_each_record(records: list[record.Record]) -> None:
    text = report.markdown(records)
    assert text.count("\n## ") + text.startswith("## ") == 4
    assert "0.25 / " not in text
    assert "25%" in text
    lines = [line for line in text.splitlines() if line.startswith("| exact")]
    assert lines[0].count("|") == len(table.chat(records_summary(records))[0]) + 1


def records_summary(records: list[record.Record]) -> dict[str, Any]:
    return next(r.content["summary"] for r in records if r.name == "bench-chat")

"""The report as a browser lays it out. Run where one is installed (Debian: chromium-headless-shell)."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from thor_spec import record
from thor_spec.bench import report

BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
# Put in by the test: the page itself has no script.
PROBE = """<script>
const box = (e) => { const b = e.getBoundingClientRect(); return [b.width, b.height]; };
const all = (s) => [...document.querySelectorAll(s)];
const found = {
  plots: all("svg").map(box),
  bars: all("svg path").filter((p) => getComputedStyle(p).fill === "rgb(72, 120, 168)").map(box),
  tables: all("table").map((t) => [t.rows.length, ...box(t)]),
  links: all("a").map((a) => document.getElementById(a.hash.slice(1)) !== null),
  width: [document.documentElement.scrollWidth, innerWidth],
  loaded: performance.getEntriesByType("resource").length,
};
document.body.innerHTML = '<pre id="probe">' + JSON.stringify(found) + "</pre>";
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="not run: needs a headless browser, e.g. Debian's chromium-headless-shell")
def test_a_browser_shows_every_plot_and_table(records: list[record.Record], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(report.html(records).replace("</body>", PROBE + "</body>"), encoding="utf-8")
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000", "--dump-dom"]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    probe = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert probe, done.stdout[-2000:]
    found: dict[str, Any] = json.loads(unescape(probe[1]))
    assert len(found["plots"]) == 3
    assert all(width > 300 and height > 100 for width, height in found["plots"])
    wide = sorted(width for width, height in found["bars"] if height > 5)
    assert len(wide) == 2  # two arms, the faster one's bar half as long again
    assert wide[1] / wide[0] == pytest.approx(1.5, rel=0.05)
    assert sorted(rows for rows, *_ in found["tables"]) == [2, 3, 3, 3], found["tables"]
    assert all(width > 50 and height > 20 for _, width, height in found["tables"])
    assert found["links"]
    assert all(found["links"])
    assert found["loaded"] == 0
    assert found["width"][0] <= found["width"][1]

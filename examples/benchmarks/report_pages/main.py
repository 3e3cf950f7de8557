"""How large is the page of a plan, and how long does it take to make, to open and to draw?

    pip install "madpipe[browser]"
    python examples/benchmarks/report_pages/main.py [--rounds 5] [--save]

A small plan (the digits network on 2 devices) and the largest that a page is made for: 200 unequal blocks on 64
devices, 256 micro-batches. Each page is opened in a Chromium without a screen (Qt WebEngine), ``--rounds`` times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from deepspeed_partition import Chain, Plan, Platform, make_plan
from deepspeed_partition.planner.report.page import plan_page
from deepspeed_partition.planner.report.planned_run import planned_run

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "planner_speed"))
from steps import devices_for, transformer

DIGITS = HERE.parent / "digits_cuts" / "results" / "digits_chain_202611.json"
LOOKED_AT = 400
"""Operations, evenly over each page, of which a pixel is looked at."""
PATIENCE_SECONDS = 120

OPEN = """(() => {
  const canvases = [...document.querySelectorAll("canvas")];
  const ready = window.madpipe && madpipe.shared.views.every(view => !view.waits && view.width);
  if (!ready || !canvases.every(each => each.width > 300)) return "null";
  const paint = performance.getEntriesByType("paint").map(each => each.startTime);
  const times = performance.timing;
  return JSON.stringify(Math.max(times.domContentLoadedEventEnd - times.navigationStart, ...paint));
})()"""
"""Milliseconds from the beginning of the load until the script has run and the page is first painted; null before
everything on it is drawn."""
FLUID = """(() => {
  const views = madpipe.shared.views, whole = madpipe.shared.whole, timed = {};
  const median = values => values.sort((a, b) => a - b)[values.length >> 1];
  const draw = () => {
    const began = performance.now();
    views.forEach(view => view.draw());
    return performance.now() - began;
  };
  const many = count => median(Array.from({length: count}, draw));
  setWindow(0, whole); timed.draw_all = many(9);
  setWindow(whole * 0.4, whole * 0.41); timed.draw_zoomed = many(9);
  setWindow(0, whole);
  const press = key => {
    const began = performance.now();
    madpipe.view.box.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
    draw();
    return performance.now() - began;
  };
  timed.key = median(Array.from({length: 9}, () => press("ArrowRight")));
  const began = performance.now();
  operationTable(); timed.table = performance.now() - began;
  return JSON.stringify(timed);
})()"""
"""Milliseconds: to draw the timeline and the memory, all of it and one part in a hundred; to answer an arrow key;
to make the table of all operations."""
SEEN = """(() => {
  const view = madpipe.view, context = view.context, scale = devicePixelRatio || 1;
  const flat = runs.planned.flatMap((lane, number) => Array.from(lane.start, (_, index) => [number, index]));
  let seen = 0, asked = 0;
  for (let at = 0; at < flat.length; at += Math.max(1, Math.floor(flat.length / LOOKED_AT))) {
    const [number, index] = flat[at], rows = runs.planned[number], lane = view.lanes[number];
    const middle = (rows.start[index] + rows.end[index]) / 2, lasts = rows.end[index] - rows.start[index];
    chosen = null;
    setWindow(middle - 5 * lasts, middle + 5 * lasts);
    view.layOut();
    view.box.scrollTop = lane.y - AXIS;
    view.draw();
    const x = view.x(rows.start[index]) + 2, y = lane.y + lane.height / 2 - view.box.scrollTop;
    const pixel = context.getImageData(Math.round(x * scale), Math.round((y - 6) * scale), 1, 1).data;
    const colour = hue[HUES[data.names[rows.name[index]][0]]];
    asked++;
    const found = timeline.at(view, {lane, time: middle, part: 0.5});
    seen += [1, 3, 5].every((from, part) => parseInt(colour.slice(from, from + 2), 16) === pixel[part]) &&
      found.index === index;
  }
  return JSON.stringify({operations: flat.length, asked, seen});
})()""".replace("LOOKED_AT", str(LOOKED_AT))
"""Of some operations, each zoomed on: whether its pixel has the colour of its kind, and the pointer finds it."""


def small() -> tuple[Plan, Chain]:
    chain = Chain.load(DIGITS)
    platform = Platform(num_devices=2, memory_bytes=2_000_000_000, bandwidth=1e9)
    return make_plan(chain, platform, num_micro_batches=8, time_limit_seconds=10), chain


def largest() -> tuple[Plan, Chain]:
    chain = transformer(200, "uneven")
    return make_plan(chain, devices_for(chain, 64), num_micro_batches=256, time_limit_seconds=10), chain


class Browser:
    """A Chromium without a screen, with what its console says."""

    def __init__(self) -> None:
        flags = "--disable-gpu" + (" --no-sandbox" if os.geteuid() == 0 else "")  # it has no sandbox for root
        os.environ.setdefault("QTWEBENGINE_CHROMIUM_FLAGS", flags)
        os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
        from PyQt6.QtCore import QUrl, qVersion
        from PyQt6.QtWebEngineCore import QWebEnginePage, qWebEngineChromiumVersion
        from PyQt6.QtWebEngineWidgets import QWebEngineView
        from PyQt6.QtWidgets import QApplication

        said: list[str] = []

        class Page(QWebEnginePage):
            def javaScriptConsoleMessage(self, level: Any, message: Any, line: Any, source: Any) -> None:
                said.append(f"{message} (line {line})")

        self.said, self.url = said, QUrl
        self.version = f"Chromium {qWebEngineChromiumVersion()}, Qt {qVersion()}"
        self.application = QApplication(sys.argv[:1])
        self.view = QWebEngineView()
        self.page = Page(self.view)
        self.view.setPage(self.page)
        self.view.resize(1280, 900)
        self.view.show()

    def wait(self, until: Callable[[], object]) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while not until():
            if time.monotonic() > end:
                raise TimeoutError(f"the page does not answer: {self.said}")
            self.application.processEvents()
            time.sleep(0.002)

    def ask(self, code: str) -> Any:
        answers: list[str] = []
        self.page.runJavaScript(code, answers.append)
        self.wait(lambda: answers)
        return json.loads(answers[0])

    def load(self, path: Path) -> float:
        """Load a page; return the seconds until it can be used."""
        loaded: list[bool] = []
        connection = self.page.loadFinished.connect(loaded.append)
        self.view.load(self.url.fromLocalFile(str(path.resolve())))
        self.wait(lambda: loaded)
        self.page.loadFinished.disconnect(connection)
        while (milliseconds := self.ask(OPEN)) is None:
            pass
        return milliseconds / 1e3


def measured(name: str, plan: Plan, chain: Chain, browser: Browser, folder: Path, rounds: int) -> dict[str, Any]:
    builds, path = [], folder / f"{name}.html"
    for _ in range(rounds):
        began = time.perf_counter()
        path.write_text(plan_page(plan, chain), encoding="utf-8")
        builds.append(time.perf_counter() - began)
    browser.said.clear()
    opens, fluid = [], []
    for _ in range(rounds):
        opens.append(browser.load(path))
        fluid.append(browser.ask(FLUID))
    console = list(browser.said)  # before pixels are read, of which Chromium says that it takes long
    seen = browser.ask(SEEN)
    assert seen["operations"] == len(planned_run(plan, chain).operations), "operations of the plan are missing"
    middle = {key: statistics.median(each[key] for each in fluid) / 1e3 for key in fluid[0]}
    return {
        "plan": name, "layers": chain.num_layers, "devices": plan.platform.num_devices,
        "micro_batches": plan.num_micro_batches, "operations": seen["operations"],
        "file_bytes": path.stat().st_size, "build_seconds": statistics.median(builds),
        "open_seconds": statistics.median(opens), "slowest_open_seconds": max(opens),
        **{f"{key}_seconds": seconds for key, seconds in middle.items()},
        "looked_at": seen["asked"], "seen": seen["seen"], "console": console,
    }  # fmt: skip


ROWS: dict[str, Callable[[dict[str, Any]], str]] = {
    "layers, devices, micro-batches": lambda row: f"{row['layers']}, {row['devices']}, {row['micro_batches']}",
    "operations": lambda row: f"{row['operations']:,}",
    "size of the file": lambda row: f"{row['file_bytes'] / 1e6:.2f} MB",
    "time to make it": lambda row: f"{row['build_seconds']:.2f} s",
    "time to open it": lambda row: f"{row['open_seconds']:.2f} s (slowest {row['slowest_open_seconds']:.2f})",
    "to draw all of it": lambda row: f"{row['draw_all_seconds'] * 1e3:.0f} ms",
    "to draw one hundredth of the time": lambda row: f"{row['draw_zoomed_seconds'] * 1e3:.0f} ms",
    "to answer an arrow key": lambda row: f"{row['key_seconds'] * 1e3:.0f} ms",
    "to make the table of all operations": lambda row: f"{row['table_seconds'] * 1e3:.0f} ms",
    "operations looked at, and seen": lambda row: f"{row['looked_at']}, {row['seen']}",
    "lines on the console": lambda row: str(len(row["console"])),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write the figures into results/")
    arguments = parser.parse_args()
    plans = {"small": small(), "largest": largest()}
    browser = Browser()
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder) / "empty.html"
        empty.write_text(plan_page(*plans["small"]))
        browser.load(empty)  # the browser's own start is not counted
        rows = [measured(name, *made, browser, Path(folder), arguments.rounds) for name, made in plans.items()]
    table = Table("page of a plan", *plans)
    for name, cell in ROWS.items():
        table.add_row(name, *map(cell, rows))
    Console(width=100).print(table)
    if arguments.save:
        path = HERE / "results" / f"pages_{date.today():%Y%m}.json"
        path.write_text(json.dumps({"browser": browser.version, "pages": rows}, indent=1) + "\n")
        print(f"saved {path.name}")
    sys.stdout.flush()
    os._exit(
        0 if not any(row["console"] for row in rows) else 1
    )  # Qt waits for its processes, which may take long


if __name__ == "__main__":
    main()

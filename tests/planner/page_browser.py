"""A page in a real, headless Chromium (Qt WebEngine): what its script sees, said by mouse and keyboard.

Run as a module, in a process of its own: ``tests.planner.page_browser PAGE PICTURE light|dark [OTHER ...]``. It
prints one line of JSON. Of the other pages and pictures the contrast alone is measured.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.planner.contrast import MEASURE

STATE = """(() => {
  const rows = madpipe.runs.planned.map(lane => Array.from(lane.start, (_, i) =>
    [madpipe.data.names[lane.name[i]], lane.micro[i], lane.start[i], lane.end[i]]));
  const box = document.getElementById("timeline").getBoundingClientRect();
  const lane = madpipe.view.lanes[0], run = madpipe.runs.planned[0];
  const wide = run.start.reduce((best, _, i) =>
    run.end[i] - run.start[i] > run.end[best] - run.start[best] ? i : best, 0);
  const canvases = [...document.querySelectorAll("canvas")].map(canvas => {
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    const colours = new Set();
    for (let i = 0; i < pixels.length; i += 4) colours.add(pixels.slice(i, i + 3).join());
    return colours.size;
  });
  return JSON.stringify({
    lanes: madpipe.data.lanes, rows: madpipe.data.count > 5000 ? null : rows, canvases,
    number: rows.reduce((sum, lane) => sum + lane.length, 0),
    ground: getComputedStyle(document.body).backgroundColor,
    words_are_above: document.getElementById("told").getBoundingClientRect().bottom <= box.top,
    spot: [box.left + madpipe.view.x((run.start[wide] + run.end[wide]) / 2), box.top + lane.y + lane.height / 2],
    ready: performance.timing.domContentLoadedEventEnd - performance.timing.navigationStart,
    loaded: performance.getEntriesByType("resource").map(each => each.name),
  });
})()"""
TOLD = """JSON.stringify({tip: document.getElementById("tip").style.display === "block"
  ? document.getElementById("tip").textContent : "", told: document.getElementById("told").textContent,
  window: [madpipe.shared.from, madpipe.shared.until],
  pages: document.querySelectorAll("#operations tbody tr").length,
  marked: (canvas => {
    const copy = document.createElement("canvas");
    [copy.width, copy.height] = [canvas.width, canvas.height];
    const context = copy.getContext("2d", {willReadFrequently: true});
    context.drawImage(canvas, 0, 0);
    const pixels = context.getImageData(0, 0, canvas.width, canvas.height).data;
    const select = [1, 3, 5].map(at => parseInt(madpipe.hue.select.slice(at, at + 2), 16));
    let number = 0;
    for (let i = 0; i < pixels.length; i += 4) number += select.every((part, at) => pixels[i + at] === part);
    return number;
  })(document.querySelector("#timeline canvas")),
  layer: (document.getElementById("layer-told") || {}).textContent})"""

NARROW = """JSON.stringify({
  beside: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  button: document.getElementById("theme").getClientRects()[0].height,
  letters: Math.min(...[...document.querySelectorAll("svg text")].map(each =>
    parseFloat(getComputedStyle(each).fontSize) * each.getScreenCTM().a)),
  tip: (tip => {
    showTip("words ".repeat(40), innerWidth - 5, 5);
    const box = tip.getBoundingClientRect();
    hideTip();
    return [box.left, innerWidth - box.right];
  })(document.getElementById("tip")),
})"""
"""What a window as narrow as a telephone shows: pixels beside it, the height of a button, the least letters of
pictures, and the room beside the words at the pointer."""


def main(page: str, picture: str, theme: str, *others: str) -> dict[str, Any]:
    os.environ["QT_QPA_PLATFORM"] = "offscreen"
    scheme = 0 if theme == "dark" else 1
    flags = f"--no-sandbox --disable-gpu --blink-settings=preferredColorScheme={scheme}"
    os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = flags
    from PyQt6.QtCore import QPoint, Qt, QUrl
    from PyQt6.QtTest import QTest
    from PyQt6.QtWebEngineCore import QWebEnginePage
    from PyQt6.QtWebEngineWidgets import QWebEngineView
    from PyQt6.QtWidgets import QApplication

    console: list[str] = []

    class Page(QWebEnginePage):
        def javaScriptConsoleMessage(self, level, message, line, source):
            console.append(f"{message} (line {line})")

    application = QApplication(sys.argv[:1])
    view = QWebEngineView()
    shown = Page(view)
    view.setPage(shown)
    view.resize(1280, 900)
    view.show()

    def wait(until, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not until() and time.monotonic() < end:
            application.processEvents()
            time.sleep(0.01)
        assert until(), f"the page does not answer: {console}"

    def ask(code: str) -> dict[str, Any]:
        answers: list[str] = []
        shown.runJavaScript(code, answers.append)
        wait(lambda: answers)
        assert answers[0] is not None, f"the page's answer is an error: {console}"
        return json.loads(answers[0])

    def settle(milliseconds: int = 300) -> None:
        QTest.qWait(milliseconds)

    loaded: list[bool] = []
    shown.loadFinished.connect(loaded.append)

    def load(path: str) -> None:
        loaded.clear()
        view.load(QUrl.fromLocalFile(os.path.abspath(path)))
        wait(lambda: loaded)

    load(page)
    settle(700)
    found = ask(STATE)
    view.grab().save(picture)
    target = view.focusProxy()
    x, y = map(round, found["spot"])
    QTest.mouseMove(target, QPoint(x - 3, y))
    settle(100)
    QTest.mouseMove(target, QPoint(x, y))
    settle()
    found["hovered"] = ask(TOLD)
    ask('document.getElementById("timeline").focus(), "0"')
    found["keys"] = []
    for key in (Qt.Key.Key_Right, Qt.Key.Key_Right, Qt.Key.Key_Down, Qt.Key.Key_End, Qt.Key.Key_Plus):
        QTest.keyClick(target, key)
        settle(150)
        found["keys"].append(ask(TOLD))
    ask('document.getElementById("operations-of").open = true, "0"')
    settle()
    found["table"] = ask(TOLD)["pages"]
    if ask('document.getElementById("layers") ? (document.getElementById("layers").focus(), "1") : "0"'):
        QTest.keyClick(target, Qt.Key.Key_Right)
        settle(150)
        found["layer"] = ask(TOLD)["layer"]
    found["contrast"] = {"page": ask(MEASURE)}
    view.resize(400, 800)
    settle(600)
    found["narrow"] = ask(NARROW)
    view.resize(1280, 900)
    found["console"] = console
    for other in others:
        load(other)
        found["contrast"][Path(other).name] = ask(MEASURE)
    return found


if __name__ == "__main__":
    answer = main(*sys.argv[1:])
    Path("/dev/stdout").write_text("\n" + json.dumps(answer) + "\n")
    os._exit(0)  # Qt waits for its processes at exit, which may take long

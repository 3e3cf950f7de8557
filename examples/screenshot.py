"""A picture of a page that ``madpipe report`` wrote, by a Chromium without a screen.

pip install "madpipe[browser]"
python examples/screenshot.py plan.html -o plan.png [--dark] [--size 1280x800]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

TICK_MILLISECONDS, PATIENCE_SECONDS = 500, 60
"""Time between two looks at the page, and how long it may take to draw itself: a busy machine takes its time."""
EMPTY_CANVASES = """[...document.querySelectorAll("canvas")].filter(each => each.width && each.height).filter(
  canvas => !new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer)
    .some((pixel, _, all) => pixel !== all[0])).length"""
"""The number of canvases that are still of one colour."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True, help="the PNG file to write")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--size", default="1280x800", help="width x height in pixels")
    given = parser.parse_args()
    width, _, height = given.size.partition("x")
    if not (given.page.is_file() and width.isdecimal() and height.isdecimal()):
        parser.error(f"{given.page} is no file" if not given.page.is_file() else f"--size is {given.size!r}")
    flags = f"--disable-gpu --blink-settings=preferredColorScheme={0 if given.dark else 1}"
    if os.geteuid() == 0:  # Chromium has no sandbox for root
        flags += " --no-sandbox"
    os.environ.setdefault("QTWEBENGINE_CHROMIUM_FLAGS", flags)
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    try:
        from PyQt6.QtCore import QTimer, QUrl
        from PyQt6.QtWebEngineWidgets import QWebEngineView
        from PyQt6.QtWidgets import QApplication
    except ImportError as error:
        parser.error(f"{error}: pip install 'madpipe[browser]' brings the browser")
    application = QApplication(sys.argv[:1])
    view = QWebEngineView()
    view.resize(int(width), int(height))
    view.show()

    until = time.monotonic() + PATIENCE_SECONDS
    seen: list[bytes] = []

    def look(num_empty: object) -> None:
        """Save the picture once all canvases are drawn and it is the same as at the look before."""
        picture = view.grab()
        image = picture.toImage()
        bits = image.constBits()
        now = b"" if bits is None else bits.asstring(image.sizeInBytes())
        is_late = time.monotonic() > until
        if (num_empty == 0 and seen[-1:] == [now] and len(set(now[::4])) > 1) or is_late:
            saved = not is_late and picture.save(str(given.output))
            why = "the page has not drawn itself" if is_late else f"{given.output} cannot be written"
            print(f"saved {given.output}" if saved else why, flush=True)
            os._exit(0 if saved else 2)  # Qt waits for its processes at exit, which may take long
        seen[:] = [now]
        QTimer.singleShot(TICK_MILLISECONDS, ask)

    def ask() -> None:
        view.page().runJavaScript(EMPTY_CANVASES, look)

    view.loadFinished.connect(lambda loaded: ask())
    view.load(QUrl.fromLocalFile(str(given.page.resolve())))
    application.exec()


if __name__ == "__main__":
    main()

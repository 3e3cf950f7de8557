"""A picture of a page that ``madpipe report`` wrote, by a Chromium without a screen.

pip install "madpipe[browser]"
python examples/screenshot.py plan.html -o plan.png [--dark] [--size 1280x800]
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

WAIT_MILLISECONDS = 1000
"""Time for the page to draw itself after it is loaded."""


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

    def save() -> None:
        saved = view.grab().save(str(given.output))
        print(f"saved {given.output}" if saved else f"{given.output} cannot be written", flush=True)
        os._exit(0 if saved else 2)  # Qt waits for its processes at exit, which may take long

    view.loadFinished.connect(lambda loaded: QTimer.singleShot(WAIT_MILLISECONDS, save))
    view.load(QUrl.fromLocalFile(str(given.page.resolve())))
    application.exec()


if __name__ == "__main__":
    main()

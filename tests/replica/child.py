"""A server for the supervisor's tests, standard library only: child.py PORT [WORD...]

crash         GET /crash ends it with code 3           stubborn   SIGTERM does not end it, nor its worker
sick          GET /sick makes /health answer 503       escape     its worker leaves the process group
never         exits with code 4 before it listens      deaf       /health is always 503
              GET /close closes its port; it does not end
It starts one worker process that sleeps, and prints `pids <own> <worker>`.
"""

import http.server
import os
import signal
import subprocess
import sys
import threading
import time

port, words = int(sys.argv[1]), set(sys.argv[2:])
if "never" in words:
    sys.exit(4)
if "stubborn" in words:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the worker inherits it
worker = subprocess.Popen(
    [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"], start_new_session="escape" in words
)
if "stubborn" in words:
    signal.signal(signal.SIGTERM, lambda *_: print("asked to end", flush=True))
print("pids", os.getpid(), worker.pid, flush=True)
healthy = "deaf" not in words


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        global healthy
        if self.path == "/crash":
            os._exit(3)
        if self.path == "/sick":
            healthy = False
        if self.path == "/close":
            threading.Thread(target=server.shutdown).start()
        self.send_response(200 if healthy or self.path != "/health" else 503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


print("to stderr", file=sys.stderr, flush=True)
server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
server.serve_forever()
server.server_close()
time.sleep(600)

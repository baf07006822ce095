"""Runs commands in the node, for the tests outside it: `node_server.py PORT`, until told to end.

A connection is one request and one answer, each a line of JSON. Only the standard library: it runs
with the system's interpreter.
"""

import json
import socketserver
import subprocess
import sys
import threading


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        line = self.rfile.readline()
        if not line:
            return  # somebody who looked whether we listen
        request = json.loads(line)
        if request.get("end"):
            self._answer({})
            threading.Thread(target=self.server.shutdown).start()
            return
        try:
            done = subprocess.run(
                request["command"],
                input=request["input"].encode(),
                capture_output=True,
                timeout=request["timeout"],
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            self._answer({"status": 125, "stdout": "", "stderr": str(error)})
            return
        self._answer(
            {
                "status": done.returncode,
                "stdout": done.stdout.decode(errors="replace"),
                "stderr": done.stderr.decode(errors="replace"),
            }
        )

    def _answer(self, document: dict[str, object]) -> None:
        self.wfile.write(json.dumps(document).encode() + b"\n")


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    # QEMU's network does not try a connection again that came when the queue was full.
    request_queue_size = 64


if __name__ == "__main__":
    with _Server(("", int(sys.argv[1])), _Handler) as server:
        server.serve_forever()

"""Runs commands in the node, for the tests outside it: `node_server.py PORT`, until a request ends
it.

A connection is one request and one answer, each a line of JSON. It uses only the standard library,
because it runs with the system's interpreter.
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
            return  # a client that only checked whether we listen
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
    # QEMU's network does not retry a connection that came while the queue was full.
    request_queue_size = 64


if __name__ == "__main__":
    with _Server(("", int(sys.argv[1])), _Handler) as server:
        server.serve_forever()

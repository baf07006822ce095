"""In the node: kube-proxy's work for the service `kubernetes`: `service_proxy.py HOST PORT`.

Pods and the agent connect to the service's address, which the node has, and get a connection to the
API server. It uses only the standard library, because it runs with the system's interpreter.
"""

import asyncio
import contextlib
import subprocess
import sys

SERVICE = "10.96.0.1"
_PART = 64 << 10  # bytes


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while part := await reader.read(_PART):
            writer.write(part)
            await writer.drain()
        writer.write_eof()


async def _serve(host: str, port: int) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(host, port)
        except OSError:
            writer.transport.abort()  # like a service without an endpoint
            return
        try:
            await asyncio.gather(_copy(reader, back), _copy(there, writer))
        finally:
            back.close()
            writer.close()

    server = await asyncio.start_server(connected, SERVICE, 443)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    subprocess.run(["ip", "address", "replace", f"{SERVICE}/32", "dev", "lo"], check=True)
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2])))

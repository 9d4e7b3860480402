"""A service of our own on loopback, for benchmarks that go through HTTP."""

import http.client
import socket
import subprocess
import sys
import time
from pathlib import Path

READY_S_MAX = 300.0
TAILRACE = str(Path(sys.executable).with_name("tailrace"))
"""The console script beside this interpreter."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_ready(port: int, server: "subprocess.Popen[bytes]") -> None:
    """Polls `/ready`. Raises RuntimeError when the process ends first or the time is over."""
    started = time.monotonic()
    while time.monotonic() - started < READY_S_MAX:
        if server.poll() is not None:
            raise RuntimeError(f"the service ended with exit code {server.returncode} before it was ready")
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.02)
    raise RuntimeError(f"the service was not ready after {READY_S_MAX:g} s")

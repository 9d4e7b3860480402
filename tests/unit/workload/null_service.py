"""A null server of its own process, for the tests of what talks to it."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def null_service(pace_ms: int = 1) -> Iterator[str]:
    """Its address. It ends when its standard input is closed, and well."""
    command = [sys.executable, "-m", "tailrace.workload.run.null_server", "--pace-ms", str(pace_ms)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        yield server.stdout.readline().decode().strip()
        assert server.stdin is not None
        server.stdin.close()
        assert server.wait(20) == 0

"""`make demo`: starts the service with the packaged model, asks one question, prints the streamed answer and its cost.

With `--keep` the service stays until Ctrl-C; else it is stopped. Everything it starts, it ends.
"""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tailrace.cli.backend import AskOptions, statistics_line
from tailrace.cli.output import printable
from tailrace.cli.remote import RemoteBackend
from tailrace.errors import ClientFailed
from tailrace.request import Message

MODEL = "smollm2"
QUESTION = "What is a river? Answer in two sentences."
START_S_MAX = 600
"""The first start converts the model; every later one takes seconds."""
STOP_S_MAX = 20
EXIT_TERMINATED = 143
"""128 + SIGTERM."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def connect(base: str, service: "subprocess.Popen[bytes]") -> RemoteBackend:
    """Waits until the service answers. Raises ClientFailed when it ended or took too long."""
    deadline = time.monotonic() + START_S_MAX
    while True:
        try:
            return await RemoteBackend.connect(base, model=None, api_key=None)
        except ClientFailed:
            if service.poll() is not None:
                raise ClientFailed(f"the service ended with exit code {service.returncode}; see above") from None
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.2)


async def ask(base: str, service: "subprocess.Popen[bytes]") -> None:
    backend = await connect(base, service)
    try:
        print(f"\n> {QUESTION}\n", flush=True)
        options = AskOptions(max_tokens=120, temperature=0.0, seed=0)
        turn = await backend.ask(
            [Message(role="user", content=QUESTION)], options, lambda text: print(printable(text), end="", flush=True)
        )
        print(f"\n\n{statistics_line(turn)}", flush=True)
    finally:
        await backend.close()


def stop(service: "subprocess.Popen[bytes]") -> None:
    """Asks it to drain and leave; insists after a while."""
    if service.poll() is not None:
        return
    service.send_signal(signal.SIGTERM)
    try:
        service.wait(STOP_S_MAX)
    except subprocess.TimeoutExpired:
        service.kill()
        service.wait()


def main() -> int:
    keep = "--keep" in sys.argv[1:]
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    tailrace = Path(sys.executable).parent / "tailrace"
    command = [str(tailrace), "serve", MODEL, "--host", "127.0.0.1", "--port", str(port)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))  # through `finally`, as Ctrl-C goes
    service = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        asyncio.run(ask(base, service))
        if keep:
            print(f"\nServing at {base}/v1 until Ctrl-C. Try: {tailrace} chat {base}", flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                service.wait()
        else:
            print(f"\nIt was served at {base}/v1; `make demo KEEP=1` keeps it there.", flush=True)
    except ClientFailed as error:
        print(f"demo: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        stop(service)
    return 0


if __name__ == "__main__":
    sys.exit(main())

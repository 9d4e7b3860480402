"""Hop 8 to 11: the engine process. `python -m tailrace.worker.engine_process --fd N`, started by the worker app.

In: frames over an inherited socket, `Start` first. Out: progress, `Ready`, then one report a step. It owns the
scheduler and the executor and nothing of HTTP or text. It lives as long as the socket: no app, no engine. Signals of
the terminal are ignored, because the app decides when to drain; SIGUSR1 prints the stacks.
"""

import argparse
import contextlib
import faulthandler
import gc
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from tailrace.errors import EngineFailed, StartFailed, TailraceError
from tailrace.worker.channel import EngineSpec, Fatal, FromEngine, Progress, Start, encode_frame
from tailrace.worker.engine_cut import StepCutter
from tailrace.worker.engine_inbox import Inbox, read_commands
from tailrace.worker.engine_loop import EngineLoop
from tailrace.worker.engine_start import StartedEngine, start_engine

SWITCH_INTERVAL_S = 0.0005
"""The reader thread waits at most this long for a busy main thread: a tenth of Python's default."""
_SEND_BUFFER_BYTES = 4 * 1024 * 1024


class _AppGone(Exception):
    """The other end of the socket is closed, or asked us to leave."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    parser = argparse.ArgumentParser(prog="tailrace.worker.engine_process", description="Started by tailrace serve.")
    parser.add_argument("--fd", type=int, required=True, help="the inherited end of the socket pair")
    connection = socket.socket(fileno=parser.parse_args(argv).fd)
    connection.set_inheritable(False)
    _prepare_process()
    code = _serve(connection)
    sys.stderr.flush()
    # Without the interpreter's tear-down: unmapping gigabytes politely takes seconds, the kernel does it at once.
    os._exit(code)


def _prepare_process() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # Standard output belongs to the app (`tailrace generate` prints there); libraries that print do it on stderr.
    os.dup2(2, 1)


def _serve(connection: socket.socket) -> int:
    """One engine from its first frame to its end. Returns the exit code."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    inbox, cutter = Inbox(), StepCutter()
    reader = (connection, inbox, cutter.on_cancel, cutter.on_close)
    threading.Thread(target=read_commands, args=reader, name="reader", daemon=True).start()

    def send(message: FromEngine) -> None:
        try:
            connection.sendall(encode_frame(message))
        except OSError as error:
            raise _AppGone from error

    def fatal(error: TailraceError) -> int:
        with contextlib.suppress(_AppGone):
            send(Fatal(error.row.label, error.message))
        return error.row.exit_code

    try:
        spec = _first_spec(inbox)
        started = _start(spec, inbox, send)
        loop = EngineLoop(
            send=send,
            inbox=inbox,
            cutter=cutter,
            scheduler=started.scheduler,
            executor=started.executor,
            step_log_max=spec.step_log_max,
        )
        loop.run()
        if inbox.fault is not None:
            return fatal(EngineFailed(inbox.fault))
    except _AppGone:
        return 0 if inbox.fault is None else fatal(EngineFailed(inbox.fault))
    except TailraceError as error:
        return fatal(error)
    except Exception as error:
        traceback.print_exc()
        return fatal(EngineFailed(f"the engine stopped on an internal error, {type(error).__name__}: {error}"))
    return 0


def _first_spec(inbox: Inbox) -> EngineSpec:
    commands = inbox.take(None)
    if inbox.closed:
        raise _AppGone
    if not isinstance(commands[0], Start) or len(commands) > 1:
        raise StartFailed(f"the first frame must be the start alone, not {type(commands[0]).__name__}")
    return commands[0].spec


def _start(spec: EngineSpec, inbox: Inbox, send: Callable[[FromEngine], None]) -> StartedEngine:
    """Loads all and says so. Raises _AppGone between phases, TailraceError when it cannot start."""

    def progress(phase: str, message: str) -> None:
        if inbox.closed:
            raise _AppGone
        send(Progress(phase, message))

    try:
        started = start_engine(spec, progress)
    except (TailraceError, _AppGone):
        raise
    except Exception as error:
        traceback.print_exc()
        raise StartFailed(f"the engine could not start, {type(error).__name__}: {error}") from error
    # What start-up made stays for good: keep it out of every collection, and collect only at rest (see EngineLoop).
    gc.collect()
    gc.freeze()
    gc.disable()
    send(started.ready)
    return started


if __name__ == "__main__":
    main()

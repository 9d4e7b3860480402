"""Launch to first token: `tailrace serve` of a converted model, from process start to the first streamed content."""

import http.client
import json
import subprocess
import time

from common import arguments, report, say, summary, target
from engines import prepared_model
from servers import TAILRACE, free_port, wait_ready

BODY = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "Say hello."}],
    "max_tokens": 4,
    "temperature": 0,
    "stream": True,
}


def first_token_s(model: str, port: int) -> dict[str, float]:
    """Seconds from the start of the process to: port ready, first content chunk. Ends the process it started."""
    command = [TAILRACE, "serve", model, "--port", str(port)]
    command += ["--served-model-name", BODY["model"]]  # type: ignore[list-item]
    started = time.monotonic()
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    try:
        wait_ready(port, server)
        ready = time.monotonic() - started
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", "/v1/chat/completions", json.dumps(BODY), {"Content-Type": "application/json"})
        response = connection.getresponse()
        for line in response:
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                break
        else:
            raise RuntimeError("the stream ended without a token")
        first = time.monotonic() - started
        connection.close()
    finally:
        server.terminate()
        server.wait(timeout=60)
    return {"ready_s": ready, "first_token_s": first}


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    rounds = 1 if options.quick else 7
    prepared_model(options.model)  # converts before timing starts
    runs = []
    for _ in range(rounds):
        runs.append(first_token_s(options.model, free_port()))
        say(str(runs[-1]))
    first = summary([run["first_token_s"] for run in runs])
    report(
        "launch",
        parameters={"model": options.model, "rounds": rounds},
        results={"first_token_s": first, "ready_s": summary([run["ready_s"] for run in runs])},
        targets=[target("launch to first token, median, s", first["p50"], at_most=6.0)],
    )


if __name__ == "__main__":
    main()

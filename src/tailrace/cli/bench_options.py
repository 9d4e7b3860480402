"""Options of the verbs that measure, and how their text becomes values."""

from typing import Any

import msgspec
import typer

URL: Any = typer.Argument(metavar="URL", help="An OpenAI-compatible address (http://host:port).")
WORKLOAD: Any = typer.Option(
    "chat", "--workload", "-w", metavar="NAME|FILE", help="A packaged workload, or a TOML file.  [default: chat]",
    show_default=False,
)  # fmt: skip
SLO: Any = typer.Option(None, "--slo", metavar="LIMITS", help="Such as 'ttft_ms_p99<=500, tpot_ms_p99<=60'.")
WARMUP: Any = typer.Option(5.0, "--warmup", metavar="SECONDS", min=0.0, help="Load before the window, not reported.")
SEED: Any = typer.Option(
    0, "--seed", min=0, max=2**53, help="Same seed, same schedule and lengths; the text is always new."
)
SENDERS: Any = typer.Option(
    "auto", "--senders", metavar="auto|N", help="Client processes; auto takes as many as the schedule needs."
)
TIMEOUT: Any = typer.Option(600.0, "--timeout", metavar="SECONDS", min=0.1, help="A request's limit, from its arrival.")
IN_FLIGHT: Any = typer.Option(
    4096, "--max-in-flight", min=1, help="Requests at once; one that waits for a place goes on counting its latency."
)
API: Any = typer.Option("chat", "--api", metavar="chat|completions", help="Which endpoint.")
MODEL: Any = typer.Option(None, "--model", help="The model's name there.  [default: the first that is listed]")
API_KEY: Any = typer.Option(None, "--api-key", help="The key sent as bearer token; it is written nowhere.")
HEADER: Any = typer.Option(None, "--header", "-H", metavar="NAME:VALUE", help="Sent with each request; repeat it.")
IGNORE_EOS: Any = typer.Option(
    True, "--ignore-eos/--no-ignore-eos", help="Ask for answers as long as the workload says (vLLM's field)."
)
CHUNK_USAGE: Any = typer.Option(
    False, "--chunk-usage", help="Ask for usage in every chunk (tailrace, vLLM): exact tokens a chunk."
)
TOKENIZER: Any = typer.Option(
    None,
    "--tokenizer",
    metavar="PATH|NAME|endpoint",
    help="Count the output again after the run: a tokenizer.json, a model, or the endpoint's /tokenize.",
)
EXTRA_BODY: Any = typer.Option(None, "--extra-body", metavar="JSON", help="Fields added to each request.")
NO_CALIBRATE: Any = typer.Option(
    False,
    "--no-calibrate",
    help="Leave the null server out: the client cannot judge itself then, and no limit can be claimed.",
)
HTML: Any = typer.Option(None, "--html", metavar="FILE", help="Write a page that needs no network.")
OUT: Any = typer.Option(None, "--out", metavar="FILE", help="Write the JSON to a file.")
CHECK: Any = typer.Option(False, "--check", help="Exit 1 when a limit does not hold or the run is invalid.")

HEADERS_MAX = 64
NUM_SENDERS_MAX = 256
BODY_CHARS_MAX = 1024 * 1024
OWN_FIELDS = {
    "messages": "the workload makes it",
    "prompt": "the workload makes it",
    "max_tokens": "the workload makes it",
    "stream": "only a stream shows when tokens come",
    "stream_options": "see --chunk-usage",
    "model": "see --model",
}
"""Of a body: with others the run would not be the one that the report describes."""


def parse_senders(text: str) -> int | None:
    """None: auto. Raises ConfigError."""
    from tailrace.errors import ConfigError

    if text == "auto":
        return None
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= NUM_SENDERS_MAX):
        raise ConfigError(f"--senders {text}: write auto or a number from 1 to {NUM_SENDERS_MAX}", param="senders")
    return int(text)


def parse_headers(texts: list[str] | None) -> dict[str, str]:
    """`NAME:VALUE` each. Raises ConfigError that shows the name alone: a value may be a secret."""
    from tailrace.errors import ConfigError

    headers = {}
    for text in texts or []:
        name, colon, value = text.partition(":")
        if not colon or not name.strip():
            raise ConfigError("--header: write NAME:VALUE", param="header")
        headers[name.strip()] = value.strip()
    if len(headers) > HEADERS_MAX:
        raise ConfigError(f"--header: {len(headers)} are more than {HEADERS_MAX}", param="header")
    return headers


def parse_extra_body(text: str | None) -> dict[str, Any]:
    """Raises ConfigError for what is not a JSON object, and for fields that the client sets."""
    from tailrace.errors import ConfigError

    if text is None:
        return {}
    if len(text) > BODY_CHARS_MAX:
        raise ConfigError(f"--extra-body is longer than {BODY_CHARS_MAX:,} characters", param="extra_body")
    try:
        fields = msgspec.json.decode(text.encode(), type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError) as error:
        raise ConfigError(
            f"--extra-body is not a JSON object: {error}; write for example '{{\"top_k\": 1}}'", param="extra_body"
        ) from error
    for name, why in OWN_FIELDS.items():
        if name in fields:
            raise ConfigError(f"--extra-body: leave {name} out: {why}", param="extra_body")
    return fields


def parse_api(text: str) -> str:
    from tailrace.errors import ConfigError

    if text not in ("chat", "completions"):
        raise ConfigError(f"--api {text}: write chat or completions", param="api")
    return text

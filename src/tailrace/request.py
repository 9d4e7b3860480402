"""The values that cross folders: what a caller asked for, and how one answer ends.

A `Request` is what the service accepted, still text. A *sequence* is one choice of it inside an engine, tokens only
(`engine/sequence.py`). Nothing in here knows HTTP, a model or a clock.
"""

import enum
from typing import NewType

import msgspec

RequestId = NewType("RequestId", str)
SequenceId = NewType("SequenceId", int)
"""One choice of one request inside an engine; given out by the worker app, never used twice by it."""
StepId = NewType("StepId", int)


class FinishReason(enum.StrEnum):
    """Why a sequence ended. The first two are a caller's normal end; the others carry an error label."""

    STOP = "stop"
    """An end token, a stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens` or the context was reached."""
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn and when drawing ends. Checked by `wire.openai`; engine code trusts it.

    Order of application: logit bias, penalties, (greedy when `temperature == 0`), temperature, top-k, top-p, min-p.
    """

    max_tokens: int
    """New tokens at most, >= 1, already cut to what the context leaves."""
    min_tokens: int = 0
    """End and stop tokens are masked until this many tokens were drawn."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    seed: int = 0
    """64 bits. Draws are keyed by (seed, choice, position, purpose), never by the batch."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """OpenAI's two count output tokens; this one (Hugging Face's, as in vLLM) counts prompt and output."""
    logit_bias: dict[int, float] = {}
    num_logprobs: int | None = None
    """Alternatives reported beside each drawn token; 0 reports the drawn token alone; None reports nothing."""
    num_prompt_logprobs: int | None = None
    """The same for each prompt token but the first."""
    stop_token_ids: tuple[int, ...] = ()
    """Besides the model's own end tokens."""
    ignore_eos: bool = False

    @property
    def needs_history(self) -> bool:
        """Whether a draw depends on the tokens before it otherwise than through the model."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's generation config says; None where it says nothing. A request's own field wins."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: str
    name: str | None = None


class ChatPrompt(msgspec.Struct, frozen=True, tag="chat"):
    """Messages that the worker turns into text with the model's chat template."""

    messages: tuple[Message, ...]
    add_generation_prompt: bool = True


class TextPrompt(msgspec.Struct, frozen=True, tag="text"):
    text: str


class TokenPrompt(msgspec.Struct, frozen=True, tag="tokens"):
    token_ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One accepted API call. It ends when its last choice ends, exactly once.

    Choice `i` is choice `i % num_choices` of prompt `i // num_choices`: chat has one prompt, completions may have many.
    """

    request_id: RequestId
    model: str
    arrival_ns: int
    """Monotonic clock of this host; never compared with another host's."""
    prompts: tuple[Prompt, ...]
    num_choices: int = 1
    sampling: SamplingParams
    """`max_tokens` as asked (`max_tokens_asked`) is cut to the context when the prompt's length is known."""
    max_tokens_asked: int | None = None
    """None: what is left of the context."""
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    chunk_usage: bool = False
    """Every chunk of the stream carries the usage of its choice so far."""
    echo: bool = False
    priority: int = 0
    """As in vLLM: lower runs first."""
    deadline_ns: int | None = None
    cache_salt: str = ""
    """Prefix-cache blocks are shared only between requests of equal salt."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithm of a token's probability at its position."""

    token_id: int
    logprob: float


class PositionLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The token at one position with its probability, and the most probable ones there, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()

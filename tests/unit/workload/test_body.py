import json
from typing import Any

import pytest
from plan_sources import drawn

from tailrace.errors import InvalidRequest
from tailrace.workload.body import BodyWriter, num_prompt_tokens_asked
from tailrace.workload.job import BodyOptions, Endpoint, Realisation
from tailrace.workload.plan import PlannedSession, PlannedTurn, Segment
from tailrace.workload.prompts import segment_text
from tailrace.workload.words import WORDS

PLAIN = Realisation(words=WORDS)
SESSION = PlannedSession(
    session_id="r-0",
    scheduled_ns=0,
    turns=(
        PlannedTurn(
            request_id="r-0-0",
            system=(Segment("s", 40),),
            user=(Segment("g", 20), Segment("u0", 30)),
            num_output_tokens=7,
        ),
        PlannedTurn(request_id="r-0-1", user=(Segment("u1", 12),), num_output_tokens=9),
    ),
)


def body(
    turn_index: int = 0,
    answers: tuple[str, ...] = (),
    api: str = "chat",
    realisation: Realisation = PLAIN,
    **options: Any,
) -> dict[str, Any]:
    endpoint = Endpoint(base_url="http://127.0.0.1:1", model="m", api=api)
    written = BodyWriter(endpoint, realisation, BodyOptions(**options)).body(SESSION, turn_index, answers)
    found: dict[str, Any] = json.loads(written)
    return found


def text(*segments: tuple[str, int]) -> str:
    return " ".join(segment_text(key, num_tokens, PLAIN) for key, num_tokens in segments)


def test_a_chat_body_asks_for_a_stream_with_usage_and_the_planned_length() -> None:
    assert body() == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "messages": [
            {"role": "system", "content": text(("s", 40))},
            {"role": "user", "content": text(("g", 20), ("u0", 30))},
        ],
        "max_tokens": 7,
    }


def test_a_later_turn_repeats_the_history_with_the_endpoints_own_answers() -> None:
    asked = body(1, ('an "answer"\n…',))
    assert asked["max_tokens"] == 9
    assert asked["messages"] == [
        {"role": "system", "content": text(("s", 40))},
        {"role": "user", "content": text(("g", 20), ("u0", 30))},
        {"role": "assistant", "content": 'an "answer"\n…'},
        {"role": "user", "content": text(("u1", 12))},
    ]


def test_a_later_turn_begins_with_the_bytes_of_the_turn_before() -> None:
    realisation = Realisation(words=WORDS, overhead_tokens=11)
    assert body(1, ("a",), realisation=realisation)["messages"][:2] == body(realisation=realisation)["messages"]


def test_completions_get_the_conversation_as_one_text() -> None:
    asked = body(1, ("an answer",), api="completions")
    assert "messages" not in asked
    assert asked["prompt"] == " ".join([text(("s", 40), ("g", 20), ("u0", 30)), "an answer", text(("u1", 12))])


def test_the_templates_tokens_come_off_the_first_turns_own_text() -> None:
    asked = body(1, ("a",), realisation=Realisation(words=WORDS, overhead_tokens=11))
    assert [message["content"].count(" ") + 1 for message in asked["messages"]] == [40, 20 + 19, 1, 12]


def test_options_become_fields_and_what_the_user_adds_wins() -> None:
    asked = body(
        ignore_eos=False,
        chunk_usage=True,
        sampling={"temperature": 0.0, "top_p": 0.9},
        extra={"temperature": 1.0, "priority": 3},
    )
    assert "ignore_eos" not in asked
    assert asked["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert (asked["temperature"], asked["top_p"], asked["priority"]) == (1.0, 0.9, 3)


def test_an_unknown_api_is_refused_at_once() -> None:
    with pytest.raises(InvalidRequest, match="api 'responses' must be one of chat, completions"):
        BodyWriter(Endpoint(base_url="http://x", model="m", api="responses"), PLAIN, BodyOptions())


def test_what_was_asked_for_counts_history_and_answers() -> None:
    assert num_prompt_tokens_asked(SESSION, 0, ()) == 90
    assert num_prompt_tokens_asked(SESSION, 1, (7,)) == 90 + 7 + 12
    assert num_prompt_tokens_asked(SESSION, 0, (7, 9)) == 90, "only answers before the turn"


def test_prompts_of_one_run_begin_apart_and_those_of_two_runs_too() -> None:
    endpoint = Endpoint(base_url="http://x", model="m")
    writer = BodyWriter(endpoint, PLAIN, BodyOptions())
    starts = set()
    for run_id in ("a", "b"):
        plan = drawn(run_id=run_id)
        for index in range(500):
            content = json.loads(writer.body(plan.session(index), 0, ()))["messages"][0]["content"]
            starts.add(tuple(content.split()[:8]))
    assert len(starts) == 1_000

"""A few requests before the schedule that cover the shapes of its prompts: what an engine compiles or captures at first
sight is not part of a warm run. They are in no row, and their text is not the run's."""

import msgspec

from tailrace.errors import ClientFailed
from tailrace.workload.body import BodyWriter
from tailrace.workload.draw import draw_plan
from tailrace.workload.job import BodyOptions, Endpoint, PlanSource, Realisation
from tailrace.workload.plan import Plan, PlannedSession
from tailrace.workload.run.endpoint import ask

SESSIONS_LOOKED_AT = 256
OUTPUT_TOKENS = 8
LIMIT_S = 300.0


async def warm_up(
    source: PlanSource, endpoint: Endpoint, realisation: Realisation, options: BodyOptions, timeout_s: float
) -> list[str]:
    """Notes for the report. The first shape that fails is the last one asked: it will fail in the run too."""
    plan = draw_plan(msgspec.structs.replace(source, run_id=f"{source.run_id}-warm-up"))
    writer = BodyWriter(endpoint, realisation, options)
    path = "/v1/chat/completions" if endpoint.api == "chat" else "/v1/completions"
    for session in shapes(plan):
        try:
            await ask(endpoint, "POST", path, writer.body(session, 0, ()), min(timeout_s, LIMIT_S))
        except ClientFailed as error:
            asked = session.turns[0].num_prompt_tokens
            return [f"a warm-up request of {asked:,} prompt tokens failed: {error.message}"]
    return []


def shapes(plan: Plan) -> list[PlannedSession]:
    """First turns with the longest and with the median prompt, short answers; longest first."""
    num = SESSIONS_LOOKED_AT if plan.num_sessions is None else min(plan.num_sessions, SESSIONS_LOOKED_AT)
    drawn = sorted((plan.session(index) for index in range(num)), key=lambda s: s.turns[0].num_prompt_tokens)
    chosen = [drawn[-1], drawn[len(drawn) // 2]] if drawn else []
    distinct = {session.session_id: session for session in chosen}
    return [_shortened(session) for session in distinct.values()]


def _shortened(session: PlannedSession) -> PlannedSession:
    first = session.turns[0]
    turn = msgspec.structs.replace(first, num_output_tokens=min(first.num_output_tokens, OUTPUT_TOKENS))
    return msgspec.structs.replace(session, turns=(turn,))

"""The README's measured figures, from `benchmarks/results/*.json`: nobody types them."""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"

Result = dict[str, Any]


def with_measured(readme: str, results_dir: Path = RESULTS) -> str:
    """The README with the text between its two marks made anew."""
    head, rest = readme.split(BEGIN, 1)
    tail = rest.split(END, 1)[1]
    return f"{head}{BEGIN}\n{measured_text(load_results(results_dir))}\n{END}{tail}"


def load_results(results_dir: Path = RESULTS) -> dict[str, Result]:
    """By benchmark name."""
    loaded = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results_dir.glob("*.json"))]
    return {each["benchmark"]: each for each in loaded}


def peers_of(results: dict[str, Result]) -> dict[str, Result]:
    """The rows measured against other engines."""
    return {name: result for name, result in results.items() if name.startswith("peers_")}


def measured_text(results: dict[str, Result]) -> str:
    if not results:
        return "Nothing measured yet."
    parts = [_where(results), _targets(results)]
    parts += [
        make(results[name])
        for name, make in (("decode_step", _decode), ("mixed_prefill", _mixed), ("batching", _batching))
        if name in results
    ]
    peers = peers_of(results)
    return "\n\n".join([*parts, *([_peers(peers)] if peers else [])])


def _where(results: dict[str, Result]) -> str:
    newest = max(results.values(), key=lambda each: str(each["measured_at"]))
    machine, packages = newest["machine"], newest["packages"]
    return (
        f"Machine: {machine['num_cores']} cores of {machine['cpu']} (family/model {machine['cpu_family_model']}, "
        f"{', '.join(machine['isa'])}), {machine['memory_bytes'] / 2**30:.0f} GiB, a shared virtual machine. "
        f"Model: SmolLM2-135M-Instruct (`smollm2`), int8 weights, f16 KV. OpenVINO {packages['openvino']}, "
        f"Python {machine['python']}, {newest['measured_at'][:10]}. Each row is one run of "
        "`python benchmarks/bench_NAME.py` (`make bench` runs them all); the JSON is in `benchmarks/results/`."
    )


def _targets(results: dict[str, Result]) -> str:
    rows = ["| benchmark | figure | measured | target | met |", "|---|---|---|---|---|"]
    for name, result in results.items():
        rows += [
            f"| {name} | {each['name']} | {each['value']:.3g} | {_limit(each)} | {'yes' if each['met'] else '**no**'} |"
            for each in result["targets"]
        ]
    return "\n".join(rows)


def _limit(target: Result) -> str:
    sign, limit = ("≤", target["at_most"]) if target["at_least"] is None else ("≥", target["at_least"])
    return f"{sign} {limit:g}"


def _decode(result: Result) -> str:
    rows = [
        f"| {each['sequences']} | {each['prefix']} "
        f"| {each['ours_tokens_per_s']:.0f} | {each['theirs_tokens_per_s']:.0f} |"
        for each in result["results"]
    ]
    title = "Decode tokens/s at context 1,024, ours and OpenVINO GenAI's ContinuousBatchingPipeline, taking turns:"
    return "\n".join([title, "", "| sequences | prefix | tailrace | GenAI |", "|---|---|---|---|", *rows])


def _mixed(result: Result) -> str:
    rows = [
        f"| {_target_text(each['itl_target_ms'])} | {each['gap_ms_before']['p50']:.0f} "
        f"| {each['gap_ms_during_prefill']['p50']:.0f} | {each['gap_ms_during_prefill']['p99']:.0f} "
        f"| {each['long_prompt_ttft_ms']['p50'] / 1000:.1f} |"
        for each in result["results"]
    ]
    head = (
        "| `--itl-target-ms` | gap before, p50 ms | gap during prefill, p50 ms | p99 ms | TTFT of the long prompt, s |"
    )
    title = "Eight streams decode while a prompt of 4,000 tokens arrives:"
    return "\n".join([title, "", head, "|---|---|---|---|---|", *rows])


def _target_text(target_ms: float | None) -> str:
    return "none" if target_ms is None else f"{target_ms:g}"


def _batching(result: Result) -> str:
    medians, parameters = result["results"]["median_output_tokens_per_s"], result["parameters"]
    return (
        f"{parameters['requests']} requests of mixed lengths at once, {parameters['sequences_max']} at a time: "
        f"{medians['static']:.0f} output tokens/s with static batching, {medians['continuous']:.0f} with continuous "
        f"(median of {parameters['rounds']} runs each, in turns)."
    )


def _peers(results: dict[str, Result]) -> str:
    """One line a row, one column an engine: the median, and the spread over rounds where there were several."""
    engines = list(dict.fromkeys(name for result in results.values() for name in result["results"]))
    rows = [
        f"| {result['parameters']['row']} | {_figure(result['parameters'])} | "
        + " | ".join(_cell(result["results"].get(engine)) for engine in engines)
        + " |"
        for result in results.values()
    ]
    title = (
        "The same weights served by each engine through HTTP, in turns, measured with `tailrace bench` "
        "(`make peers bench-peers`): median, and lowest to highest of the rounds:"
    )
    head = f"| workload | figure | {' | '.join(engines)} |"
    plot = "![Each engine's share of the best, row by row](docs/peers.svg)"
    return "\n".join([title, "", head, "|" + "---|" * (len(engines) + 2), *rows, "", plot])


def _figure(parameters: Result) -> str:
    return f"{parameters.get('figure', 'highest rate' if 'slo' in parameters else 'time')}, {parameters['unit']}"


def _cell(result: Result | None) -> str:
    if result is None or result["median"] is None:
        return "-"
    spread = f" ({result['lowest']:.4g} to {result['highest']:.4g})" if len(result.get("rounds", ())) > 1 else ""
    return f"{result['median']:.4g}{spread}"

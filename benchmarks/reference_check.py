"""Our logits against transformers on the dequantised source weights: 20 prompts, KL by position and greedy agreement.

Needs torch and transformers (`make reference` installs them). The source GGUF goes through transformers' own reader and
dequantiser, so nothing of our conversion is in the reference. Ours is what serves: prepared weights, production KV.
"""

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from common import arguments, report, say, summary, target
from engines import prepared_model, production_kv_dtype
from tailrace.model.paged import PagedModel, Piece, load_paged, pack_step
from tailrace.model.source import find_model
from tailrace.model.text import TextModel

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

GREEDY_TOKENS = 32
PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea,",
    "The three laws of thermodynamics are",
    "To make a good cup of tea, first",
    "SELECT name, age FROM users WHERE",
    "In 1969, the first man on the moon",
    "The difference between a list and a tuple in Python is",
    "Photosynthesis is the process by which",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 1, 2, 3, 5, 8, 13,",
    "A queue is fair when",
    "The quick brown fox jumps over",
    "import numpy as np\n\nx = np.",
    "My favourite season is autumn because",
    "The largest planet in the solar system is",
    "Bonjour, je m'appelle",
    "Breaking news: scientists have discovered",
    "If a train leaves the station at 9 am travelling at 60 km/h,",
)


def log_softmax(logits: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def kl(reference: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """KL(reference || other) in nats, one value a row, of log-probabilities [rows, vocabulary]."""
    return (np.exp(reference) * (reference - other)).sum(axis=-1)


def our_logits(model: PagedModel, token_ids: list[int]) -> npt.NDArray[np.float64]:
    """Log-probabilities of every row: the first half prefilled in one step, the second decoded from the cache."""
    half = max(len(token_ids) // 2, 1)
    table = list(range(-(-len(token_ids) // 32)))
    rows = [log_softmax(model.step(pack_step([Piece(token_ids[:half], 0, table)], range(half))))]
    for i in range(half, len(token_ids)):
        rows.append(log_softmax(model.step(pack_step([Piece([token_ids[i]], i, table)], [0]))))
    return np.concatenate(rows)


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    options = arguments(__doc__.splitlines()[0])
    prompts = PROMPTS[:2] if options.quick else PROMPTS
    prepared = prepared_model(options.model)
    source = Path(find_model(options.model).path)
    text = TextModel.load(prepared.directory)
    reference = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32, local_files_only=True
    )
    ours = load_paged(prepared.directory / "openvino_model.xml", kv_dtype=production_kv_dtype())
    ours.allocate(16)
    divergences: list[float] = []
    agreements: list[int] = []
    same_argmax: list[float] = []
    for prompt in prompts:
        token_ids = text.encode(prompt, special=True)
        with torch.no_grad():
            generated = reference.generate(
                torch.tensor([token_ids]), max_new_tokens=GREEDY_TOKENS, do_sample=False, pad_token_id=0
            )[0].tolist()
            theirs = log_softmax(reference(torch.tensor([generated])).logits[0].numpy())
        mine = our_logits(ours, generated)
        divergences += kl(theirs, mine).tolist()
        same = mine.argmax(-1)[len(token_ids) - 1 : -1] == np.array(generated[len(token_ids) :])
        same_argmax += same.tolist()
        agreements.append(len(same) if same.all() else int(np.argmin(same)))
        say(f"{prompt!r}: mean KL {np.mean(divergences[-len(generated) :]):.2e}, {agreements[-1]} greedy tokens agree")
    mean_kl = float(np.mean(divergences))
    limit = 2e-2 if prepared.manifest.weights_format == "int8" else 1e-3
    report(
        "reference_check",
        parameters={"model": options.model, "weights": prepared.manifest.weights_format, "prompts": len(prompts)},
        results={
            "kl_nats": summary(divergences),
            "greedy_prefix_tokens": summary(agreements),
            "argmax_agreement_ratio": float(np.mean(same_argmax)),
            "greedy_tokens_asked": GREEDY_TOKENS,
        },
        targets=[target("mean KL, transformers f32 against served, nats", mean_kl, at_most=limit)],
    )


if __name__ == "__main__":
    main()

"""Tokens for a language model: documents → tokens → de-duplication → packed rows → a weighted mixture.

    python examples/guides/tokens_for_language_models.py

The same commands, for real data:

    shardkit build 'web/*.jsonl.zst' s3://data/web --format arrow \\
        --tokenizer tokenizer.json --unique tokens --pack tokens=8192

What to know:

* ``--unique tokens`` drops documents with equal tokens (by SHA-256) and keeps the first in the source. Remove
  near-duplicates before this step.
* ``--tokenizer`` computes ``tokens`` from the text field in the build's processes. The recipe contains the tokenizer's
  digest, so a dataset names its tokenizer, and another tokenizer makes another dataset. Each document ends with the
  tokenizer's own end-of-document token, which the report names; ``--eos TOKEN`` selects another one.
* ``--pack tokens=N`` packs documents of one stratum into rows of N tokens (best fit; a long document is cut). It stores
  the start of each document in ``boundaries``, for attention that stays inside a document.
* Mixing is not a build step: datasets stay separate and are opened together. ``weights=`` sets the exact share of each
  in a batch, and may change at a step (``stages=``) without repeating any row early.
* ``ds.plan(sequence=…)`` groups whole rows into longer sequences, so a context length can grow without a new build.
"""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import shardkit as sk
from guide_shell import shardkit, workplace

LENGTH = 64


def make_documents() -> None:
    """Write two sources of JSON lines; every tenth document of "web" is a copy of an earlier document."""
    draw = random.Random(0)
    words = [
        "lane",
        "step",
        "cell",
        "shard",
        "block",
        "grid",
        "plan",
        "run",
        "rank",
        "node",
        "the",
        "of",
        "and",
        "a",
    ]
    for source, count in (("web", 600), ("code", 200)):
        Path(source).mkdir()
        texts: list[str] = []
        for number in range(count):
            copied = source == "web" and number % 10 == 9
            text = texts[number // 2] if copied else " ".join(draw.choices(words, k=draw.randrange(5, 120)))
            texts.append(text)
        lines = [
            json.dumps({"text": text, "url": f"https://{source}.example/{n}"}) for n, text in enumerate(texts)
        ]
        Path(source, "part-0.jsonl").write_text("\n".join(lines) + "\n")


def make_tokenizer() -> None:
    """Train a byte-pair tokenizer of 300 entries on "web"; for real data, use an existing file."""
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["[UNK]", "<|endoftext|>"], show_progress=False
    )
    texts = [json.loads(line)["text"] for line in Path("web/part-0.jsonl").read_text().splitlines()]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save("tokenizer.json")


def main() -> None:
    with workplace(__doc__), contextlib.ExitStack() as stack:
        make_documents()
        make_tokenizer()
        for source in ("web", "code"):
            shardkit(
                "build", source, f"data/{source}", "--tokenizer", "tokenizer.json", "--unique", "tokens",
                "--pack", f"tokens={LENGTH}", "--format", "arrow", "--jobs", 1,
            )  # fmt: skip

        # Three rows of web to one of code, independent of their sizes; equal shares from step 40 on.
        dataset = sk.open({"web": "data/web", "code": "data/code"})
        plan = dataset.plan(
            global_batch=16, lanes=4, seed=0,
            stages=[(0, {"web*": 3, "code*": 1}), (40, {"web*": 1, "code*": 1})], epoch_steps=60,
        )  # fmt: skip
        print("strata:", dict(dataset.strata), "· plan", plan.digest[:12])
        loader = stack.enter_context(dataset.loader(plan, tensors=False))
        web_rows = dataset.strata[next(name for name in dataset.strata if name.startswith("web"))]
        shares: dict[bool, list[float]] = {False: [], True: []}
        for batch in loader:
            assert batch["tokens"].shape == (16, LENGTH)
            shares[batch.step >= 40].append(float((batch["samples"] < web_rows).mean()))
        print(f"share of web: {np.mean(shares[False]):.3f} before step 40, {np.mean(shares[True]):.3f} after")

        # Documents of a row: neither attention nor the loss may cross their boundaries.
        values, offsets = batch["boundaries"]
        row = int(np.argmax(np.diff(offsets)))
        borders = values[offsets[row] : offsets[row + 1]]
        document = np.searchsorted(borders, np.arange(LENGTH), side="right")
        mask = (document[:, None] == document[None, :]) & np.tri(LENGTH, dtype=bool)
        print(
            f"a row of {len(borders) - 1} documents: its attention mask has {mask.sum()} of {LENGTH**2} entries"
        )


if __name__ == "__main__":
    main()

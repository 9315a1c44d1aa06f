"""Tokens for a language model: documents → de-duplicated → tokenised → packed rows → a weighted mixture.

    python examples/guides/tokens_for_language_models.py

The same commands, for real data:

    shardkit build 'web/*.jsonl.zst' s3://data/web --format arrow \\
        --tokenizer tokenizer.json --unique tokens --pack tokens=8192

What to know:

* ``--unique tokens`` drops documents whose tokens are equal, by SHA-256; the first in the source stays.
  Near-duplicates are a step before this one.
* ``--tokenizer`` makes ``tokens`` of the text field in the build's processes; the tokenizer's digest is in the
  recipe, so a dataset says which one made it, and another one makes another dataset. Each document ends with the
  tokenizer's own end-of-document token, which the report names; ``--eos TOKEN`` names another one.
* ``--pack tokens=N`` puts documents of one stratum together into rows of N tokens (best fit; a long document is cut),
  and keeps where they begin in ``boundaries``, for attention that stays inside a document.
* Mixing is not a build step: datasets stay apart and are opened together; ``weights=`` says how much of each a batch
  holds, exactly, and may change at a step (``stages=``) without any row coming back early.
* ``ds.plan(sequence=…)`` groups whole rows into longer sequences: a context length can grow without building anew.
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
    """Two sources of JSON lines; every tenth document of the web is a copy of an earlier one."""
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
    """A byte-pair tokenizer of 300 entries, trained on the web part; a real one is a file that you have."""
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

        # Three rows of web to one of code, whatever their sizes; after step 40 half and half.
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

        # Documents of a row: what attention may look at, and what the loss must not predict across.
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

"""Virtual epochs: train k batches, validate, train the next k batches.

    python examples/guides/virtual_epochs.py

What to know:

* A loop that is left early continues in the next loop, at the batch after the last one that was handed out. This holds
  for ``break``, ``itertools.islice``, Lightning's ``limit_train_batches`` and every rank: ranks that take the same
  number of batches stay at the same step.
* ``epoch_steps=k`` makes each loop k batches long without any ``break``. The rows come in the same order as without it.
  Counting passes over the data stays possible: ``plan.steps_per_pass``.
* Validation takes ``restart=True``: each loop begins at the start of its epoch, even if the last one was left early.
* ``loader.epoch`` is the number of the epoch that holds the next batch. A state that was saved after the last batch of
  an epoch begins the next one, so a program that resumes trains ``for epoch in range(loader.epoch, epochs)``.
* ``loader.seek(step)`` moves to any step; steps count over the whole run.
"""

from __future__ import annotations

from itertools import islice

import shardkit as sk
from guide_shell import workplace


def main() -> None:
    with workplace(__doc__):
        with sk.create("data", schema={"x": "int64"}) as writer:
            for number in range(640):
                writer.add({"x": number})
        ds = sk.open("data")
        plan = ds.plan(global_batch=32, lanes=4, epoch_steps=5)  # 20 batches are a pass over the data
        held_out = ds.plan(global_batch=64, lanes=4, shuffle="none")

        seen: list[int] = []
        state: dict[str, object] = {}
        with ds.loader(held_out, tensors=False, restart=True) as validation:
            for _ in range(2):  # the program is started twice
                with ds.loader(plan, tensors=False) as loader:
                    if state:
                        loader.load_state_dict(state)
                    for epoch in range(loader.epoch, 4):
                        for batch in loader:
                            seen += batch["x"].tolist()
                        first = [batch.step for batch in islice(validation, 3)]
                        print(f"epoch {epoch}: trained to step {batch.step}, validated on steps {first}")
                        state = loader.state_dict()
                        if epoch == 1:
                            break  # stopped here, and resumed below
        print(f"{len(seen)} rows, {len(set(seen))} of them different")


if __name__ == "__main__":
    main()

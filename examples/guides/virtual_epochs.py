"""Virtual epochs: train k batches, validate, train the next k batches.

    python examples/guides/virtual_epochs.py

What to know:

* If a loop ends early, the next loop continues at the batch after the last one that was handed out. This holds for
  ``break``, ``itertools.islice`` and Lightning's ``limit_train_batches``. Ranks that take the same number of batches
  stay at the same step.
* ``epoch_steps=k`` makes each loop k batches long without a ``break``. The order of the rows is the same.
  ``plan.steps_per_pass`` still gives the length of a pass over the data.
* Validation uses ``restart=True``: each loop begins at the start of its epoch, even if the last loop ended early.
* ``loader.epoch`` is the number of the epoch of the next batch. A state saved after the last batch of an epoch begins
  the next epoch, so a resumed program trains ``for epoch in range(loader.epoch, epochs)``.
* ``loader.seek(step)`` moves to any step; steps are counted over the whole run.
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

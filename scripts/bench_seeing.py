# SPDX-License-Identifier: Apache-2.0
"""What seeing costs: `python scripts/bench_seeing.py`. Five minutes on two CPU cores.

One training of SmolLM2-135M-Instruct (float32, LoRA on all linear layers, random completions in place of an engine), whose
steps take turns: everything off; metrics, alerts, panel, TensorBoard (scalars and histograms) and the report's logs on; the
same with a record written in that very step. A step is from one begin to the next, logging included; ratios are of
neighboring steps, the median is printed. So is the time inside metrics, records and logging, less that of logging with
everything off: it is far below what a step varies by. The panel draws to a terminal that nobody looks at.
"""

import contextlib
import os
import pty
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
TURNS = ("off", "on", "on, recording")


@contextlib.contextmanager
def terminal():
    """Within the block, stderr is a terminal, and stdout nowhere."""
    ours, theirs = pty.openpty()

    def drain():
        with contextlib.suppress(OSError):
            while os.read(ours, 65536):
                pass

    threading.Thread(target=drain, daemon=True).start()
    with os.fdopen(theirs, "w") as screen, open(os.devnull, "w") as nowhere:
        with contextlib.redirect_stderr(screen), contextlib.redirect_stdout(nowhere):
            yield


def switched(trainer, seeing):
    """A callback that gives every step its turn, and keeps how long it took."""
    from transformers import TrainerCallback

    from tests import inside

    def timed(function):
        def call(*args, **kwargs):
            began = time.perf_counter()
            output = function(*args, **kwargs)
            switch.inside += time.perf_counter() - began
            return output

        return call

    def timed_or(nothing):
        """A wrapper: what it wraps is timed, and replaced by `nothing` while everything is off."""

        def wrapper(function):
            on = timed(function)
            return lambda *args, **kwargs: (nothing if switch.turn == "off" else on)(*args, **kwargs)

        return wrapper

    recorder = inside.recorder(trainer)
    inside.wrap_measure(trainer, timed_or(lambda *_, **__: {}))
    inside.wrap_merge(trainer, timed_or(lambda stats: stats))
    trainer.log = timed(trainer.log)
    quiet = [c for c in trainer.callback_handler.callbacks if c not in seeing]

    class Switch(TrainerCallback):
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in TURNS}
        began = turn = None
        inside = 0.0

        def on_step_begin(self, args, state, control, **kwargs):
            now = time.perf_counter()
            if self.turn is not None:
                self.seconds[self.turn].append((now - self.began, self.inside))
            self.turn = TURNS[state.global_step % len(TURNS)]
            off = self.turn == "off"
            inside.set_recorder(trainer, None if off else recorder, writes=self.turn == "on, recording")
            trainer.callback_handler.callbacks = [*quiet, self, *([] if off else seeing)]
            self.began, self.inside = time.perf_counter(), 0.0

    switch = Switch()
    return switch


def main() -> None:
    from scripts.bench_step import build, random_generation, step_parser
    from tests import inside

    arguments = step_parser(__doc__, rounds=15).parse_args()
    for name, value in (("HF_HUB_OFFLINE", "1"), ("TOKENIZERS_PARALLELISM", "false"), ("ACCELERATE_USE_CPU", "true")):
        os.environ.setdefault(name, value)

    from transformers.integrations import TensorBoardCallback
    from transformers.utils import logging

    from trl_consistent import MismatchAlertCallback, MismatchPanelCallback

    logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as output, terminal():
        trainer = build(
            "ours", arguments, output, random_generation(arguments.tokens),
            callbacks=[MismatchAlertCallback(actions="record"), MismatchPanelCallback()],
            max_steps=len(TURNS) * (arguments.rounds + 1) + 1, logging_steps=1, disable_tqdm=False,
            report_to="tensorboard", correction=None, vllm_importance_sampling_correction=False,
        )  # fmt: skip
        kinds = (MismatchAlertCallback, MismatchPanelCallback, TensorBoardCallback)
        seeing = [c for c in trainer.callback_handler.callbacks if isinstance(c, kinds)]
        switch = switched(trainer, [*seeing, inside.recorder(trainer)])
        trainer.add_callback(switch)
        trainer.train()
    seconds = {name: values[1:] for name, values in switch.seconds.items()}  # the first ones warm up
    base, logging_alone = (statistics.median(step[part] for step in seconds["off"]) for part in (0, 1))
    print(
        f"{arguments.accumulation} x {arguments.batch} completions of {arguments.tokens} tokens, {arguments.rounds} rounds"
    )
    print(f"off: {base:.3f} s a step")
    shares = {}
    for name in TURNS[1:]:
        ratios = sorted(a[0] / b[0] for a, b in zip(seconds[name], seconds["off"], strict=False))
        quarter = len(ratios) // 4
        middle = f"{ratios[quarter] - 1:+.2%} to {ratios[-1 - quarter] - 1:+.2%}"
        shares[name] = (statistics.median(step[1] for step in seconds[name]) - logging_alone) / base
        print(
            f"{name}: {shares[name]:.2%} inside; whole steps {statistics.median(ratios) - 1:+.2%} (middle half {middle})"
        )
    record = max(shares["on, recording"] - shares["on"], 0.0)
    print(f"a record every 50 steps: {shares['on'] + record / 50:.2%} of a step inside")


if __name__ == "__main__":
    main()

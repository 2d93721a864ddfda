# SPDX-License-Identifier: Apache-2.0
"""A panel in the terminal."""

import functools
import io
import logging
import shutil
import sys
from typing import Any

from tqdm.auto import tqdm

from ..metrics.alerts import Alerts, Thresholds, name_in, replay, value_of
from .guarded import GuardedCallback


logger = logging.getLogger(__name__)


class MismatchPanelCallback(GuardedCallback):
    """
    Keeps a small panel under the progress bar: k3, |d|, ESS, what the correction did, and what is wrong now.

    Only rank 0 shows it, only where the progress bar is on a terminal; elsewhere it does nothing. It is redrawn in place at
    each log; with `log_completions=True`, which prints a table there, it is printed above that table instead. Needs `rich`.

    Args:
        thresholds, window, persistence (*optional*):
            As of [`MismatchAlertCallback`]: what the panel calls an alert.

    Example:

    ```python
    trainer = GRPOTrainer(..., callbacks=[MismatchAlertCallback(), MismatchPanelCallback()])
    ```
    """

    purpose = "the mismatch panel"

    def __init__(
        self,
        *,
        thresholds: Thresholds | None = None,
        window: int = 30,
        persistence: tuple[int, int] = (3, 5),
    ):
        self._new_alerts = functools.partial(Alerts, thresholds=thresholds, window=window, persistence=persistence)
        self._alerts = self._new_alerts()
        self._bars: list[Any] = []
        self._lines: list[str] = []
        self._shows = self._is_live = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._shows = state.is_world_process_zero and not args.disable_tqdm and sys.stderr.isatty()
        self._is_live = not getattr(args, "log_completions", False)
        self._lines = []
        if not self._shows:
            return
        try:
            import rich  # noqa: F401
        except ImportError:
            self._shows = False
            logger.warning("`MismatchPanelCallback` shows nothing, because rich is not installed: `pip install rich`.")
        self._alerts = self._new_alerts()
        replay(state.log_history, self._alerts)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not self._shows or not logs or "learning_rate" not in logs:
            return
        self._alerts.update(state.global_step, logs)
        self._lines = panel(state.global_step, logs, self._alerts, shutil.get_terminal_size().columns - 1)
        if not self._is_live:
            tqdm.write("\n".join(self._lines), file=sys.stderr)
            return
        while len(self._bars) < len(self._lines):  # below the progress bar, which has position 0
            self._bars.append(tqdm(position=len(self._bars) + 1, bar_format="{desc}", leave=False, file=sys.stderr))
        for bar, line in zip(self._bars, self._lines, strict=True):
            bar.set_description_str(line)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        was_live = bool(self._bars)
        self._release()
        if was_live:
            tqdm.write("\n".join(self._lines), file=sys.stderr)  # the last one stays

    def _release(self) -> None:
        while self._bars:
            self._bars.pop().close()


_STYLES = {"warning": "yellow", "critical": "bold red"}
_NUMBERS = (("k3", "mismatch/k3/mean", "{:.2g}"), ("|d|", "mismatch/abs_diff/mean", "{:.4f}"))
_SHARES = (("ESS token", "mismatch/ess/token"), ("sequence", "mismatch/ess/sequence"))


def panel(step: int, logs: dict[str, Any], alerts: Alerts, width: int) -> list[str]:
    """The panel of a log: five lines for a terminal of this width."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    wrong = alerts.open

    def shown(name: str, key: str, form: str) -> Text:
        value = value_of(logs, name_in(logs, key))
        style = _STYLES[wrong[key].severity] if key in wrong else "green" if value is not None else "dim"
        return Text(f"{name} ").append(form.format(value) if value is not None else "–", style)

    gap = Text("   ")
    numbers = [shown(*row) for row in _NUMBERS] + [shown(name, key, "{:.1%}") for name, key in _SHARES]
    acted = [
        f"{verb} {sum(shares):.2%}"
        for verb in ("truncated", "masked", "rejected")
        if (
            shares := [
                x
                for side in ("low", "high")
                if (x := value_of(logs, f"correction/{verb}_fraction/{side}")) is not None
            ]
        )
    ]
    state = gap.join(
        Text(f"{event.severity}: {event.key} since step {event.step}", _STYLES[event.severity])
        for event in sorted(wrong.values(), key=lambda event: event.severity)
    )
    body = [
        gap.join(numbers),
        Text("   ".join(acted) or "no correction in the logs"),
        state or Text("no alerts", "green"),
    ]
    for line in body:
        line.truncate(max(width - 4, 1), overflow="ellipsis")
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    console.print(Panel(Text("\n").join(body), title=f"mismatch, step {step}", title_align="left"))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]

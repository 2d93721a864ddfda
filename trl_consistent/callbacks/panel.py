# SPDX-License-Identifier: Apache-2.0
"""A callback that shows the mismatch in a panel on the terminal."""

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
    Keeps a small panel under the progress bar, with k3, |d|, ESS, what the correction did, and the alerts that are open.

    Rank 0 shows it if its progress bar is on a terminal; otherwise the callback does nothing. The panel is redrawn in place
    at each log. With `log_completions=True`, which prints a table there, it is printed above that table instead. It needs
    `rich`.

    Args:
        thresholds, window, persistence (*optional*):
            What raises an alert, as in [`MismatchAlertCallback`].

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
        self._bars: list[Any] = []  # one for each line of the panel
        self._lines: list[str] = []  # of the last panel
        self._shows = False
        self._redraws = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._shows = state.is_world_process_zero and not args.disable_tqdm and sys.stderr.isatty()
        self._redraws = not getattr(args, "log_completions", False)
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
        if not self._redraws:
            tqdm.write("\n".join(self._lines), file=sys.stderr)
            return
        while len(self._bars) < len(self._lines):  # below the progress bar, which has position 0
            self._bars.append(tqdm(position=len(self._bars) + 1, bar_format="{desc}", leave=False, file=sys.stderr))
        for bar, line in zip(self._bars, self._lines, strict=True):
            bar.set_description_str(line)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        was_shown = bool(self._bars)
        self._release()
        if was_shown:
            tqdm.write("\n".join(self._lines), file=sys.stderr)  # the last panel stays

    def _release(self) -> None:
        while self._bars:
            self._bars.pop().close()


_STYLES = {"warning": "yellow", "critical": "bold red"}
# Name in the panel, key in the logs, and format of each number.
_NUMBERS = (
    ("k3", "mismatch/k3/mean", "{:.2g}"),
    ("|d|", "mismatch/abs_diff/mean", "{:.4f}"),
    ("ESS token", "mismatch/ess/token", "{:.1%}"),
    ("sequence", "mismatch/ess/sequence", "{:.1%}"),
)
_GAP = "   "


def panel(step: int, logs: dict[str, Any], alerts: Alerts, width: int) -> list[str]:
    """The panel of a log: five lines for a terminal of this width."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    body = [_numbers(logs, alerts), Text(_shares(logs) or "no correction in the logs"), _open_alerts(alerts)]
    for line in body:
        line.truncate(max(width - 4, 1), overflow="ellipsis")
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=width)
    console.print(Panel(Text("\n").join(body), title=f"mismatch, step {step}", title_align="left"))
    return output.getvalue().splitlines()


def _numbers(logs: dict[str, Any], alerts: Alerts) -> Any:
    """The key numbers, each in the color of its alert, or green."""
    from rich.text import Text

    found = []
    for name, key, form in _NUMBERS:
        value = value_of(logs, name_in(logs, key))
        style = "dim" if value is None else "green"
        if key in alerts.open:
            style = _STYLES[alerts.open[key].severity]
        found.append(Text(f"{name} ").append("–" if value is None else form.format(value), style))
    return Text(_GAP).join(found)


def _shares(logs: dict[str, Any]) -> str:
    """The share of tokens that each action of the correction touched; empty without a correction."""
    found = []
    for action in ("truncated", "masked", "rejected"):
        sides = [value_of(logs, f"correction/{action}_fraction/{side}") for side in ("low", "high")]
        shares = [share for share in sides if share is not None]
        if shares:
            found.append(f"{action} {sum(shares):.2%}")
    return _GAP.join(found)


def _open_alerts(alerts: Alerts) -> Any:
    """The alerts that are open, critical ones first."""
    from rich.text import Text

    events = sorted(alerts.open.values(), key=lambda event: event.severity)
    if not events:
        return Text("no alerts", "green")
    texts = [f"{event.severity}: {event.key} since step {event.step}" for event in events]
    styled = [Text(text, _STYLES[event.severity]) for text, event in zip(texts, events, strict=True)]
    return Text(_GAP).join(styled)

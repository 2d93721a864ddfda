# SPDX-License-Identifier: Apache-2.0
"""A callback whose errors never stop a training."""

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback


logger = logging.getLogger(__name__)


class GuardedCallback(TrainerCallback):
    """A callback that cannot stop training: when one of its hooks raises, it says so once and does nothing from then on.

    Subclass it and write hooks as usual. A hook that only rank 0 fails in is off on rank 0 only, so what all ranks must do
    alike is not for code that can fail on one of them.
    """

    purpose = "what it does"
    """What is off after a failure, in the words of the message."""
    _is_off = False

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        for name in vars(TrainerCallback).keys() & vars(cls).keys():
            if name.startswith("on_"):
                setattr(cls, name, _guarded(vars(cls)[name]))

    def _release(self) -> None:
        """Undoes what must not outlast a failure."""


def _guarded(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def guarded(self: GuardedCallback, *args: Any, **kwargs: Any) -> Any:
        if self._is_off:
            return None
        try:
            return hook(self, *args, **kwargs)
        except Exception as error:
            self._is_off = True
            with contextlib.suppress(Exception):
                self._release()
            with contextlib.suppress(Exception):
                logger.error(
                    f"`{type(self).__name__}` failed in `{hook.__name__}` with {error!r}. Training goes on; off from now on: "
                    f"{self.purpose}.",
                    exc_info=True,
                )
            return None

    return guarded

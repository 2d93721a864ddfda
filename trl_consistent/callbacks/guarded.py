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
    """A callback that never stops a training. If one of its `on_...` methods fails, it logs the error once and switches itself
    off; training continues.

    Subclass it and write these methods as usual. One that fails on rank 0 alone is off on rank 0 alone, so whatever all
    ranks must do alike does not belong after code that can fail on one of them.
    """

    purpose = "what it does"
    """The noun in the message after a failure: training continues without it."""
    _is_off = False

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        for name in vars(TrainerCallback).keys() & vars(cls).keys():
            if name.startswith("on_"):
                setattr(cls, name, _guarded(vars(cls)[name]))

    def _release(self) -> None:
        """Undoes what must not outlast a failure, such as a changed learning rate."""


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method of a [`GuardedCallback`] with its errors caught; it does nothing once the callback is off."""

    @functools.wraps(method)
    def guarded(self: GuardedCallback, *args: Any, **kwargs: Any) -> Any:
        if self._is_off:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self._is_off = True
            with contextlib.suppress(Exception):
                self._release()
            with contextlib.suppress(Exception):
                logger.error(
                    f"`{type(self).__name__}` failed in `{method.__name__}` with {error!r}. It switches itself off, and training "
                    f"continues without {self.purpose}.",
                    exc_info=True,
                )
            return None

    return guarded

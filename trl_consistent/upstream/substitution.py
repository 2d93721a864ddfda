# SPDX-License-Identifier: Apache-2.0
"""Attributes that are replaced for the time of a block. Nothing is patched at import."""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def substituted(owner: Any, **names: Any) -> Iterator[None]:
    """Sets attributes of a module (or object) for the time of the block; only names that are there."""
    before = {name: getattr(owner, name) for name in names}
    for name, value in names.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)

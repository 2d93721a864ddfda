# SPDX-License-Identifier: Apache-2.0
"""What in a setup makes trainer and engine disagree before a single token is sampled."""

import itertools
import logging
import textwrap
from typing import Any

from .checks import CHECKS, Finding
from .engine import EngineSettings


logger = logging.getLogger(__name__)


def audit(trainer: Any, engine: EngineSettings) -> list[Finding]:
    """Everything in the settings of `trainer` and its engine that makes log-probs disagree.

    Args:
        trainer ([`ConsistentGRPOTrainer`]): Built, but not trained yet.
        engine ([`EngineSettings`]): What its rollout engine says of itself.
    """
    return [finding for check in CHECKS for finding in check(trainer, engine)]


WIDTHS = (20, 38, 42, 34)


def table(findings: list[Finding]) -> str:
    """The findings as text for a terminal, warnings first."""
    rows = [("code", "found", "what it costs", "what removes it")]
    rows += [(f.code, f.found, f.cost, f.remedy) for f in sorted(findings, key=lambda finding: not finding.warns)]
    lines = []
    for row in rows:
        cells = [textwrap.wrap(cell, width) for cell, width in zip(row, WIDTHS, strict=True)]
        for parts in itertools.zip_longest(*cells, fillvalue=""):
            lines.append("  ".join(part.ljust(width) for part, width in zip(parts, WIDTHS, strict=True)).rstrip())
    return "\n".join(lines)


def report(findings: list[Finding], strict: bool) -> None:
    """Prints the findings, or refuses them.

    Raises:
        `ValueError`: `strict`, and one of them is a warning.
    """
    if not findings:
        logger.info("Nothing in the settings makes trainer and engine disagree.")
        return
    message = f"What makes trainer and rollout engine disagree, by their settings:\n{table(findings)}"
    if strict and any(finding.warns for finding in findings):
        raise ValueError(f"`rollout_audit='strict'`. {message}\n`rollout_audit='warn'` trains all the same.")
    logger.log(logging.WARNING if any(finding.warns for finding in findings) else logging.INFO, message)

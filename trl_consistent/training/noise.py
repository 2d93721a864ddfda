# SPDX-License-Identifier: Apache-2.0
"""The engine's noise while training: followed from batch to batch, told to the user where it matters, kept in checkpoints.

The estimate itself is in `correction/calibration.py`.
"""

import json
import logging
from pathlib import Path

from torch import Tensor

from ..correction.calibration import WARM_UP_ROWS, NoiseEstimate, expected_rejection, level_lengths, noise_statistics
from ..correction.rules import Correction
from ..statistics import merge
from .window import Statistics


logger = logging.getLogger(__name__)

PATIENCE = 100
"""Rollout batches after which it is said that bounds could not be calibrated."""
TRL_DEFAULT = Correction("sequence", "mask", None, 3.0)
"""What TRL corrects with unless told otherwise."""
_FILE = "mismatch_noise.json"


class NoiseTracker:
    """Follows the noise where calibrated bounds need it, or until users of TRL's default correction have been told what share
    of their completions it masks.

    Args:
        correction ([`Correction`], *optional*): The one in force.
        explains_default (`bool`): Whether [`TRL_DEFAULT`] is in force because nothing else was asked for.
        tells (`bool`): Whether this process logs.
    """

    def __init__(self, correction: Correction | None, explains_default: bool, tells: bool):
        self.estimate = NoiseEstimate()
        self._calibrates = correction is not None and bool(correction.calibrated_levels)
        self._is_saved = correction is not None and correction.reject_rate is not None
        self._explains_default, self._tells = explains_default, tells
        self._batches = 0
        self._masked: Statistics = {}  # completions so far, and how many of them were outside the bounds
        self._lengths: Tensor | None = None

    def statistics(self, d: Tensor, mask: Tensor) -> Statistics:
        """What there is to learn from a batch, to be merged over ranks and given to [`update`]; empty if nobody asks."""
        if not (self._calibrates or self._explains_default):
            return {}
        self._lengths = level_lengths(d, mask, "sequence")
        return noise_statistics(d, mask)

    def update(self, stats: Statistics) -> None:
        """Learns from the statistics of a rollout batch of the training, those of [`statistics`] among them."""
        self.estimate = self.estimate.update(stats)
        if self._explains_default:
            self._explain_default(stats)
        else:
            self._say_if_not_ready()

    def _explain_default(self, stats: Statistics) -> None:
        counted = {key: stats[key] for key in ("outside_rows", "rows")}
        self._masked = merge([self._masked, counted]) if self._masked else counted
        rows, outside = (int(self._masked[key].value[0]) for key in ("rows", "outside_rows"))
        if not self.estimate.ready or self._lengths is None:
            self._explains_default = rows < 8 * WARM_UP_ROWS  # else completions are too short to tell
            return
        lengths = self._lengths[self._lengths > 0].unsqueeze(1)
        here, longer = (
            expected_rejection(n, self.estimate, None, TRL_DEFAULT.upper, "sequence").mean().item()
            for n in (lengths, lengths * 8)
        )
        masked = outside / rows
        self._explains_default, self._masked, self._lengths = False, {}, None
        if not self._tells:
            return
        logger.log(
            logging.WARNING if max(masked, here, longer) > 0.01 else logging.INFO,
            f"TRL's default correction, `sequence_mask` above a ratio of 3, has masked {masked:.1%} of the first {rows} "
            f"completions. With the measured noise (sigma = {self.estimate.variance.sqrt().item():.2g} nats per token), "
            f"{here:.1%} of healthy completions of these lengths (mean {lengths.float().mean().item():.0f} tokens) are above "
            f"it, and {longer:.1%} of those 8 times as long. `correction='tis'` weighs tokens instead; "
            "`correction_reject_rate=0.01` rejects the same share at every length.",
        )

    def _say_if_not_ready(self) -> None:
        self._batches += 1
        if self._batches == PATIENCE and self._tells and not self.estimate.ready:
            logger.warning(
                f"After {PATIENCE} rollout batches, fewer than {WARM_UP_ROWS} completions had the 8 tokens it takes to "
                "measure the engine's noise, so that `correction_reject_rate` still uses the fixed bounds."
            )

    def save(self, folder: Path) -> None:
        """Writes the estimate into a checkpoint, whole or not at all, where bounds depend on it."""
        if self._is_saved:
            partial = folder / f"{_FILE}.tmp"
            partial.write_text(json.dumps(self.estimate.state_dict()))
            partial.replace(folder / _FILE)

    def load(self, folder: Path) -> None:
        """Goes on from the estimate of a checkpoint, if it holds one."""
        if (path := folder / _FILE).exists():
            self.estimate = NoiseEstimate.from_state(json.loads(path.read_text()))

# SPDX-License-Identifier: Apache-2.0
"""Scatter and slope of a short series of noisy values, by medians, so that single outliers count little."""

import math
from statistics import median


_TREND_Z = 4.0  # standard errors of Mann and Kendall's S


def _scatter(values: list[float]) -> float:
    """Robust standard deviation of the noise, from successive differences: levels and slopes leave it unmoved."""
    # median |x - y| of two normal values is .6745 * sqrt(2) standard deviations
    return median(abs(b - a) for a, b in zip(values, values[1:], strict=False)) / (0.6745 * math.sqrt(2))


def _slope(values: list[float]) -> tuple[float, float]:
    """Slope per log (Theil and Sen: median over all pairs) and its significance (Mann and Kendall), in standard errors."""
    n = len(values)
    pairs = [(values[j] - values[i], j - i) for i in range(n) for j in range(i + 1, n)]
    s = sum((rise > 0) - (rise < 0) for rise, _ in pairs)
    slope = median(rise / run for rise, run in pairs)
    # Var S = n (n - 1) (2 n + 5) / 18 for values in any order. Neighbours that are alike count for less, but not for so
    # little that 25 values in perfect order are below 4 standard errors.
    line = median(value - slope * i for i, value in enumerate(values))
    rest = [value - slope * i - line for i, value in enumerate(values)]
    square = sum(x * x for x in rest)
    alike = sum(x * y for x, y in zip(rest, rest[1:], strict=False)) / square if square else 0.0
    alike = min(max(alike, 0.0), 0.5)
    variance = n * (n - 1) * (2 * n + 5) / 18 * (1 + alike) / (1 - alike)
    return slope, (s - (s > 0) + (s < 0)) / math.sqrt(variance)

# SPDX-License-Identifier: Apache-2.0
"""Measure, correct and explain training-inference mismatch in TRL's GRPO.

Public names load on first use, so that `import trl_consistent` pulls in neither torch nor TRL.
"""

import importlib
from typing import TYPE_CHECKING


__version__ = "0.1.0"

_HOME = {
    "AlertEvent": "metrics.alerts",
    "METRICS": "metrics.catalogue",
    "PRESETS": "correction.presets",
    "ConsistentGRPOConfig": "config",
    "ConsistentGRPOTrainer": "training.trainer",
    "Correction": "correction.rules",
    "CorrectionResult": "correction.weights",
    "Metric": "metrics.catalogue",
    "MismatchAlertCallback": "callbacks.alert",
    "MismatchLRCallback": "callbacks.learning_rate",
    "MismatchRecord": "records.record",
    "MismatchPanelCallback": "callbacks.panel",
    "MismatchReportCallback": "callbacks.report",
    "Rejection": "correction.rules",
    "Stat": "statistics",
    "TrustRegion": "correction.rules",
    "correct": "correction.weights",
    "correction_metrics": "metrics.measure",
    "finalize": "metrics.measure",
    "kl_k1": "correction.kl",
    "kl_k2": "correction.kl",
    "kl_k3": "correction.kl",
    "merge": "statistics",
    "mismatch_log_ratio": "ratios",
    "mismatch_metrics": "metrics.measure",
    "read_records": "records.store",
    "reference_kl": "correction.kl",
    "trust_region_mask": "correction.weights",
    "worst_tokens": "records.tokens",
}

__all__ = list(_HOME)

if TYPE_CHECKING:
    from .callbacks.alert import MismatchAlertCallback as MismatchAlertCallback
    from .callbacks.learning_rate import MismatchLRCallback as MismatchLRCallback
    from .callbacks.panel import MismatchPanelCallback as MismatchPanelCallback
    from .callbacks.report import MismatchReportCallback as MismatchReportCallback
    from .config import ConsistentGRPOConfig as ConsistentGRPOConfig
    from .correction.kl import kl_k1 as kl_k1
    from .correction.kl import kl_k2 as kl_k2
    from .correction.kl import kl_k3 as kl_k3
    from .correction.kl import reference_kl as reference_kl
    from .correction.presets import PRESETS as PRESETS
    from .correction.rules import Correction as Correction
    from .correction.rules import Rejection as Rejection
    from .correction.rules import TrustRegion as TrustRegion
    from .correction.weights import CorrectionResult as CorrectionResult
    from .correction.weights import correct as correct
    from .correction.weights import trust_region_mask as trust_region_mask
    from .metrics.alerts import AlertEvent as AlertEvent
    from .metrics.catalogue import METRICS as METRICS
    from .metrics.catalogue import Metric as Metric
    from .metrics.measure import correction_metrics as correction_metrics
    from .metrics.measure import finalize as finalize
    from .metrics.measure import mismatch_metrics as mismatch_metrics
    from .ratios import mismatch_log_ratio as mismatch_log_ratio
    from .records.record import MismatchRecord as MismatchRecord
    from .records.store import read_records as read_records
    from .records.tokens import worst_tokens as worst_tokens
    from .statistics import Stat as Stat
    from .statistics import merge as merge
    from .training.trainer import ConsistentGRPOTrainer as ConsistentGRPOTrainer


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *__all__])

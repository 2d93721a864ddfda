# SPDX-License-Identifier: Apache-2.0
"""Measure, correct and explain training-inference mismatch in TRL's GRPO.

Public names load on first use, so that `import trl_consistent` pulls in neither torch nor TRL.
"""

import importlib
from typing import TYPE_CHECKING


__version__ = "0.1.0"

_HOME = {
    "AlertEvent": "alerts",
    "METRICS": "metrics",
    "PRESETS": "corrections",
    "ConsistentGRPOConfig": "config",
    "ConsistentGRPOTrainer": "trainer",
    "Correction": "corrections",
    "CorrectionResult": "corrections",
    "Metric": "metrics",
    "MismatchAlertCallback": "callbacks",
    "MismatchLRCallback": "callbacks",
    "MismatchRecord": "records",
    "MismatchPanelCallback": "callbacks",
    "MismatchReportCallback": "callbacks",
    "Rejection": "corrections",
    "Stat": "metrics",
    "TrustRegion": "corrections",
    "correct": "corrections",
    "correction_metrics": "metrics",
    "finalize": "metrics",
    "kl_k1": "kl",
    "kl_k2": "kl",
    "kl_k3": "kl",
    "merge": "metrics",
    "mismatch_log_ratio": "ratios",
    "mismatch_metrics": "metrics",
    "read_records": "records",
    "reference_kl": "kl",
    "trust_region_mask": "corrections",
    "worst_tokens": "records",
}

__all__ = list(_HOME)

if TYPE_CHECKING:
    from .alerts import AlertEvent as AlertEvent
    from .callbacks import MismatchAlertCallback as MismatchAlertCallback
    from .callbacks import MismatchLRCallback as MismatchLRCallback
    from .callbacks import MismatchPanelCallback as MismatchPanelCallback
    from .callbacks import MismatchReportCallback as MismatchReportCallback
    from .config import ConsistentGRPOConfig as ConsistentGRPOConfig
    from .corrections import PRESETS as PRESETS
    from .corrections import Correction as Correction
    from .corrections import CorrectionResult as CorrectionResult
    from .corrections import Rejection as Rejection
    from .corrections import TrustRegion as TrustRegion
    from .corrections import correct as correct
    from .corrections import trust_region_mask as trust_region_mask
    from .kl import kl_k1 as kl_k1
    from .kl import kl_k2 as kl_k2
    from .kl import kl_k3 as kl_k3
    from .kl import reference_kl as reference_kl
    from .metrics import METRICS as METRICS
    from .metrics import Metric as Metric
    from .metrics import Stat as Stat
    from .metrics import correction_metrics as correction_metrics
    from .metrics import finalize as finalize
    from .metrics import merge as merge
    from .metrics import mismatch_metrics as mismatch_metrics
    from .ratios import mismatch_log_ratio as mismatch_log_ratio
    from .records import MismatchRecord as MismatchRecord
    from .records import read_records as read_records
    from .records import worst_tokens as worst_tokens
    from .trainer import ConsistentGRPOTrainer as ConsistentGRPOTrainer


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *__all__])

# SPDX-License-Identifier: Apache-2.0
"""The published corrections by name."""

from .rules import Correction, Rejection, TrustRegion


# One catastrophic token vetoes its completion: slime's default, verl's recommendation.
_VETO = Rejection("sequence_min", lower=1e-4)

PRESETS: dict[str, Correction] = {
    "none": Correction(source="measure only"),
    "tis": Correction("token", "truncate", None, 2.0, source="https://fengyao.notion.site/off-policy-rl (C = 2)"),
    "tis_two_sided": Correction(
        "token", "truncate", 0.5, 2.0, source="clip(ratio, 1/C, C) with C = 2; the published TIS has no lower bound"
    ),
    "icepop": Correction("token", "mask", 0.5, 5.0, source="https://huggingface.co/papers/2510.18855 (0.5, 5)"),
    "seq_tis": Correction("sequence", "truncate", None, 2.0, source="https://richardli.xyz/rl-collapse (C = 2)"),
    "seq_mis": Correction(
        "sequence", "mask", None, 3.0, source="https://richardli.xyz/rl-collapse; TRL's default mode and cap"
    ),
    "geo_mis": Correction(
        "geometric",
        "mask",
        0.99,
        1.01,
        source="https://richardli.xyz/rl-collapse, part 3; ratio of https://huggingface.co/papers/2507.18071",
    ),
    "tis_geo_rs": Correction(
        "token",
        "truncate",
        0.5,
        1.5,
        rejections=(Rejection("geometric", 0.99, 1.001),),
        source="slime mismatch report, runs (2) and (3)",
    ),
    "prefix_tis": Correction(
        "prefix", "truncate", None, 2.0, source="per-decision importance sampling (Precup et al., 2000), truncated"
    ),
    "dppo_tv": Correction(
        "token",
        "truncate",
        None,
        20.0,
        trust_regions=(TrustRegion("tv", 0.15),),
        source="https://huggingface.co/papers/2602.04879 (0.15, C = 20)",
    ),
    "dppo_kl": Correction(
        "token",
        "truncate",
        None,
        20.0,
        trust_regions=(TrustRegion("kl", 0.05),),
        source="https://huggingface.co/papers/2602.04879 (0.05, C = 20)",
    ),
    "opsm": Correction(
        trust_regions=(TrustRegion("opsm", 0.5),),
        source="https://huggingface.co/papers/2512.02556, eq. 9; 0.5 as TRL suggests for `off_policy_mask_threshold`",
    ),
    "m2po": Correction(
        rejections=(Rejection("batch", None, 0.04, "m2"),), source="https://huggingface.co/papers/2510.01161 (0.04)"
    ),
    "dense": Correction(
        "token", "truncate", None, 2.0, rejections=(_VETO,), source="bundle: `tis` and the veto of slime (1e-4)"
    ),
    "moe": Correction("token", "mask", 0.5, 5.0, rejections=(_VETO,), source="bundle: `icepop` and the veto (1e-4)"),
    "fp8": Correction(
        "token",
        "truncate",
        None,
        2.0,
        rejections=(Rejection("sequence_mean", None, 0.01, "k3"),),
        source="bundle: C = 2 of FlashRL's FP8 runs, k3 of verl's `decoupled_k3_rs` (0.01)",
    ),
    "long_cot": Correction(
        "token",
        "truncate",
        0.5,
        1.5,
        rejections=(Rejection("geometric", 0.99, 1.001), _VETO),
        source="bundle: `tis_geo_rs` and the veto (1e-4)",
    ),
    "async": Correction(
        "token",
        "truncate",
        None,
        5.0,
        rejections=(Rejection("batch", None, 0.04, "m2"),),
        source="bundle: `m2po` on the decoupled loss of https://huggingface.co/papers/2505.24298 (C = 5)",
    ),
}
"""The published corrections by name."""

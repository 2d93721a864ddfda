# SPDX-License-Identifier: Apache-2.0
"""`ConsistentGRPOConfig`, and the correction a config (ours or a plain `GRPOConfig`) stands for."""

import logging
from dataclasses import dataclass, field, replace
from typing import Any

from trl import GRPOConfig

from .correction.kl import REFERENCE_ESTIMATORS
from .correction.loss import ROW_COUNT_LOSSES, has_entropy_bonus, obstacle, refuse
from .correction.presets import PRESETS
from .correction.rules import ACTIONS, NORMALIZATIONS, Correction, Rejection, TrustRegion
from .ratios import LEVELS
from .upstream.trl import PASS_THROUGH_MODE


logger = logging.getLogger(__name__)

MODES = tuple(f"{level}_{action}" for action in ACTIONS if action != "none" for level in LEVELS)
"""Values of `vllm_importance_sampling_mode`: `<level>_<action>`."""

VERIFY_SYNC = ("off", "first", "every")
OLD_LOGPROBS = ("auto", "recompute", "reuse", "rollout")
REJECT_BASELINES = ("keep", "exclude")
KL_RATIOS = ("old", "sampling")
PRECISIONS = ("engine", "match", "fp16", "bf16", "fp32")
AUDITS = ("off", "warn", "strict")

_ENGINE_KEYS_OF_TRL = {
    "model": "the trainer rolls out the model it trains",
    "logprobs_mode": "corrections need 'processed_logprobs', the distribution that was sampled from",
    "tensor_parallel_size": "set `vllm_tensor_parallel_size`",
    "gpu_memory_utilization": "set `vllm_gpu_memory_utilization`",
    "max_model_len": "set `vllm_max_model_length`",
    "enable_sleep_mode": "set `vllm_enable_sleep_mode`",
    "model_impl": "set `vllm_model_impl`",
    "trust_remote_code": "set `trust_remote_code`",
    "seed": "TRL gives every rank its own",
    "distributed_executor_backend": "TRL runs the engine inside the launcher's processes",
}


def one_of(name: str, value: str, valid: tuple[str, ...]) -> None:
    """Refuses a value that is not in `valid`; the message lists them."""
    if value not in valid:
        raise ValueError(f"`{name}` is {value!r}. Expected one of: {', '.join(valid)}.")


def option(args: Any, name: str) -> Any:
    """One of our fields; its default where `args` is a plain `GRPOConfig`, or nothing."""
    return getattr(args, name, ConsistentGRPOConfig.__dataclass_fields__[name].default)


def setting(args: Any, name: str) -> Any:
    """What the engine is asked for: `generation_kwargs` go before fields of the same name."""
    return (args.generation_kwargs or {}).get(name, getattr(args, name, None))


def correction_of(args: Any) -> Correction | None:
    """The correction that `args` asks for, TRL's own modes included; `None` when the ratio is not used.

    Args:
        args (`GRPOConfig` or [`ConsistentGRPOConfig`]):
            A plain config is as good: our fields count as unset.
    """
    preset = option(args, "correction")
    if preset is not None:
        correction = PRESETS[preset]  # also without vLLM
    elif args.use_vllm and args.vllm_importance_sampling_correction:
        one_of("vllm_importance_sampling_mode", args.vllm_importance_sampling_mode, MODES)
        level, action = args.vllm_importance_sampling_mode.split("_")
        bounds = (args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max)
        correction = Correction(level, action, *bounds)
    else:
        return None
    return replace(
        correction,
        rejections=correction.rejections + rejections_of(option(args, "correction_rejections") or {}),
        trust_regions=correction.trust_regions + trust_regions_of(option(args, "correction_trust_regions") or {}),
        normalize=option(args, "correction_normalize"),
        reject_rate=option(args, "correction_reject_rate"),
    )


def rejections_of(rules: dict[str, Any]) -> tuple[Rejection, ...]:
    """The rejections that `correction_rejections` spells as `{"<statistic>/<level>": [lower, upper]}`.

    Raises:
        `ValueError`: names the rule that is not of this form.
    """
    rejections = []
    for name, bounds in rules.items():
        statistic, _, level = name.partition("/")
        pair = isinstance(bounds, list | tuple) and len(bounds) == 2
        if not pair or not all(bound is None or isinstance(bound, int | float) for bound in bounds):
            raise ValueError(
                f"`correction_rejections` maps {name!r} to {bounds!r}. Expected [lower, upper], null for an open bound."
            )
        lower, upper = (None if bound is None else float(bound) for bound in bounds)
        rejections.append(Rejection(level, lower, upper, statistic))
    return tuple(rejections)


def trust_regions_of(regions: dict[str, Any]) -> tuple[TrustRegion, ...]:
    """The trust regions that `correction_trust_regions` spells as `{"<kind>": bound}`.

    Raises:
        `ValueError`: names the region that is not of this form.
    """
    for kind, bound in regions.items():
        if not isinstance(bound, int | float):
            raise ValueError(f"`correction_trust_regions` maps {kind!r} to {bound!r}. Expected a number.")
    return tuple(TrustRegion(kind, float(bound)) for kind, bound in regions.items())


@dataclass
class ConsistentGRPOConfig(GRPOConfig):
    r"""
    Configuration class for the [`ConsistentGRPOTrainer`].

    Everything [`~trl.GRPOConfig`] has is inherited with its default; with the fields below unset, training is that of
    `GRPOTrainer`, bit for bit. `vllm_importance_sampling_mode` takes any of the levels `token`, `sequence`, `geometric`,
    `prefix` and `turn` with any of the actions `truncate`, `mask` and `reject`, as `"<level>_<action>"`.

    Parameters:
        > Parameters that control the correction of training-inference mismatch

        correction (`str`, *optional*):
            Name of a published correction, a key of `PRESETS`: `"none"` (measure only), `"tis"`, `"tis_two_sided"`,
            `"icepop"`, `"seq_tis"`, `"seq_mis"`, `"geo_mis"`, `"tis_geo_rs"`, `"prefix_tis"`, `"dppo_tv"`, `"dppo_kl"`,
            `"opsm"`, `"m2po"`, or of a bundle, `"dense"`, `"moe"`, `"fp8"`, `"long_cot"` or `"async"`. Sets
            `vllm_importance_sampling_correction`, `vllm_importance_sampling_mode` and both clip bounds, and refuses to
            contradict one that was set to something else. `None` leaves TRL's own fields in charge.

        correction_rejections (`dict[str, list[float | None]]`, *optional*):
            Rules by which tokens, turns or completions leave the loss mask, on top of the correction:
            `{"<statistic>/<level>": [lower, upper]}`, for example `{"k3/sequence_mean": [null, 0.01],
            "ratio/sequence_min": [1e-4, null]}`. What stays passes all of them. [`Rejection`] lists the statistics and
            levels; bounds are on the statistic itself, inclusive, `null` is open.

        correction_normalize (`str`, *optional*, defaults to `"none"`):
            Divide the weights by their mean over all ranks, after rejections: `"token"` (mean over kept tokens),
            `"sequence"` (mean over completions of their mean weight) or `"none"`.
        correction_reject_rate (`float`, *optional*):
            Calibrate the bounds on the ratio at the levels `sequence`, `geometric` and `turn`, those of rejections included,
            so that this share of healthy completions, for example `0.01`, is outside them, whatever their length. The
            bounds then follow from the length of each completion and the measured noise of the engine; for the first 256
            completions of 8 tokens or more, the fixed bounds stay. `None` keeps the fixed bounds of the preset or mode.
        correction_trust_regions (`dict[str, float]`, *optional*):
            Masks that look at the current policy and the advantage, with their bounds: `{"tv": 0.15}`, `{"kl": 0.05}`
            (DPPO) or `{"opsm": 0.5}` (off-policy sequence mask), on top of the correction. See [`TrustRegion`].
        correction_reject_baseline (`str`, *optional*, defaults to `"keep"`):
            Whether a completion that was rejected whole still counts in the reward baseline of its group: `"keep"` or
            `"exclude"`, which computes the advantages of the others without it.
        old_logprobs (`str`, *optional*, defaults to `"auto"`):
            Where the log-probs of the policy that sampled come from: `"recompute"` (TRL's extra forward), `"reuse"` (the
            training forward, where generation and optimization are aligned), `"rollout"` (the engine's own log-probs,
            "bypass": the ratio of the loss is `pi / mu`, weights are 1, and rejections and masks look at `pi / mu`) or
            `"auto"`: `"reuse"` where a correction of ours is set and reuse is exact, else what TRL does.

        > Parameters that control the KL term of the loss

        kl_estimator (`str`, *optional*, defaults to `"k3"`):
            Estimator of the KL to the reference: `"k3"` (TRL's), `"k1"`, `"k2"`, or the value of one with the gradient of
            `k2`, which is that of the KL, `"k1+"` and `"k3+"`. See [`reference_kl`]. Needs `beta`.
        kl_bias_correction_ratio (`str`, *optional*, defaults to `"old"`):
            What `use_bias_correction_kl` multiplies the KL by: `"old"`, TRL's `pi / pi_old`, or `"sampling"`, the ratio to
            the engine, `pi / mu`, which is unbiased under mismatch, too.
        ref_reset_steps (`int`, *optional*):
            Make the policy its own reference every so many steps, in full fine-tuning and LoRA. Needs `beta`.

        > Parameters that control what is recorded

        mismatch_record_steps (`int`, *optional*, defaults to `50`):
            Write a [`MismatchRecord`] of the first rollout batch and of one every so many steps (and on the `record` action of
            an alert) to `output_dir/mismatch/`, with what was logged: what `trl-consistent report`, `compare` and
            `records` read. `0` writes nothing.
        mismatch_record_bytes (`int`, *optional*, defaults to `268435456`):
            How many bytes the records of a rank may take together. Of at most 40 records, the newest half is kept, and of the
            older ones the worst (infinite ratios first, then k3). A rollout batch that takes more is cut to its worst
            completions.

        > Parameters that control the rollout engine

        rollout_engine_kwargs (`dict[str, Any]`, *optional*):
            Further arguments of `vllm.LLM` in colocate mode, for example `{"dtype": "float32", "enforce_eager": true}`.
            TRL passes no dtype: a float32 model is rolled out in bfloat16 unless this says otherwise. On CPU
            `enforce_eager` defaults to `True` (compiling takes minutes there). With `{"enable_lora": true}` (and
            `max_lora_rank` for ranks above 16), weight syncs send the LoRA adapter instead of merged weights.
        rollout_precision (`str`, *optional*, defaults to `"engine"`):
            `"match"` gives the engine the dtype the trainer computes in (mixed precision counts); `"fp16"` (with loss
            scaling), `"bf16"` and `"fp32"` set both sides, `fp16` and `bf16` included. `"engine"` leaves both alone. Without
            vLLM, `generate` then runs under the trainer's mixed precision, which adapters otherwise escape.
        rollout_fp32_lm_head (`bool`, *optional*, defaults to `False`):
            Compute the logits in float32 in trainer and engine (MiniMax-M1). Sets `cast_lm_head_to_fp32`.
        rollout_deterministic (`bool`, *optional*, defaults to `False`):
            Batch-invariant kernels in vLLM and deterministic ones in the trainer (`full_determinism`): what is computed for
            a completion no longer depends on its neighbors. Needs an NVIDIA GPU of compute capability 8.0 or above.
        rollout_audit (`str`, *optional*, defaults to `"warn"`):
            At the start, list what in the settings makes trainer and engine disagree, what it costs, and what removes it:
            `"warn"` prints it, `"strict"` refuses to train with it, `"off"` does not look.
        rollout_verify_sync (`str`, *optional*, defaults to `"every"`):
            When to check that the rollout engine holds the trainer's weights: `"off"`, after the `"first"` weight sync,
            or after `"every"` one and before each generation. Compared are names and checksums of all tensors and, at
            first and where these do not suffice, a short prompt scored by both sides. Weights that did not arrive raise;
            stale ones are synced, with a warning.
        rollout_support (`bool`, *optional*, defaults to `False`):
            Let the trainer's log-probs (current, old and those of the reference) and entropies follow
            `top_p`, `top_k`, `min_p`, `repetition_penalty` and, in `generation_kwargs`, `presence_penalty` and
            `frequency_penalty`, renormalised over the tokens that are kept. With `False` they are those of the
            whole vocabulary, and the mean ratio to the engine is the mass that was kept.
    """

    _VALID_DICT_FIELDS = GRPOConfig._VALID_DICT_FIELDS + [
        "correction_rejections",
        "correction_trust_regions",
        "rollout_engine_kwargs",
    ]

    correction: str | None = field(
        default=None,
        metadata={
            "help": "Name of a published correction of training-inference mismatch: 'none' (measure only), 'tis', "
            "'tis_two_sided', 'icepop', 'seq_tis', 'seq_mis', 'geo_mis', 'tis_geo_rs', 'prefix_tis', 'dppo_tv', "
            "'dppo_kl', 'opsm', 'm2po', or of a bundle, 'dense', 'moe', 'fp8', 'long_cot' or 'async'. Sets the "
            "`vllm_importance_sampling_*` fields. Unset leaves TRL's own fields in charge."
        },
    )
    correction_rejections: dict | str | None = field(
        default=None,
        metadata={
            "help": "Rules by which tokens, turns or completions leave the loss mask, as JSON: "
            "'{\"<statistic>/<level>\": [lower, upper]}', for example '{\"k3/sequence_mean\": [null, 0.01]}'."
        },
    )
    correction_normalize: str = field(
        default="none",
        metadata={
            "help": "Divide the weights by their mean over all ranks, after rejections: 'token' (mean over kept "
            "tokens), 'sequence' (mean over completions of their mean weight) or 'none'."
        },
    )
    correction_reject_rate: float | None = field(
        default=None,
        metadata={
            "help": "Calibrate the bounds on sequence, geometric and turn ratios to the length of each completion and the "
            "measured noise of the engine, so that this share of healthy completions (for example 0.01) is outside. "
            "Unset keeps the fixed bounds."
        },
    )
    correction_trust_regions: dict | str | None = field(
        default=None,
        metadata={
            "help": "Masks that look at the current policy and the advantage, with their bounds, as JSON: "
            "'{\"tv\": 0.15}', '{\"kl\": 0.05}' (DPPO) or '{\"opsm\": 0.5}' (off-policy sequence mask)."
        },
    )
    correction_reject_baseline: str = field(
        default="keep",
        metadata={
            "help": "Whether a completion that was rejected whole still counts in the reward baseline of its group: "
            "'keep' or 'exclude'."
        },
    )
    old_logprobs: str = field(
        default="auto",
        metadata={
            "help": "Where the log-probs of the policy that sampled come from: 'recompute' (an extra forward), 'reuse' "
            "(the training forward), 'rollout' (the engine's own) or 'auto' ('reuse' where a correction of ours is set "
            "and reuse is exact, else what TRL does)."
        },
    )
    kl_estimator: str = field(
        default="k3",
        metadata={
            "help": "Estimator of the KL to the reference: 'k3' (TRL's), 'k1', 'k2', or the value of one with the "
            "gradient of 'k2', 'k1+' and 'k3+'."
        },
    )
    kl_bias_correction_ratio: str = field(
        default="old",
        metadata={
            "help": "What `use_bias_correction_kl` multiplies the KL by: 'old', the ratio to the old policy, or "
            "'sampling', the ratio to the rollout engine."
        },
    )
    ref_reset_steps: int | None = field(
        default=None, metadata={"help": "Make the policy its own reference every so many steps."}
    )
    mismatch_record_steps: int = field(
        default=50,
        metadata={
            "help": "Write a record of the first rollout batch and of one every so many steps, and what was logged, to "
            "`output_dir/mismatch/`: what `trl-consistent report`, `compare` and `records` read. 0 writes nothing."
        },
    )
    mismatch_record_bytes: int = field(
        default=2**28,
        metadata={
            "help": "How many bytes the records of a rank may take together. Of at most 40 records, the newest half "
            "is kept, and of the older ones the worst."
        },
    )
    rollout_engine_kwargs: dict | str | None = field(
        default=None,
        metadata={
            "help": "Further arguments of `vllm.LLM` in colocate mode, as JSON, for example "
            '\'{"dtype": "float32", "enforce_eager": true}\'.'
        },
    )
    rollout_precision: str = field(
        default="engine",
        metadata={
            "help": "'match' gives the engine the dtype the trainer computes in; 'fp16', 'bf16' and 'fp32' set both sides; "
            "'engine' leaves both alone."
        },
    )
    rollout_fp32_lm_head: bool = field(
        default=False, metadata={"help": "Compute the logits in float32 in trainer and engine."}
    )
    rollout_deterministic: bool = field(
        default=False,
        metadata={
            "help": "Batch-invariant kernels in vLLM and deterministic ones in the trainer. Needs an NVIDIA GPU of compute "
            "capability 8.0 or above."
        },
    )
    rollout_audit: str = field(
        default="warn",
        metadata={
            "help": "At the start, list what in the settings makes trainer and engine disagree: 'warn' prints it, 'strict' "
            "refuses to train with it, 'off' does not look."
        },
    )
    rollout_verify_sync: str = field(
        default="every",
        metadata={
            "help": "When to check that the rollout engine holds the trainer's weights: 'off', after the 'first' weight "
            "sync, or after 'every' one and before each generation. Weights that did not arrive raise, stale ones are "
            "synced, with a warning."
        },
    )
    rollout_support: bool = field(
        default=False,
        metadata={
            "help": "Let the trainer's log-probs and entropies follow top-p, top-k, min-p and the penalties of the engine, "
            "renormalised over the tokens that are kept, instead of taking them over the whole vocabulary."
        },
    )

    def __post_init__(self) -> None:
        if self.correction is not None:
            one_of("correction", self.correction, tuple(PRESETS))
            self._apply_preset(PRESETS[self.correction])
        one_of("vllm_importance_sampling_mode", self.vllm_importance_sampling_mode, MODES)
        one_of("rollout_verify_sync", self.rollout_verify_sync, VERIFY_SYNC)
        one_of("rollout_precision", self.rollout_precision, PRECISIONS)
        one_of("rollout_audit", self.rollout_audit, AUDITS)
        self._apply_precision()
        super().__post_init__()
        one_of("old_logprobs", self.old_logprobs, OLD_LOGPROBS)
        if not isinstance(self.rollout_support, bool):
            raise ValueError(
                f"`rollout_support` is {self.rollout_support!r}. Expected `True` (the trainer's log-probs follow the engine's "
                "top-p, top-k, min-p and penalties) or `False`."
            )
        one_of("kl_estimator", self.kl_estimator, REFERENCE_ESTIMATORS)
        one_of("kl_bias_correction_ratio", self.kl_bias_correction_ratio, KL_RATIOS)
        if self.kl_bias_correction_ratio == "sampling" and not self.use_bias_correction_kl:
            raise ValueError(
                "`kl_bias_correction_ratio='sampling'` changes what `use_bias_correction_kl` multiplies by: set that, too."
            )
        if self.ref_reset_steps is not None and self.ref_reset_steps < 1:
            raise ValueError(f"`ref_reset_steps` is {self.ref_reset_steps}. Expected a number of steps, or nothing.")
        for name, least in (("steps", 0), ("bytes", 1)):
            if (value := getattr(self, f"mismatch_record_{name}")) < least:
                raise ValueError(f"`mismatch_record_{name}` is {value}. Expected {least} or more.")
        if self.beta == 0.0:
            for name in ("kl_estimator", "kl_bias_correction_ratio", "ref_reset_steps"):
                if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                    raise ValueError(f"`{name}={getattr(self, name)!r}` needs a KL term: set `beta`.")
        if self.ref_reset_steps is not None and self.sync_ref_model:
            raise ValueError("`ref_reset_steps` and `sync_ref_model` both move the reference. Set one of the two.")
        one_of("correction_reject_baseline", self.correction_reject_baseline, REJECT_BASELINES)
        for name in ("correction_rejections", "correction_trust_regions", "rollout_engine_kwargs"):
            if not isinstance(getattr(self, name), dict | None):  # TRL has parsed it if it was a JSON object
                raise ValueError(f"`{name}` must be a JSON object, got {getattr(self, name)!r}.")
        self._check_engine_options()
        one_of("correction_normalize", self.correction_normalize, NORMALIZATIONS)
        correction = correction_of(self)  # checks the bounds
        if correction is None or self.correction == "none":
            for name in ("rejections", "trust_regions", "normalize", "reject_baseline", "reject_rate"):
                value, default = getattr(self, f"correction_{name}"), type(self).__dataclass_fields__
                if value not in (default[f"correction_{name}"].default, {}):
                    raise ValueError(
                        f"`correction_{name}={value!r}` needs a correction to go with: set `use_vllm=True` and a "
                        "`correction` other than 'none', or leave it unset."
                    )
        if correction is not None and correction.acts:
            self._check_loss(correction)
            self._check_use(correction)
        if self.correction_reject_baseline == "exclude" and self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                "`correction_reject_baseline='exclude'` works with `multi_objective_aggregation='sum_then_normalize'` "
                f"only, got {self.multi_objective_aggregation!r}."
            )
        if self.old_logprobs in ("reuse", "rollout"):
            refuse(self.old_logprobs, obstacle(self, correction, self.old_logprobs))
        for key in self.rollout_engine_kwargs or {}:
            if key in _ENGINE_KEYS_OF_TRL:
                raise ValueError(f"`rollout_engine_kwargs` must not contain {key!r}: {_ENGINE_KEYS_OF_TRL[key]}.")
        if self.rollout_engine_kwargs and not (self.use_vllm and self.vllm_mode == "colocate"):
            logger.warning(
                f"`rollout_engine_kwargs={self.rollout_engine_kwargs}` is ignored: it needs `use_vllm=True` and "
                "`vllm_mode='colocate'`. Give a server its arguments where you start it."
            )
        self._check_sampling()

    def _apply_precision(self) -> None:
        """Writes `rollout_precision` and `rollout_fp32_lm_head` into the fields they stand for."""
        if self.rollout_precision in ("fp16", "bf16", "fp32"):
            for name in ("fp16", "bf16"):
                wanted, got = self.rollout_precision == name, getattr(self, name)
                if got and not wanted:
                    raise ValueError(
                        f"`rollout_precision={self.rollout_precision!r}` sets both sides, which contradicts `{name}=True`. Set "
                        "one of the two."
                    )
                setattr(self, name, wanted)
        if self.rollout_fp32_lm_head:
            self.cast_lm_head_to_fp32 = True
        if self.rollout_deterministic:
            self.full_determinism = True

    def _check_engine_options(self) -> None:
        """Refuses options that contradict `rollout_engine_kwargs`, or that this engine cannot have."""
        given: Any = self.rollout_engine_kwargs or {}
        head = (given.get("hf_overrides") or {}).get("head_dtype")
        for name, says, contradicts in (
            ("rollout_precision", self.rollout_precision != "engine", "dtype" in given),
            ("rollout_fp32_lm_head", self.rollout_fp32_lm_head, head not in (None, "float32")),
        ):
            if says and contradicts:
                raise ValueError(
                    f"`{name}={getattr(self, name)!r}` sets the engine's dtype, which contradicts "
                    f"`rollout_engine_kwargs={given!r}`. Set one of the two."
                )
        if self.rollout_deterministic and not (self.use_vllm and self.vllm_mode == "colocate"):
            raise ValueError(
                "`rollout_deterministic=True` is for a colocated vLLM (`use_vllm=True`, `vllm_mode='colocate'`). For a server, set "
                "`full_determinism=True` here and start it with `VLLM_BATCH_INVARIANT=1`."
            )

    def _check_loss(self, correction: Correction) -> None:
        """Refuses corrections that the loss cannot take."""
        if self.loss_type == "vespo":
            if not self.use_vllm:
                raise ValueError(
                    "`loss_type='vespo'` takes its weights inside a sequence ratio, where only TRL's vLLM path puts them: "
                    "set `use_vllm=True`, or another `loss_type`."
                )
            if any(region.kind != "opsm" for region in correction.trust_regions):
                raise ValueError(
                    "`loss_type='vespo'` multiplies the weights of a completion, so that one masked token would mask all: it "
                    f"works with the trust region 'opsm' only, got {self.correction_trust_regions or self.correction!r}."
                )
            if correction.action == "reject" or (correction.action != "none" and correction.level != "token"):
                raise ValueError(
                    f"`loss_type='vespo'` works with token_truncate and token_mask corrections only, got "
                    f"`vllm_importance_sampling_mode={self.vllm_importance_sampling_mode!r}`"
                    + (f" (from `correction={self.correction!r}`)." if self.correction else ".")
                )
        if correction.rejects and self.loss_type in ROW_COUNT_LOSSES and has_entropy_bonus(self):
            raise ValueError(
                f"With rejections, `loss_type={self.loss_type!r}` divides by the number of completions that are kept, "
                "which an entropy bonus must not follow: set `loss_type='dapo'` or 'bnpo', a correction that masks "
                "instead of rejecting, or no entropy bonus."
            )

    def _check_use(self, correction: Correction) -> None:
        """Refuses settings that could change nothing."""
        if self.correction_reject_baseline == "exclude" and not correction.rejects:
            raise ValueError(
                "`correction_reject_baseline='exclude'` is for completions that are rejected, and this correction rejects "
                "none: add `correction_rejections`, or leave it unset."
            )
        if self.correction_normalize != "none" and correction.action == "none":
            raise ValueError(
                f"`correction_normalize={self.correction_normalize!r}` divides weights by their mean, and this correction "
                "has no weights: choose one that truncates or masks, or leave it unset."
            )

    def _apply_preset(self, correction: Correction) -> None:
        """Writes the preset into TRL's fields; a field that holds neither TRL's default nor the preset's value is
        somebody's decision, and contradicts it."""
        wanted: dict[str, Any] = {"vllm_importance_sampling_correction": correction.acts}
        defaults = {name: field.default for name, field in GRPOConfig.__dataclass_fields__.items()}
        names = [f"vllm_importance_sampling_{name}" for name in ("mode", "clip_min", "clip_max")]
        if not correction.acts:
            wanted |= {name: defaults[name] for name in names}
        elif correction.action == "none":  # TRL leaves its ratio as it is, and ours takes its place
            wanted |= dict(zip(names, (PASS_THROUGH_MODE, None, None), strict=True))
        else:
            mode = f"{correction.level}_{correction.action}"
            wanted |= dict(zip(names, (mode, correction.lower, correction.upper), strict=True))
        if self.vllm_importance_sampling_cap is not None:
            raise ValueError(
                f"`correction={self.correction!r}` sets the bounds, which contradicts "
                f"`vllm_importance_sampling_cap={self.vllm_importance_sampling_cap}`. Set one of the two."
            )
        for name, value in wanted.items():
            got = getattr(self, name)
            if got != defaults[name] and got != value:
                raise ValueError(
                    f"`correction={self.correction!r}` stands for `{name}={value!r}`, which contradicts "
                    f"`{name}={got!r}`. Set one of the two."
                )
            setattr(self, name, value)

    def _check_sampling(self) -> None:
        """Refuses sampling settings with which a ratio means nothing; the audit speaks of the rest."""
        overrides = self.generation_kwargs or {}
        temperature = setting(self, "temperature")
        if temperature != self.temperature and (self.correction is not None or self.rollout_support):
            raise ValueError(
                f"`generation_kwargs={{'temperature': {temperature}}}` changes what the engine samples from, but the "
                f"trainer computes its log-probs at `temperature={self.temperature}`, so every ratio is off. Set "
                f"`temperature={temperature}` instead."
            )
        if "logprobs" in overrides and overrides["logprobs"] is None and self.vllm_importance_sampling_correction:
            raise ValueError(
                "`generation_kwargs={'logprobs': None}` asks the engine for no log-probs, but the correction needs "
                "them. Remove it, or set `vllm_importance_sampling_correction=False`."
            )

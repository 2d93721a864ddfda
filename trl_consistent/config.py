# SPDX-License-Identifier: Apache-2.0
"""`ConsistentGRPOConfig`, and the correction a config (ours or a plain `GRPOConfig`) stands for."""

import logging
from dataclasses import dataclass, field, replace
from typing import Any

from trl import GRPOConfig

from .corrections import ACTIONS, NORMALIZATIONS, PRESETS, Correction, Rejection
from .ratios import LEVELS


logger = logging.getLogger(__name__)

MODES = tuple(f"{level}_{action}" for action in ACTIONS if action != "none" for level in LEVELS)
"""Values of `vllm_importance_sampling_mode`: `<level>_<action>`."""

VERIFY_SYNC = ("off", "first", "every")

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

# Settings that change the sampled distribution without the trainer's log-probs following, with their neutral values.
_RESHAPING: dict[str, tuple[Any, ...]] = {
    "top_p": (None, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0.0),
    "repetition_penalty": (None, 1.0),
    "presence_penalty": (None, 0.0),
    "frequency_penalty": (None, 0.0),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "structured_outputs": (None,),
    "vllm_structured_outputs_regex": (None,),
}


def one_of(name: str, value: str, valid: tuple[str, ...]) -> None:
    """Refuses a value that is not in `valid`; the message lists them."""
    if value not in valid:
        raise ValueError(f"`{name}` is {value!r}. Expected one of: {', '.join(valid)}.")


def correction_of(args: Any) -> Correction | None:
    """The correction that `args` asks for, TRL's own modes included; `None` when the ratio is not used.

    Args:
        args (`GRPOConfig` or [`ConsistentGRPOConfig`]):
            A plain config is as good: our fields count as unset.
    """
    preset = getattr(args, "correction", None)
    if preset is not None:
        correction = PRESETS[preset]
    elif args.use_vllm and args.vllm_importance_sampling_correction:
        one_of("vllm_importance_sampling_mode", args.vllm_importance_sampling_mode, MODES)
        level, action = args.vllm_importance_sampling_mode.split("_")
        bounds = (args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max)
        correction = Correction(level, action, *bounds)
    else:
        return None
    rules = rejections_of(getattr(args, "correction_rejections", None) or {})
    normalize = getattr(args, "correction_normalize", "none")
    return replace(correction, rejections=correction.rejections + rules, normalize=normalize)


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
            `"icepop"`, `"seq_tis"`, `"seq_mis"`, `"geo_mis"`, `"tis_geo_rs"` or `"prefix_tis"`. Sets
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

        > Parameters that control the rollout engine

        rollout_engine_kwargs (`dict[str, Any]`, *optional*):
            Further arguments of `vllm.LLM` in colocate mode, for example `{"dtype": "float32", "enforce_eager": true}`.
            TRL passes no dtype: a float32 model is rolled out in bfloat16 unless this says otherwise. On CPU
            `enforce_eager` defaults to `True` (compiling takes minutes there).
        rollout_verify_sync (`str`, *optional*, defaults to `"every"`):
            When to compare trainer and colocated engine on a short fixed prompt after a weight sync: `"off"`,
            `"first"` or `"every"`. Weights that did not arrive, or arrived as garbage, raise.
    """

    _VALID_DICT_FIELDS = GRPOConfig._VALID_DICT_FIELDS + ["correction_rejections", "rollout_engine_kwargs"]

    correction: str | None = field(
        default=None,
        metadata={
            "help": "Name of a published correction of training-inference mismatch: 'none' (measure only), 'tis', "
            "'tis_two_sided', 'icepop', 'seq_tis', 'seq_mis', 'geo_mis', 'tis_geo_rs' or 'prefix_tis'. Sets the "
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
    rollout_engine_kwargs: dict | str | None = field(
        default=None,
        metadata={
            "help": "Further arguments of `vllm.LLM` in colocate mode, as JSON, for example "
            '\'{"dtype": "float32", "enforce_eager": true}\'.'
        },
    )
    rollout_verify_sync: str = field(
        default="every",
        metadata={
            "help": "When to compare trainer and colocated engine on a short fixed prompt after a weight sync: 'off', "
            "'first' or 'every'. Weights that did not arrive, or arrived as garbage, raise."
        },
    )

    def __post_init__(self) -> None:
        if self.correction is not None:
            one_of("correction", self.correction, tuple(PRESETS))
            self._apply_preset(PRESETS[self.correction])
        one_of("vllm_importance_sampling_mode", self.vllm_importance_sampling_mode, MODES)
        one_of("rollout_verify_sync", self.rollout_verify_sync, VERIFY_SYNC)
        super().__post_init__()
        for name in ("correction_rejections", "rollout_engine_kwargs"):
            if isinstance(getattr(self, name), str):  # TRL has parsed it if it was a JSON object
                raise ValueError(f"`{name}` must be a JSON object, got {getattr(self, name)!r}.")
        one_of("correction_normalize", self.correction_normalize, NORMALIZATIONS)
        correction = correction_of(self)  # checks the bounds
        if not (self.use_vllm and self.vllm_importance_sampling_correction):
            for name, unset in (("correction_rejections", (None, {})), ("correction_normalize", ("none",))):
                if getattr(self, name) not in unset:
                    raise ValueError(
                        f"`{name}={getattr(self, name)!r}` needs a correction to go with: set `use_vllm=True` and a "
                        "`correction` other than 'none', or leave it unset."
                    )
        if correction is not None and correction.action != "none" and self.loss_type == "vespo":
            if correction.level != "token" or correction.action == "reject":
                raise ValueError(
                    f"`loss_type='vespo'` works with token_truncate and token_mask corrections only, got "
                    f"`vllm_importance_sampling_mode={self.vllm_importance_sampling_mode!r}`"
                    + (f" (from `correction={self.correction!r}`)." if self.correction else ".")
                )
        for key in self.rollout_engine_kwargs or {}:
            if key in _ENGINE_KEYS_OF_TRL:
                raise ValueError(f"`rollout_engine_kwargs` must not contain {key!r}: {_ENGINE_KEYS_OF_TRL[key]}.")
        if self.rollout_engine_kwargs and not (self.use_vllm and self.vllm_mode == "colocate"):
            logger.warning(
                f"`rollout_engine_kwargs={self.rollout_engine_kwargs}` is ignored: it needs `use_vllm=True` and "
                "`vllm_mode='colocate'`. Give a server its arguments where you start it."
            )
        if self.use_vllm:
            self._check_sampling()

    def _apply_preset(self, correction: Correction) -> None:
        """Writes the preset into TRL's fields; a field that holds neither TRL's default nor the preset's value is
        somebody's decision, and contradicts it."""
        wanted: dict[str, Any] = {"vllm_importance_sampling_correction": correction.action != "none"}
        defaults = {name: field.default for name, field in GRPOConfig.__dataclass_fields__.items()}
        names = [f"vllm_importance_sampling_{name}" for name in ("mode", "clip_min", "clip_max")]
        if correction.action == "none":
            wanted |= {name: defaults[name] for name in names}
        else:
            if not self.use_vllm:
                raise ValueError(
                    f"`correction={self.correction!r}` needs the rollout engine's log-probs: set `use_vllm=True`, or "
                    "leave `correction` unset."
                )
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
        """Speaks up about sampling settings that the trainer's log-probs do not follow."""
        overrides = self.generation_kwargs or {}
        temperature = overrides.get("temperature", self.temperature)
        if temperature != self.temperature:
            message = (
                f"`generation_kwargs={{'temperature': {temperature}}}` changes what the engine samples from, but the "
                f"trainer computes its log-probs at `temperature={self.temperature}`, so every ratio is off. Set "
                f"`temperature={temperature}` instead."
            )
            if self.correction is not None:
                raise ValueError(message)
            logger.warning(message)
        if "logprobs" in overrides and overrides["logprobs"] is None and self.vllm_importance_sampling_correction:
            raise ValueError(
                "`generation_kwargs={'logprobs': None}` asks the engine for no log-probs, but the correction needs "
                "them. Remove it, or set `vllm_importance_sampling_correction=False`."
            )
        for name, neutral in _RESHAPING.items():
            value = overrides.get(name, getattr(self, name, None))
            if value not in neutral:
                logger.warning(
                    f"`{name}={value}` changes the distribution that the engine samples from and reports log-probs of; "
                    "the trainer computes its own without it, so the mismatch ratio is biased (after truncation its "
                    "mean is the probability mass that was kept). Prefer leaving it out; watch `mismatch/ratio/mean`."
                )

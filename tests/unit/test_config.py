# SPDX-License-Identifier: Apache-2.0
import dataclasses
import logging
import re

import pytest
from trl import GRPOConfig, TrlParser

from trl_consistent import ConsistentGRPOConfig
from trl_consistent.config import MODES, correction_of
from trl_consistent.correction.presets import PRESETS
from trl_consistent.correction.rules import Correction, Rejection, TrustRegion
from trl_consistent.records.store import MAX_RECORDS
from trl_consistent.rollout.reshaping import sampling_of, unfollowed_sampling
from trl_consistent.support import Sampling


def config(tmp_path, **kwargs):
    return ConsistentGRPOConfig(str(tmp_path), **{"report_to": "none", "use_cpu": True, "bf16": False, **kwargs})


def parsed(tmp_path, *arguments):
    shared = ("--output_dir", str(tmp_path), "--use_vllm", "--use_cpu", "--bf16", "False")
    (args,) = TrlParser(ConsistentGRPOConfig).parse_args_and_config([*shared, *arguments])
    return args


OUR_FIELDS = {
    "correction_normalize": "none",
    "correction": None,
    "correction_rejections": None,
    "correction_trust_regions": None,
    "correction_reject_rate": None,
    "correction_reject_baseline": "keep",
    "old_logprobs": "auto",
    "kl_estimator": "k3",
    "kl_bias_correction_ratio": "old",
    "ref_reset_steps": None,
    "mismatch_record_steps": 50,
    "mismatch_record_bytes": 268435456,
    "rollout_engine_kwargs": None,
    "rollout_precision": "engine",
    "rollout_fp32_lm_head": False,
    "rollout_deterministic": False,
    "rollout_audit": "warn",
    "rollout_verify_sync": "every",
    "rollout_support": False,
}


def test_our_options_are_these_and_off_by_default():
    fields = {f.name: f for f in dataclasses.fields(ConsistentGRPOConfig)}
    ours = {name: f.default for name, f in fields.items() if name not in GRPOConfig.__dataclass_fields__}
    assert ours == OUR_FIELDS


def test_inherited_defaults_are_trl_s():
    for name, field in GRPOConfig.__dataclass_fields__.items():
        assert ConsistentGRPOConfig.__dataclass_fields__[name].default == field.default, name


def test_docstring_and_help_name_the_same_options_and_defaults():
    entry = r"^ {8}(\w+) \(`[^`]*`, \*optional\*(?:, defaults to `([^`]+)`)?\):"
    documented = re.findall(entry, ConsistentGRPOConfig.__doc__, re.M)
    assert {name: default.strip('"') for name, default in documented} == {
        name: "" if default is None else str(default) for name, default in OUR_FIELDS.items()
    }
    for name in OUR_FIELDS:
        help_text = ConsistentGRPOConfig.__dataclass_fields__[name].metadata["help"]
        assert help_text and not re.search(r"%(?!\()", help_text)  # argparse formats it
    for preset in PRESETS:
        assert f"'{preset}'" in ConsistentGRPOConfig.__dataclass_fields__["correction"].metadata["help"]
        assert f'"{preset}"' in ConsistentGRPOConfig.__doc__
    assert f"at most {MAX_RECORDS} records" in ConsistentGRPOConfig.__doc__


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "none"])
def test_preset_writes_trl_s_fields(tmp_path, preset):
    args = config(tmp_path, use_vllm=True, correction=preset)
    correction = PRESETS[preset]
    assert args.vllm_importance_sampling_correction is True
    if correction.action == "none":  # rejections or trust regions only
        correction = dataclasses.replace(correction, level="token", action="mask", lower=None, upper=None)
    assert args.vllm_importance_sampling_mode == f"{correction.level}_{correction.action}"
    assert args.vllm_importance_sampling_clip_min == correction.lower
    assert args.vllm_importance_sampling_clip_max == correction.upper
    assert correction_of(args) == PRESETS[preset]


def test_none_measures_and_does_not_correct(tmp_path):
    args = config(tmp_path, use_vllm=True, correction="none")
    assert args.vllm_importance_sampling_correction is False


def test_none_and_a_mode_contradict_each_other(tmp_path):
    with pytest.raises(ValueError, match="`correction='none'`.*`vllm_importance_sampling_mode='token_mask'`"):
        config(tmp_path, use_vllm=True, correction="none", vllm_importance_sampling_mode="token_mask")


def test_unset_correction_is_trl_s_own(tmp_path):
    args = config(tmp_path, use_vllm=True)
    assert args.vllm_importance_sampling_mode == "sequence_mask"
    assert correction_of(args) == Correction("sequence", "mask", None, 3.0)
    plain = GRPOConfig(str(tmp_path), report_to="none", use_cpu=True, bf16=False, use_vllm=True)
    assert correction_of(plain) == Correction("sequence", "mask", None, 3.0)
    assert correction_of(config(tmp_path)) is None


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_accepted_and_means_level_and_action(tmp_path, mode):
    args = config(tmp_path, use_vllm=True, vllm_importance_sampling_mode=mode)
    level, action = mode.split("_")
    assert correction_of(args) == Correction(level, action, None, 3.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vllm_importance_sampling_mode", "token_truncate"),
        ("vllm_importance_sampling_clip_min", 0.1),
        ("vllm_importance_sampling_clip_max", 7.0),
        ("vllm_importance_sampling_correction", False),
        ("vllm_importance_sampling_cap", 4.0),
    ],
)
@pytest.mark.filterwarnings("ignore:The `vllm_importance_sampling_cap`:FutureWarning")
def test_preset_and_contradicting_field_are_refused_with_both_names(tmp_path, field, value):
    with pytest.raises(ValueError, match=rf"`correction='icepop'`.*`{field}={value!r}`"):
        config(tmp_path, use_vllm=True, correction="icepop", **{field: value})


def test_preset_with_its_own_values_spelled_out_is_no_contradiction(tmp_path):
    args = config(
        tmp_path,
        use_vllm=True,
        correction="icepop",
        vllm_importance_sampling_mode="token_mask",
        vllm_importance_sampling_clip_min=0.5,
    )
    again = dataclasses.replace(args, generation_batch_size=None)
    assert again.vllm_importance_sampling_clip_max == 5.0


def test_unknown_names_list_the_valid_ones(tmp_path):
    with pytest.raises(ValueError, match="`correction` is 'icepops'. Expected one of: none, tis, .*tis_geo_rs"):
        config(tmp_path, use_vllm=True, correction="icepops")
    with pytest.raises(ValueError, match="`vllm_importance_sampling_mode` is 'batch_mask'. Expected one of: token_"):
        config(tmp_path, use_vllm=True, vllm_importance_sampling_mode="batch_mask")
    with pytest.raises(ValueError, match="`rollout_verify_sync` is 'always'. Expected one of: off, first, every"):
        config(tmp_path, rollout_verify_sync="always")


@pytest.mark.parametrize(
    ("lower", "upper", "message"),
    [(3.0, 3.0, "must be less"), (-1.0, 3.0, "lower bound is -1.0"), (None, float("nan"), "upper bound is nan")],
)
def test_impossible_bounds_are_refused(tmp_path, lower, upper, message):
    with pytest.raises(ValueError, match=message):
        config(
            tmp_path,
            use_vllm=True,
            vllm_importance_sampling_mode="geometric_mask",
            vllm_importance_sampling_clip_min=lower,
            vllm_importance_sampling_clip_max=upper,
        )


def test_truncation_without_bounds_is_refused(tmp_path):
    with pytest.raises(ValueError, match="geometric_truncate needs a lower or an upper bound"):
        config(
            tmp_path,
            use_vllm=True,
            vllm_importance_sampling_mode="geometric_truncate",
            vllm_importance_sampling_clip_max=None,
        )


@pytest.mark.parametrize("kwargs", [{"correction": "seq_mis"}, {"correction": "geo_mis"}, {}])
def test_vespo_with_a_sequence_mode_is_refused(tmp_path, kwargs):
    with pytest.raises(ValueError, match="`loss_type='vespo'`.*`vllm_importance_sampling_mode="):
        config(tmp_path, use_vllm=True, loss_type="vespo", **kwargs)
    config(tmp_path, use_vllm=True, loss_type="vespo", correction="icepop")


def test_temperature_behind_the_trainer_s_back(tmp_path):
    with pytest.raises(
        ValueError, match="generation_kwargs.*'temperature': 0.1.*`temperature=1.0`.*Set `temperature=0.1`"
    ):
        config(tmp_path, use_vllm=True, correction="tis", generation_kwargs={"temperature": 0.1})
    unset = config(tmp_path, use_vllm=True, generation_kwargs={"temperature": 0.1})
    assert unfollowed_sampling(unset) == {"temperature": 0.1}


@pytest.mark.parametrize(
    "kwargs",
    [
        {"top_p": 0.9},
        {"generation_kwargs": {"top_k": 5}},
        {"min_p": 0.1},
        {"repetition_penalty": 1.2},
        {"generation_kwargs": {"presence_penalty": 0.5}},
        {"generation_kwargs": {"logit_bias": {3: 1.0}}},
        {"vllm_structured_outputs_regex": "[0-9]+"},
    ],
    ids=str,
)
def test_reshaped_sampling_is_known(tmp_path, kwargs):
    asked = kwargs.get("generation_kwargs", kwargs)
    assert unfollowed_sampling(config(tmp_path, use_vllm=True, **kwargs)) == asked


def test_neutral_sampling_reshapes_nothing(tmp_path):
    neutral = config(tmp_path, use_vllm=True, generation_kwargs={"temperature": 1.0, "top_k": -1, "seed": 3})
    assert unfollowed_sampling(neutral) == {}


def test_no_log_probs_at_all_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'logprobs': None"):
        config(tmp_path, use_vllm=True, generation_kwargs={"logprobs": None})


def test_engine_arguments_that_trl_owns_are_refused(tmp_path):
    with pytest.raises(ValueError, match="must not contain 'logprobs_mode'.*processed_logprobs"):
        config(tmp_path, rollout_engine_kwargs={"logprobs_mode": "raw_logprobs"})


def test_engine_arguments_that_reach_nobody_warn(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        config(tmp_path, use_vllm=True, vllm_mode="server", rollout_engine_kwargs={"dtype": "float32"})
    assert "`rollout_engine_kwargs={'dtype': 'float32'}` is ignored" in caplog.text


@pytest.mark.parametrize("name, value, least", [("steps", -1, 0), ("bytes", 0, 1)])
def test_limits_of_records_are_checked(tmp_path, name, value, least):
    with pytest.raises(ValueError, match=f"`mismatch_record_{name}` is {value}. Expected {least} or more"):
        config(tmp_path, **{f"mismatch_record_{name}": value})


def test_engine_arguments_must_be_an_object(tmp_path):
    with pytest.raises(ValueError, match="must be a JSON object, got 'float32'"):
        config(tmp_path, rollout_engine_kwargs="float32")


def test_options_reach_the_command_line(tmp_path):
    args = parsed(
        tmp_path, "--correction", "geo_mis", "--rollout_engine_kwargs", '{"dtype": "float32", "enforce_eager": true}'
    )
    assert args.vllm_importance_sampling_mode == "geometric_mask"
    assert args.rollout_engine_kwargs == {"dtype": "float32", "enforce_eager": True}


def test_rejections_from_the_command_line(tmp_path):
    args = parsed(
        tmp_path,
        "--correction",
        "tis_geo_rs",
        "--correction_rejections",
        '{"k3/sequence_mean": [null, 0.01], "ratio/sequence_min": [1e-4, null]}',
    )
    assert correction_of(args).rejections == (
        Rejection("geometric", 0.99, 1.001),  # the preset's own
        Rejection("sequence_mean", None, 0.01, "k3"),
        Rejection("sequence_min", 1e-4, None),
    )


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"k3/sequence_mean": 0.01}, r"maps 'k3/sequence_mean' to 0.01. Expected \[lower, upper\]"),
        ({"k5/token": [None, 1]}, "statistic is 'k5'"),
        ({"k3": [None, 1]}, "level of k3 is ''"),
        ({"k3/token": [2, 1]}, "must be less"),
        ("k3", "must be a JSON object"),
    ],
)
def test_rejections_of_the_wrong_form_are_refused(tmp_path, rules, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, use_vllm=True, correction="tis", correction_rejections=rules)


@pytest.mark.parametrize("options", [{"use_vllm": True, "correction": "none"}, {}], ids=["none", "no engine"])
def test_rejections_without_a_correction_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match="`correction_rejections=.*needs a correction"):
        config(tmp_path, correction_rejections={"k3/token": [None, 1]}, **options)


def test_normalization_reaches_the_correction_and_needs_one(tmp_path):
    args = config(tmp_path, use_vllm=True, correction="tis", correction_normalize="sequence")
    assert correction_of(args).normalize == "sequence"
    with pytest.raises(ValueError, match="`correction_normalize` is 'batch'. Expected one of: none, token, sequence"):
        config(tmp_path, use_vllm=True, correction="tis", correction_normalize="batch")
    with pytest.raises(ValueError, match="`correction_normalize='token'` needs a correction"):
        config(tmp_path, use_vllm=True, correction="none", correction_normalize="token")


def test_calibrated_bounds_reach_the_correction(tmp_path):
    args = config(tmp_path, use_vllm=True, correction="tis_geo_rs", correction_reject_rate=0.01)
    assert correction_of(args).reject_rate == 0.01 and correction_of(args).calibrated_levels == {"geometric"}
    args = parsed(tmp_path, "--correction", "seq_mis", "--correction_reject_rate", "0.05")
    assert correction_of(args).reject_rate == 0.05 and correction_of(args).calibrated_levels == {"sequence"}
    with pytest.raises(ValueError, match="at one of the levels sequence, geometric, turn, got token_truncate"):
        config(tmp_path, use_vllm=True, correction="tis", correction_reject_rate=0.01)
    with pytest.raises(ValueError, match="reject_rate is 1.5. Expected a share"):
        config(tmp_path, use_vllm=True, correction="geo_mis", correction_reject_rate=1.5)
    with pytest.raises(ValueError, match="`correction_reject_rate=0.01` needs a correction"):
        config(tmp_path, correction_reject_rate=0.01)


def test_trust_regions_from_the_command_line(tmp_path):
    args = parsed(tmp_path, "--correction", "icepop", "--correction_trust_regions", '{"tv": 0.2, "opsm": 0.5}')
    assert correction_of(args).trust_regions == (TrustRegion("tv", 0.2), TrustRegion("opsm", 0.5))
    with pytest.raises(ValueError, match="works with the trust region 'opsm' only"):
        config(tmp_path, use_vllm=True, loss_type="vespo", correction="dppo_tv")


@pytest.mark.parametrize(
    ("regions", "message"),
    [
        ({"tv": None}, "maps 'tv' to None. Expected a number"),
        ({"tv": "0.1"}, "maps 'tv' to '0.1'. Expected a number"),
        (["tv"], "`correction_trust_regions` must be a JSON object"),
        ({"l1": 0.1}, "Trust region is 'l1'"),
    ],
)
def test_trust_regions_of_the_wrong_form_are_refused(tmp_path, regions, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, use_vllm=True, correction="tis", correction_trust_regions=regions)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"correction_reject_baseline": "exclude"}, "this correction rejects none"),
        ({"correction": "opsm", "correction_normalize": "token"}, "has no weights"),
    ],
)
def test_settings_that_could_change_nothing_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, use_vllm=True, **{"correction": "tis", **options})


def test_dict_options_are_declared_for_the_command_line():
    assert {"correction_rejections", "rollout_engine_kwargs"} <= set(ConsistentGRPOConfig._VALID_DICT_FIELDS)
    assert set(GRPOConfig._VALID_DICT_FIELDS) < set(ConsistentGRPOConfig._VALID_DICT_FIELDS)


def test_support_takes_what_it_follows_from_where_the_engine_takes_it(tmp_path):
    args = config(
        tmp_path, use_vllm=True, top_p=0.9, top_k=-1, generation_kwargs={"top_p": 0.8, "presence_penalty": 0.5}
    )
    expected = {"top_p": 0.8, "presence_penalty": 0.5}
    assert sampling_of(args, "vllm") == Sampling(**expected)
    # transformers has no presence penalty
    assert sampling_of(args, "transformers") == Sampling(top_p=0.8, order=("top_k", "top_p", "min_p"))
    batches = {"top_p": 0.8, "repetition_penalty": 1.2}  # which continuous batching drops
    assert sampling_of(config(tmp_path, **batches), "continuous_batching").repetition_penalty == 1.0
    assert sampling_of(GRPOConfig(str(tmp_path), use_cpu=True, bf16=False), "vllm") == Sampling()


def test_what_support_follows_is_followed_and_the_rest_is_not(tmp_path):
    reshaped = {
        "use_vllm": True,
        "top_p": 0.9,
        "generation_kwargs": {"frequency_penalty": 0.1, "logit_bias": {3: 1.0}},
    }
    assert unfollowed_sampling(config(tmp_path, **reshaped, rollout_support=True)) == {"logit_bias": {3: 1.0}}
    assert unfollowed_sampling(config(tmp_path, **reshaped)).keys() == {"top_p", "frequency_penalty", "logit_bias"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout_support": "recompute"}, "`rollout_support` is 'recompute'. Expected `True` .* or `False`"),
        ({"rollout_support": "off"}, "`rollout_support` is 'off'. Expected `True` .* or `False`"),
        ({"rollout_support": True, "generation_kwargs": {"temperature": 0.5}}, "temperature=0.5"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_support_refuses(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, use_vllm=True, **options)

# SPDX-License-Identifier: Apache-2.0
import ast
import inspect
from pathlib import Path

import pytest

import trl_consistent


ROOT = Path(__file__).parents[2]
PUBLIC = {
    "METRICS", "PRESETS", "ConsistentGRPOConfig", "ConsistentGRPOTrainer", "Correction", "CorrectionResult", "Metric",
    "Rejection", "Stat", "correct", "correction_metrics", "finalize", "kl_k1", "kl_k2", "kl_k3", "merge",
    "mismatch_log_ratio", "mismatch_metrics", "MismatchLRCallback", "MismatchReportCallback", "TrustRegion",
    "reference_kl", "trust_region_mask", "MismatchRecord", "read_records", "worst_tokens",
    "AlertEvent", "MismatchAlertCallback", "MismatchPanelCallback",
}  # fmt: skip


def test_public_names_are_these():
    assert set(trl_consistent.__all__) == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_names_are_importable_and_documented(name):
    value = getattr(trl_consistent, name)
    if callable(value):
        assert inspect.getdoc(value)
    assert name in dir(trl_consistent)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        trl_consistent.nonsense  # noqa: B018


@pytest.mark.parametrize("name", sorted(n for n in PUBLIC if n.startswith(("kl_", "mismatch_", "trust_"))))
def test_math_docstrings_say_sign_and_masked_positions(name):
    doc = inspect.getdoc(getattr(trl_consistent, name))
    assert "Sign:" in doc and "Masked positions:" in doc


def test_every_source_file_names_its_license():
    for folder in ("trl_consistent", "tests", "examples", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.read_text().strip():
                assert "SPDX-License-Identifier: Apache-2.0" in path.read_text(), path


def test_examples_carry_inline_metadata_and_their_launch_command():
    examples = sorted((ROOT / "examples").glob("*.py"))
    assert examples
    for path in examples:
        text = path.read_text()
        assert text.startswith("# /// script"), path
        assert "accelerate launch" in ast.get_docstring(ast.parse(text)), path


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_generated_tables_are_up_to_date(page):
    from scripts.tables import with_tables

    assert with_tables(page.read_text()) == page.read_text(), "run `python scripts/tables.py`"


def test_every_generated_table_stands_in_a_page():
    from scripts.tables import PLACE, TABLES

    text = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    assert sorted(name for _, name, _ in PLACE.findall(text)) == sorted(TABLES)

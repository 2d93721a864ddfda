# SPDX-License-Identifier: Apache-2.0
"""README and docs/ say what is in the package: their code runs, and what they link, name and quote is there."""

import ast
import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from trl_consistent import METRICS, PRESETS, ConsistentGRPOConfig
from trl_consistent.records.store import RecordStore

from ..recorded import record


ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Homepage"]

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)


def blocks(language: str) -> list[tuple[str, str]]:
    """Name of the page and text of each code block in that language."""
    return [
        (page.name, text) for page in PAGES for text in re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S)
    ]


def readme_table(heading: str) -> list[list[str]]:
    """The cells of the table under a heading of the README, without its first two lines."""
    section = README.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_readme_is_short():
    text = README.read_text()
    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 1100


def test_links_of_the_readme_work_on_the_package_index():
    links = re.findall(r"\]\((.*?)\)", README.read_text())
    assert len(links) > 10
    assert [link for link in links if not link.startswith("https://")] == []


@each_page
def test_links_into_the_repository_lead_to_files(page):
    for kind, path in re.findall(rf"{REPOSITORY}/(\w+)/main/([^)\s#]*)", page.read_text()):
        assert kind in ("blob", "raw", "tree")
        assert (ROOT / path).exists(), path


def test_one_address_of_the_repository_is_used_everywhere():
    assert f"repo_url: {REPOSITORY}\n" in (ROOT / "mkdocs.yml").read_text()
    for page in PAGES:
        assert set(re.findall(r"https://github\.com/[\w-]+/trl-consistent", page.read_text())) <= {REPOSITORY}, page


@pytest.mark.parametrize(("page", "code"), blocks("python"), ids=lambda text: text if text.endswith(".md") else "")
def test_python_blocks_run_or_parse(page, code, tmp_path, monkeypatch):
    RecordStore(tmp_path / "output" / "mismatch" / "records", 9, 10**9).write(
        record(gap=0.5)
    )  # what one of them reads
    monkeypatch.chdir(tmp_path)
    compiled = compile(code, page, "exec")
    if "trainer.train()" not in code:
        exec(compiled, {})


def test_the_readme_shows_six_metrics_of_the_catalogue():
    rows = readme_table("Six metrics to watch")
    assert len(rows) == 6
    for key, _, healthy in rows:
        assert METRICS[key.strip("`")].healthy_text == healthy


def test_the_readme_recommends_presets_that_exist():
    rows = readme_table("Which correction")
    assert len(rows) == 5
    assert {name.strip("`") for _, name, _ in rows} < set(PRESETS)
    assert f"all {len(PRESETS)} presets" in README.read_text()


@each_page
def test_options_that_are_named_exist(page):
    names = re.findall(r"`(?:--)?((?:correction|rollout|mismatch_record|kl)_\w+)", page.read_text())
    options = {field.name for field in dataclasses.fields(ConsistentGRPOConfig)}
    assert set(names) - {"rollout_func"} <= options


def test_every_room_is_described():
    text = (ROOT / "docs" / "how-it-works.md").read_text()
    rooms = {path.parent.name for path in (ROOT / "trl_consistent").glob("*/__init__.py")}
    assert {room for room in rooms if f"`{room}/`" not in text} == set()


def strings_of_the_package() -> str:
    """Every string in the source, with `…` for what is formatted into it."""
    strings = []
    for path in (ROOT / "trl_consistent").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                strings.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                strings.append(node.value)
    return "\n".join(strings)


def test_messages_under_troubleshooting_are_those_of_the_package():
    source = strings_of_the_package()
    messages = re.findall(r"^> (.*)$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.M)
    assert len(messages) > 20
    missing = [part for message in messages for part in message.split("…") if part.strip(" .`") not in source]
    assert missing == []

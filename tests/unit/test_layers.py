# SPDX-License-Identifier: Apache-2.0
"""Imports flow one way, and only as much as needed is imported."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import trl_consistent


PACKAGE = Path(trl_consistent.__file__).parent
ORDER = [
    "ratios", "statistics", "support", "correction", "metrics", "tables", "upstream", "config", "rollout", "records",
    "training", "compare", "report", "callbacks", "run", "cli",
]  # fmt: skip
MATH = ["ratios.py", "statistics.py", "support.py", "correction", "metrics"]


def layer(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path, of_package: bool):
    """Names of imported layers of the package, or of top-level modules outside it."""
    depth = len(path.relative_to(PACKAGE).parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            if of_package and node.level == depth:
                yield from [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
        elif not of_package:
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            yield from (name.split(".")[0] for name in names)


FILES = [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.name != "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_from_files_above_it(path):
    position = ORDER.index(layer(path))
    for name in imports(path, of_package=True):
        if name not in ("__version__",):
            assert ORDER.index(name) < position or name == layer(path), f"{path.name} imports {name}"


@pytest.mark.parametrize("name", MATH)
def test_the_math_imports_torch_only(name):
    allowed = {"torch", "jaxtyping", *sys.stdlib_module_names}
    place = PACKAGE / name
    for path in [place] if place.suffix else place.glob("*.py"):
        assert set(imports(path, of_package=False)) <= allowed, path


def loaded_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys; print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return {name.split(".")[0] for name in output.split()}


def test_importing_the_package_loads_nothing_heavy():
    assert not loaded_by("import trl_consistent") & {"torch", "trl", "transformers", "vllm", "accelerate"}


def test_the_math_leaves_trl_and_vllm_unloaded():
    loaded = loaded_by("from trl_consistent import correct, mismatch_metrics, PRESETS, METRICS")
    assert "torch" in loaded and not loaded & {"trl", "transformers", "vllm", "accelerate", "matplotlib"}


def test_the_command_answers_without_loading_torch():
    assert "torch" not in loaded_by("import trl_consistent.cli, trl_consistent.run")


def test_the_package_works_without_vllm():
    statement = (
        "import sys; sys.modules['vllm'] = None\n"
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'vllm' else find(name, *a)\n"
        "from trl_consistent import ConsistentGRPOConfig, ConsistentGRPOTrainer"
    )
    assert "trl" in loaded_by(statement)

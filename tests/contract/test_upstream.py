# SPDX-License-Identifier: Apache-2.0
"""`trl_consistent/upstream/` lists every private name of other packages that ours touches, and each is where it says."""

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

import trl_consistent
from trl_consistent import upstream
from trl_consistent.upstream.vllm import ENDPOINTS


PACKAGE = Path(trl_consistent.__file__).parent
UPSTREAM = PACKAGE / "upstream"
TREES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
PROJECTS = {
    module.name: importlib.import_module(f"{upstream.__name__}.{module.name}")
    for module in pkgutil.iter_modules([str(UPSTREAM)])
    if module.name != "substitution"
}
ROWS = [
    (project, owner, name)
    for project, module in PROJECTS.items()
    for owner, names in module.NAMES.items()
    for name in names
]
LISTED = {name for _, _, name in ROWS}
MODULES = {part for _, owner, _ in ROWS for part in owner.partition(":")[0].split(".")}
OURS = [
    "trl_consistent.training.trainer:ConsistentGRPOTrainer",
    "trl_consistent.config:ConsistentGRPOConfig",
    "trl_consistent.rollout.vllm:ConsistentVLLMGeneration",
    "trl_consistent.rollout.client:SocketVLLMClient",
    pytest.param("trl_consistent.rollout.worker:SocketWeightTransferEngine", marks=pytest.mark.vllm),
]
STANDARD = {"_replace", "_asdict", "_fields"}  # of namedtuples


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def source(owner) -> str:
    """The code of a module, or of a class and of what it inherits."""
    if inspect.isclass(owner):
        return "\n".join(inspect.getsource(cls) for cls in owner.__mro__ if cls.__module__ != "builtins")
    return inspect.getsource(owner)


def has(owner, name: str) -> bool:
    """Whether `owner` has the attribute, declares it, or sets it in a method."""
    declared = inspect.isclass(owner) and name in inspect.get_annotations(owner)
    return declared or hasattr(owner, name) or re.search(rf"self\.{name}(: [^=\n]+)? = ", source(owner)) is not None


@pytest.mark.parametrize(
    ("project", "owner", "name"),
    [
        pytest.param(*row, marks=[pytest.mark.vllm] if row[0] == "vllm" or row[2] == "LLM" else [], id=".".join(row))
        for row in ROWS
    ],
)
def test_a_listed_name_is_where_it_says(project, owner, name):
    assert has(pkgutil.resolve_name(owner), name)


@pytest.mark.parametrize("project", PROJECTS)
def test_the_installed_version_is_one_that_was_checked(project):
    for distribution, checked in PROJECTS[project].VERSIONS.items():
        try:
            installed = version(distribution)
        except PackageNotFoundError:
            continue
        assert SpecifierSet(checked).contains(installed.partition("+")[0]), (
            f"{distribution} {installed} is outside of {checked}. If the other contract tests pass with it, widen VERSIONS in "
            f"trl_consistent/upstream/{project}.py."
        )


# --- what the package touches ----------------------------------------------------------------------------------------


def string(node) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def touched_by(node: ast.AST) -> list[str]:
    """Names that one node of a tree reads, writes or imports on something else."""
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [*node.module.split("."), *(alias.name for alias in node.names)]
    if isinstance(node, ast.Call):
        function = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if function == "substituted":
            return [keyword.arg or "" for keyword in node.keywords]
        if function in ("getattr", "hasattr", "setattr") and len(node.args) > 1:
            return [string(node.args[1])]
        if function == "import_module":
            return string(node.args[0]).split(".")
    return []


def touched(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(tree):
        yield from ((node, name) for name in touched_by(node) if name)


def defined() -> set[str]:
    """Private names that the package defines itself."""
    names = set()
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                on_self = isinstance(node, ast.Name) or getattr(node.value, "id", "") in ("self", "cls")
                names |= {node.id if isinstance(node, ast.Name) else node.attr} if on_self else set()
    return {name for name in names if is_private(name)}


def test_every_private_name_that_is_touched_is_ours_or_listed():
    ours = defined() | STANDARD
    missing = {
        f"{path.relative_to(PACKAGE)}:{node.lineno} {name}"
        for path, tree in TREES.items()
        for node, name in touched(tree)
        if is_private(name) and name not in ours | LISTED | MODULES
    }
    assert not missing, "list them in NAMES of trl_consistent/upstream/<project>.py, with what is relied on"


def test_outside_of_upstream_such_names_are_overridden_or_read_on_self_only():
    ours, elsewhere = defined() | STANDARD, set()
    for path, tree in TREES.items():
        if path.parent == UPSTREAM:
            continue
        for node, name in touched(tree):
            if not is_private(name) or name in ours - LISTED or not isinstance(node, ast.Attribute | ast.ImportFrom):
                continue
            value = ast.unparse(node.value) if isinstance(node, ast.Attribute) else "import"
            if value not in ("self", "super()", "GRPOTrainer", "GRPOConfig"):
                elsewhere.add(f"{path.relative_to(PACKAGE)}:{node.lineno} {value}.{name}")
    assert not elsewhere, "give them a function in trl_consistent/upstream/"


@pytest.mark.parametrize("path", OURS)
def test_what_a_subclass_shares_with_its_base_is_listed(path):
    """An override is listed, and a name of ours is not one of the base's by accident."""
    cls = pkgutil.resolve_name(path)
    [base] = cls.__bases__
    [tree] = [node for node in ast.walk(ast.parse(inspect.getsource(cls))) if isinstance(node, ast.ClassDef)]
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    names |= {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "super()")
    }
    shared = {name for name in names if is_private(name) and has(base, name)}
    assert shared <= LISTED, "list an override in trl_consistent/upstream/, rename what is none"


def test_what_is_read_of_a_trainer_is_listed_or_documented():
    documented = {"args", "model", "state", "accelerator", "train", "train_dataset", "add_callback", "log"}
    found = {}
    for path, tree in TREES.items():
        room = path.relative_to(PACKAGE).parts[0]
        for node, name in touched(tree):
            if isinstance(node, ast.Attribute) and room in ("training", "rollout", "callbacks", "upstream"):
                if ast.unparse(node.value) in ("trainer", "self._trainer"):
                    found[name] = f"{path.name}:{node.lineno} {name}"
    assert not {place for name, place in found.items() if name not in LISTED | documented}


def test_what_is_listed_is_touched():
    names = {name for tree in TREES.values() for _, name in touched(tree)}
    names |= {node.name for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    names |= {node.id for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert names >= LISTED, "these rows can go"


def test_vllm_is_reached_through_upstream_only():
    inner = {"llm_engine", "model_executor", "driver_worker", "model_runner"}
    for path, tree in TREES.items():
        if path.parent == UPSTREAM:
            continue
        assert not {name for _, name in touched(tree)} & inner, path
        imports = {
            node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level
        }
        # worker.py is what vLLM itself imports, and extends its classes
        assert "vllm" not in imports or path.name == "worker.py", path


@pytest.mark.vllm
def test_a_server_has_the_endpoints_that_our_client_asks():
    from vllm.entrypoints.serve.dev.rlhf.api_router import router
    from vllm.entrypoints.serve.instrumentator.health import router as health

    assert {f"/{name}" for name in ENDPOINTS} <= {route.path for route in [*router.routes, *health.routes]}

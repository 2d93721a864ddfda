# SPDX-License-Identifier: Apache-2.0
"""Writes the generated tables into the pages of `docs/`: `python scripts/tables.py`. A test compares them.

A table stands between two comments, `<!-- table: NAME -->` and `<!-- end of table -->`. What is around it is written by hand.
"""

import argparse
import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from trl_consistent import METRICS, PRESETS, ConsistentGRPOConfig, cli  # noqa: E402


DOCS = ROOT / "docs"
CAUSES = ROOT / "trl_consistent" / "rollout" / "checks.py"
PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def main() -> None:
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text()
        if (renewed := with_tables(text)) != text:
            page.write_text(renewed)
            print(f"Wrote {page.relative_to(ROOT)}")


def with_tables(page: str) -> str:
    """The text of a page, each generated table in it made anew."""
    return PLACE.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[3]}", page)


def markdown(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    lines = [list(columns)]
    lines += [["---"] * len(lines[0]), *map(list, rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def metric_table() -> str:
    return markdown(
        ("metric", "unit", "meaning", "reduction", "healthy"),
        ((f"`{m.key}`", m.unit, m.meaning, m.reduction, m.healthy_text) for m in METRICS.values()),
    )


def _outside(lower: float | None, upper: float | None) -> str:
    if lower is None:
        return f"above {upper:g}"
    return f"below {lower:g}" if upper is None else f"outside {lower:g} … {upper:g}"


def preset_table() -> str:
    rows = []
    for name, correction in PRESETS.items():
        level, action, bounds = "–", "–", "–"
        if correction.action != "none":
            level, action = correction.level, correction.action
            bounds = f"{correction.lower or 0:g} … {'∞' if correction.upper is None else f'{correction.upper:g}'}"
        on_top = [f"rejects `{r.name}` {_outside(r.lower, r.upper)}" for r in correction.rejections]
        on_top += [f"trust region `{region.kind}` {region.bound:g}" for region in correction.trust_regions]
        rows.append((f"`{name}`", level, action, bounds, ", ".join(on_top) or "–", correction.source))
    return markdown(("`correction`", "ratio", "action", "bounds", "on top", "source"), rows)


def option_table() -> str:
    """One table for each heading in the docstring of the config, with the texts that stand there."""
    doc = inspect.getdoc(ConsistentGRPOConfig) or ""
    sections = re.split(r"\n    > Parameters that control ", doc)[1:]
    return "\n\n".join(map(_option_section, sections))


def _option_section(section: str) -> str:
    title, _, body = section.partition("\n")
    entries = re.findall(r"^    (\w+) \((.*?)\):\n((?:^(?: {8}.*)?\n?)+)", body, re.MULTILINE)
    rows = []
    for name, kind, text in entries:
        kind, _, default = kind.partition(", *optional*")
        default = default.removeprefix(", defaults to ") or "unset"
        meaning = re.sub(r"\[(`[^`]+`)\]", r"\1", " ".join(textwrap.dedent(text).split()))  # no links to classes
        rows.append((f"`{name}`", kind, default, meaning))
    return f"## Options for {title}\n\n" + markdown(("option", "type", "default", "meaning"), rows)


def command_table() -> str:
    """A section for each sub-command, made from its argparse parser."""
    sections = []
    for name, parser in _commands("trl-consistent", cli.build_parser()):
        rows = [(_invocation(action), _help(parser, action)) for action in parser._actions if action.dest != "help"]
        sections.append(f"## `{name}`\n\n{_sentence(parser.description or '')}")
        if rows:
            sections.append(markdown(("argument", "meaning"), rows))
    return "\n\n".join(sections)


def _commands(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """The sub-commands that take arguments, with their full names."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield name, parser
    for group in groups:
        for each in group._choices_actions:
            child = group.choices[each.dest]
            child.description = child.description or each.help
            yield from _commands(f"{name} {each.dest}", child)


def _invocation(action: argparse.Action) -> str:
    value = action.metavar or ("" if action.nargs == 0 else action.dest.upper())
    if action.choices is not None:
        value = f"{{{','.join(map(str, action.choices))}}}"
    if action.nargs == "+":
        value = f"{value} …"
    names = [f"{name} {value}".strip() for name in action.option_strings] or [value]
    return ", ".join(f"`{name}`" for name in names)


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return _sentence(parser._get_formatter()._expand_help(action)) if action.help else ""


def _sentence(text: str) -> str:
    text = text[:1].upper() + text[1:]
    return text if not text or text.endswith(".") else f"{text}."


def cause_table() -> str:
    """What the audit can find, read from the source of the checks: each of them makes `Finding(code, found, cost, remedy)`."""
    rows = []
    for function in ast.parse(CAUSES.read_text()).body:
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Finding":
                code, found, cost, remedy = (_words(argument, function) for argument in node.args)
                rows.append((f"`{code}`", found, cost, remedy, "no" if node.keywords else "yes"))
    return markdown(("code", "found", "what it costs", "what removes it", '`"strict"` refuses'), sorted(rows))


def _words(node: ast.expr, function: ast.AST) -> str:
    """The text that an expression makes; what is known only in a run is set in italics, by its name in the code."""
    match node:
        case ast.Constant(str(text)):
            return text
        case ast.JoinedStr():
            return "".join(_words(part, function) for part in node.values)
        case ast.BinOp():
            return _words(node.left, function) + _words(node.right, function)
        case ast.FormattedValue(value=ast.IfExp(body=ast.Constant(), orelse=ast.Constant())):
            return f"{_words(node.value.body, function)}/{_words(node.value.orelse, function)}"
        case ast.FormattedValue():
            return f"*{_name(node.value)}*"
        case ast.IfExp():
            return "; or ".join(filter(None, (_words(node.body, function), _words(node.orelse, function))))
        case ast.Name():
            return "; or ".join(_words(value, function) for value in _assigned(node.id, function))
    raise TypeError(f"Cannot tell the words of `{ast.unparse(node)}` in {CAUSES.name}: make it a string.")


def _name(node: ast.expr) -> str:
    """What a formatted value is called: `ours` of `str(ours).removeprefix("torch.")`."""
    while isinstance(node, ast.Call):
        node = node.func.value if isinstance(node.func, ast.Attribute) else node.args[0]
    return ast.unparse(node)


def _assigned(name: str, function: ast.AST) -> Iterator[ast.expr]:
    """The values that a local variable is given, in the order of the code."""
    for node in ast.walk(function):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if isinstance(target, ast.Name) and target.id == name:
                yield node.value
            elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = zip(target.elts, node.value.elts, strict=True)
                yield from (value for each, value in pairs if isinstance(each, ast.Name) and each.id == name)


TABLES = {
    "metrics": metric_table,
    "presets": preset_table,
    "options": option_table,
    "commands": command_table,
    "causes": cause_table,
}


if __name__ == "__main__":
    main()

"""The directives of the pages in docs/reference, and the check that every public name has an entry on one of them."""

import argparse
import importlib
import inspect
import re
from types import ModuleType
from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective
from sphinx.util.inspect import signature, stringify_signature
from sphinx.util.nodes import make_refnode
from sphinx.util.rst import escape

import hpcdp.cli
from hpcdp.launch.parser import Parser

PACKAGES = (
    "hpcdp", "hpcdp.autograd", "hpcdp.checkpoint", "hpcdp.collectives", "hpcdp.compression", "hpcdp.data",
    "hpcdp.engine", "hpcdp.kvstore", "hpcdp.nn", "hpcdp.nn.functional", "hpcdp.nn.init", "hpcdp.nn.models",
    "hpcdp.optim", "hpcdp.parallel", "hpcdp.torch", "hpcdp.train",
)  # fmt: skip
"""The packages whose public names must each have an entry."""

_COLON = "\x1f"
logger = logging.getLogger(__name__)


class Listing(SphinxDirective):
    """A table of names with the first lines of their docstrings, and below it the entry of each.

    ``.. listing:: hpcdp.nn`` is followed by names in that module; ``Name()`` leaves out the arguments of what programs
    do not make. With ``:members:`` and names, the entries have these methods and attributes, also inherited ones, in
    place of all own ones that have a docstring. With ``:same-as: hpcdp.collectives`` entries refer to those of that
    module.
    """

    required_arguments = 1
    has_content = True
    option_spec = {"members": directives.unchanged, "same-as": directives.unchanged}  # noqa: RUF012

    def run(self) -> list[nodes.Node]:
        module, home = self.arguments[0], self.options.get("same-as")
        items = [item for line in self.content for item in line.split()]
        names = [item.removesuffix("()") for item in items]
        text = [f".. py:currentmodule:: {module}", "", ".. autosummary::", "   :nosignatures:", ""]
        text += [*(f"   {name}" for name in names), ""]
        try:
            kinds = [_kind(getattr(importlib.import_module(module), name)) for name in names]
        except (ImportError, AttributeError) as error:
            raise self.error(f"{module} cannot be listed: {error}") from error
        for item, name, kind in zip(items, names, kinds, strict=True):
            if home:
                arguments = "(...)" if kind == "function" else ""
                text += [f".. py:{kind}:: {name}{arguments}", "", f"   The same as `{home}.{name}`.", ""]
                continue
            text += [f".. auto{kind}:: {module}.{item}"]
            if kind != "function":
                text += [f"   :members: {', '.join(self.options.get('members', '').split())}"]
            if kind == "exception":
                text += ["   :show-inheritance:"]
            text += [""]
        described = _parsed(self, text)
        if home:  # of two entries with a name, references go to the other
            objects = self.env.domains.python_domain.objects
            objects |= {key: objects[key]._replace(aliased=True) for key in (f"{module}.{name}" for name in names)}
        return described


def _kind(value: object) -> str:
    if inspect.isclass(value):
        return "exception" if issubclass(value, BaseException) else "class"
    return "function"


class Command(SphinxDirective):
    """The usage, options and examples of a command of the command line.

    ``.. command:: hpcdp.cli.launch`` asks the function ``parser`` of that module. A second argument is the name of one
    of that parser's commands.
    """

    required_arguments = 1
    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        parser = importlib.import_module(self.arguments[0]).parser()
        return self._described(parser.commands[self.arguments[1]] if len(self.arguments) > 1 else parser)

    def _described(self, parser: Parser) -> list[nodes.Node]:
        usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
        text = [escape(parser.description or ""), "", f".. program:: {parser.prog}", ""]
        for action in parser._actions:
            if not isinstance(action, argparse._SubParsersAction):
                help_text = (action.help or "") % {"default": action.default, "prog": parser.prog}
                text += [f".. option:: {_synopsis(action)}", "", f"   {escape(help_text)}", ""]
        described = [nodes.literal_block(usage, usage, language="none"), *_parsed(self, text)]
        if parser.epilog:
            described.append(nodes.literal_block(parser.epilog, parser.epilog, language="none"))
        for command in parser.commands.values():
            section = nodes.section("", nodes.title(command.prog, command.prog), ids=[nodes.make_id(command.prog)])
            section.extend(self._described(command))
            described.append(section)
        return described


def _synopsis(action: argparse.Action) -> str:
    metavar = "" if action.nargs == 0 else str(action.metavar or action.dest.upper())
    return ", ".join(f"{option} {metavar}".strip() for option in action.option_strings) or metavar


def _parsed(directive: SphinxDirective, text: list[str]) -> list[nodes.Node]:
    parent = nodes.container()
    source, line = directive.get_source_info()
    directive.state.nested_parse(StringList(text, source=f"{source}:{line}"), 0, parent)
    return parent.children


def add_list_of_pages(app: Sphinx, docname: str, source: list[str]) -> None:
    """Append to an index a hidden toctree of the pages in the first column of its tables.

    So the indexes are plain Markdown, and no page is named twice.
    """
    if docname.endswith("/index"):
        cells = "\n".join(re.findall(r"^\|[^|]*\|", source[0], re.M))
        pages = re.findall(r"\[([^]]*)\]\(([^)]*)\.md\)", cells)
        lines = "\n".join(f"{title} <{page}>" for title, page in pages)
        source[0] += f"\n```{{toctree}}\n:hidden:\n\n{lines}\n```\n"


def resolve_short_names(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Element
) -> nodes.Element | None:
    """Refer ``nn.Dense``, ``Dense`` and ``hpcdp.nn.layers.Dense`` to the entry of ``hpcdp.nn.Dense``."""
    if node["refdomain"] != "py":
        return None
    objects = env.domains.python_domain.objects
    target = node["reftarget"].removeprefix("~")
    last = target.rpartition(".")[2]
    of_class = ".".join(target.split(".")[-2:])
    for wanted in (f"hpcdp.{target}", f".{of_class}", f".{last}"):
        names = [name for name in objects if name == wanted or (wanted[0] == "." and name.endswith(wanted))]
        names = [name for name in names if not objects[name].aliased]
        if len(names) == 1:
            entry = objects[names[0]]
            return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, content, names[0])
    return None


def missing_names(documented: set[str]) -> list[str]:
    """Return the public names that are not among the ``documented`` ones."""
    public = set(PACKAGES)
    for package in PACKAGES:
        public |= {f"{package}.{name}" for name in _public(importlib.import_module(package))}
    return sorted(public - documented)


def _public(module: ModuleType) -> list[str]:
    """Return the names in ``__all__``, or where there is none those that the module defines."""
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return getattr(module, "__all__", [name for name in own if not name.startswith("_")])


def missing_commands(documented: set[str]) -> list[str]:
    """Return the commands of ``hpcdp`` that are not among the ``documented`` ones, such as ``hpcdp train``."""
    return sorted({f"hpcdp {name}" for name in hpcdp.cli.parser().commands} - documented)


def require_all(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of each public name and command without an entry; ``make docs`` makes warnings errors."""
    for name in missing_names(set(env.domains.python_domain.objects)):
        logger.warning("%s is public, and has no entry in docs/reference", name)
    commands = {str(program).replace("-", " ", 1) for program, _ in env.domains.standard_domain.progoptions}
    for name in missing_commands(commands):
        logger.warning("the command %r has no entry in docs/reference/cli.md", name)


def skip_what_refers(
    app: Sphinx, what: str, name: str, value: object, is_skipped: bool, options: object
) -> bool | None:
    """Leave out methods that say no more than which method of a base they are."""
    return True if re.fullmatch(r"See `[\w.]+`\.", inspect.getdoc(value) or "") else None


def hide_colon(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Replace the colons in the first line of an attribute's docstring, before which napoleon expects a type."""
    if what in ("attribute", "data", "property") and lines:
        lines[0] = lines[0].replace(":", _COLON)


def show_colon(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Undo `hide_colon`."""
    lines[:] = [line.replace(_COLON, ":") for line in lines]


def signature_of_init(
    app: Sphinx, what: str, name: str, value: Any, options: object, arguments: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Replace the arguments of a ``__new__`` that passes all on by those of ``__init__``."""
    if what == "class" and arguments == "(*args: ~typing.Any, **kwargs: ~typing.Any)":
        arguments = stringify_signature(signature(value.__init__, bound_method=True), show_return_annotation=False)
    return arguments, returned


def setup(app: Sphinx) -> None:
    """Add all of this to ``app``; Sphinx calls it."""
    app.add_directive("listing", Listing)
    app.add_directive("command", Command)
    app.connect("source-read", add_list_of_pages)
    app.connect("missing-reference", resolve_short_names)
    app.connect("env-check-consistency", require_all)
    app.connect("autodoc-skip-member", skip_what_refers)
    app.connect("autodoc-process-docstring", hide_colon, priority=400)  # napoleon's is 500
    app.connect("autodoc-process-docstring", show_colon, priority=600)
    app.connect("autodoc-process-signature", signature_of_init)

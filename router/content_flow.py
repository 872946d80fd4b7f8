"""Does a chat template only pass messages' texts through, without looking at them?

If so its output for any chat is the same text around other contents, and need be rendered once for
a sequence of roles (see `outlines`). This reads the template's syntax tree and believes nothing:
whatever it does not know makes the answer no. Pure; knows nothing of models.
"""

from collections.abc import Iterable
from enum import IntEnum

from jinja2 import Environment, nodes

from prefixfleet.router.template_names import namespaces_of

_OF_LOOPS = {"index", "index0", "revindex", "revindex0", "first", "last", "length", "depth"}
_TESTS = {"string", "defined", "undefined", "none", "mapping", "iterable", "sequence", "number"}
_FUNCTIONS = {"raise_exception", "namespace", "range", "dict"}
_CHANGING = {"strftime_now", "lipsum"}
_SPECIAL = _CHANGING | {"loop", "self", "caller", "varargs", "kwargs"}
_RESERVED = frozenset(_SPECIAL | _FUNCTIONS)
_OF_DICTS = frozenset(dir(dict))
_ARITHMETIC = nodes.BinExpr | nodes.UnaryExpr
_PLAIN = (
    _ARITHMETIC | nodes.List | nodes.Tuple | nodes.Dict | nodes.Pair | nodes.Slice | nodes.Keyword
)


class Kind(IntEnum):
    """What a value is made of. `FIXED` is equal for all chats of the same roles."""

    FIXED = 0
    TEXT = 1  # a content, with or without fixed text around it; never blank
    MESSAGE = 2
    MESSAGES = 3


class _Looks(Exception):
    """The template does with a content what depends on its characters, or what is not known."""


def only_passes_contents(source: str, environment: Environment) -> bool:
    """Whether a content that is a text, not blank, is at most stripped on its way to the prompt."""
    tree = environment.parse(source)
    namespaces = namespaces_of(tree, _RESERVED)
    if namespaces is None:
        return False
    try:
        _Flow(namespaces).follow(tree)
    except _Looks:
        return False
    return True


class _Flow:
    """Kinds of all names, whatever their scope: a name is the worst of what it is anywhere."""

    def __init__(self, namespaces: frozenset[str]) -> None:
        self._namespaces = namespaces
        self._kinds: dict[str, Kind] = {"messages": Kind.MESSAGES}
        self._fields: dict[tuple[str, str], Kind] = {}
        self._changed = True

    def follow(self, tree: nodes.Template) -> None:
        """Raises `_Looks`."""
        while self._changed:  # each time round some name gets worse, or this ends
            self._changed = False
            self._statements(tree.body)

    def _statements(self, body: Iterable[nodes.Node]) -> None:
        for node in body:
            self._statement(node)

    def _statement(self, node: nodes.Node) -> None:
        if isinstance(node, nodes.Output):
            for part in node.nodes:
                if self._kind(part) > Kind.TEXT:
                    raise _Looks
        elif isinstance(node, nodes.If):
            self._truth(node.test)
            for body in (node.body, node.elif_, node.else_):
                self._statements(body)
        elif isinstance(node, nodes.For) and not node.recursive:
            self._loop(node)
        elif isinstance(node, nodes.Assign):
            self._assign(node.target, self._kind(node.node))
        elif isinstance(node, nodes.Scope):
            self._statements(node.body)
        elif not isinstance(node, nodes.Break | nodes.Continue):
            raise _Looks

    def _loop(self, node: nodes.For) -> None:
        kind = self._kind(node.iter)
        if kind in (Kind.TEXT, Kind.MESSAGE):
            raise _Looks
        self._assign(node.target, Kind.MESSAGE if kind else Kind.FIXED)
        if node.test is not None:
            self._truth(node.test)
        self._statements(node.body)
        self._statements(node.else_)

    def _assign(self, target: nodes.Node, kind: Kind) -> None:
        if isinstance(target, nodes.Name):
            known = self._kinds.get(target.name, Kind.FIXED)
            self._changed |= (worse := _either(known, kind)) != known
            self._kinds[target.name] = worse
        elif isinstance(target, nodes.NSRef):
            field = (target.name, target.attr)
            known = self._fields.get(field, Kind.FIXED)
            self._changed |= (worse := _either(known, kind)) != known
            self._fields[field] = worse
        elif kind:
            raise _Looks

    def _truth(self, node: nodes.Node) -> None:
        """A test of a content itself is true: it is not blank."""
        if isinstance(node, nodes.And | nodes.Or):
            self._truth(node.left)
            self._truth(node.right)
        else:
            self._kind(node)

    def _kind(self, node: nodes.Node | None) -> Kind:
        """What the value of an expression is made of. Raises `_Looks`."""
        if node is None or isinstance(node, nodes.Const | nodes.TemplateData):
            return Kind.FIXED
        if isinstance(node, nodes.Name):
            return self._name(node.name)
        if isinstance(node, nodes.Getattr | nodes.Getitem):
            return self._part(node)
        if isinstance(node, nodes.Filter):
            return self._filtered(node)
        if isinstance(node, nodes.Add | nodes.Concat):
            return self._joined(node)
        if isinstance(node, nodes.CondExpr):
            self._truth(node.test)
            return _either(self._kind(node.expr1), self._kind(node.expr2))
        return self._computed(node)

    def _computed(self, node: nodes.Node) -> Kind:
        """What is fixed, or this raises."""
        if isinstance(node, nodes.Not):
            self._truth(node.node)
        elif isinstance(node, nodes.Test):
            self._test(node)
        elif isinstance(node, nodes.Compare):
            self._compare(node)
        elif isinstance(node, nodes.Call):
            self._call(node)
        elif isinstance(node, _PLAIN):
            self._all_fixed(node)
        else:
            raise _Looks
        return Kind.FIXED

    def _all_fixed(self, node: nodes.Node) -> None:
        if any(self._kind(child) for child in node.iter_child_nodes()):
            raise _Looks

    def _name(self, name: str) -> Kind:
        if name in _SPECIAL or name in self._namespaces:
            raise _Looks  # it may be another name for what is looked after by its own
        return self._kinds.get(name, Kind.FIXED)

    def _part(self, node: nodes.Getattr | nodes.Getitem) -> Kind:
        """``of.part``, ``of['part']``, ``of[3]`` or a slice."""
        part = node.attr if isinstance(node, nodes.Getattr) else _constant(node.arg)
        if isinstance(node.node, nodes.Name) and isinstance(part, str):
            if node.node.name == "loop" and part in _OF_LOOPS:
                return Kind.FIXED
            if node.node.name in self._namespaces:  # a field that is never set is fixed
                return self._fields.get((node.node.name, part), Kind.FIXED)
        of = self._kind(node.node)
        if of is Kind.MESSAGES and isinstance(node, nodes.Getitem):
            if self._kind(node.arg):
                raise _Looks
            return Kind.MESSAGES if isinstance(node.arg, nodes.Slice) else Kind.MESSAGE
        if of is Kind.MESSAGE and isinstance(part, str) and part not in _OF_DICTS:
            return Kind.TEXT if part == "content" else Kind.FIXED
        if of or (isinstance(node, nodes.Getitem) and self._kind(node.arg)):
            raise _Looks
        return Kind.FIXED

    def _joined(self, node: nodes.Add | nodes.Concat) -> Kind:
        kinds = [self._kind(child) for child in node.iter_child_nodes()]
        if max(kinds) > Kind.TEXT:
            raise _Looks
        return max(kinds)

    def _filtered(self, node: nodes.Filter) -> Kind:
        kind = self._kind(node.node)
        if node.node is None or node.dyn_args or node.dyn_kwargs:
            raise _Looks
        for argument in (*node.args, *node.kwargs):
            if self._kind(argument) or _constant(argument) == "random":
                raise _Looks
        if kind is Kind.TEXT and node.name == "trim" and not node.args and not node.kwargs:
            return Kind.TEXT
        if kind is Kind.MESSAGES and node.name in ("length", "count"):
            return Kind.FIXED
        if kind or node.name == "random":
            raise _Looks
        return Kind.FIXED

    def _test(self, node: nodes.Test) -> None:
        if isinstance(node.node, nodes.Name) and node.node.name in _CHANGING:
            return
        if self._kind(node.node) and node.name not in _TESTS:
            raise _Looks
        if any(self._kind(argument) for argument in node.args) or node.kwargs:
            raise _Looks

    def _compare(self, node: nodes.Compare) -> None:
        kind, (operand, *more) = self._kind(node.expr), node.ops
        to = self._kind(operand.expr)
        if not more and operand.op in ("in", "notin") and isinstance(node.expr, nodes.Const):
            allowed = to in (Kind.FIXED, Kind.MESSAGE)  # which fields a message has is fixed
        elif not more and operand.op in ("eq", "ne") and isinstance(operand.expr, nodes.Const):
            allowed = kind is Kind.FIXED or (
                kind is Kind.TEXT and operand.expr.value in ("", None)  # a text is not blank
            )
        else:
            allowed = not (kind or any(self._kind(each.expr) for each in node.ops))
        if not allowed:
            raise _Looks

    def _call(self, node: nodes.Call) -> None:
        if node.dyn_args or node.dyn_kwargs:
            raise _Looks
        if isinstance(node.node, nodes.Name):
            if node.node.name not in _FUNCTIONS:
                raise _Looks
        elif self._kind(node.node):
            raise _Looks
        for argument in (*node.args, *node.kwargs):
            if self._kind(argument):
                raise _Looks


def _either(one: Kind, other: Kind) -> Kind:
    """The worse of two; what is of a message and what is a text have no common treatment."""
    if one is not other and Kind.FIXED not in (one, other):
        raise _Looks
    return max(one, other)


def _constant(node: nodes.Node) -> object:
    return node.value if isinstance(node, nodes.Const) else None

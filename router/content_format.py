"""Does a chat template loop over the parts of a message's content, or does it want one text?

vLLM decides this from the template's syntax tree, and so must we: the two forms render to
different tokens. Pure; knows nothing of models.
"""

from collections.abc import Iterator

from jinja2 import Environment, nodes


def wants_parts(source: str, environment: Environment) -> bool:
    """True if the template loops over a message's content, so that it must get a list of parts.

    A template that hides the loop behind an assignment to something else than a plain name
    counts as wanting text, as in the engine.
    """
    tree = environment.parse(source)
    try:
        message_names = set(_loop_names(tree, set(_aliases(tree, "messages"))))
    except _Unreadable:
        return False
    return any(_is_over_content(loop, message_names, tree) for loop in tree.find_all(nodes.For))


class _Unreadable(Exception):
    """An assignment or loop target that is no plain name."""


def _is_over_content(loop: nodes.For, message_names: set[str], tree: nodes.Template) -> bool:
    if any(_is_attribute(loop.iter, name, "content") for name in message_names):
        return True
    if not isinstance(loop.iter, nodes.Name):
        return False
    macros = [macro for macro in tree.find_all(nodes.Macro) if loop in macro.find_all(nodes.For)]
    if not macros:
        return loop.iter.name == "content"
    return any(loop.iter.name in _content_params(m, message_names, tree) for m in macros)


def _content_params(
    macro: nodes.Macro, message_names: set[str], tree: nodes.Template
) -> Iterator[str]:
    """Parameters of ``macro`` that some call hands a message's content to."""
    names = [argument.name for argument in macro.args]
    for call in tree.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        given = [*zip(names, call.args, strict=False), *((k.key, k.value) for k in call.kwargs)]
        for name, value in given:
            if name in names and any(_is_attribute(value, m, "content") for m in message_names):
                yield name


def _aliases(tree: nodes.Template, name: str) -> Iterator[str]:
    """``name`` and every variable that is assigned from it, directly or not."""
    yield name
    waiting = [name]
    while waiting:
        current = waiting.pop(0)
        for assign in tree.find_all(nodes.Assign):
            if _is_variable(assign.node, current):
                target = _plain_name(assign.target)
                yield target
                if target != current:
                    waiting.append(target)


def _loop_names(tree: nodes.Template, lists: set[str]) -> Iterator[str]:
    for loop in tree.find_all(nodes.For):
        if any(_is_variable(loop.iter, name) for name in lists):
            yield _plain_name(loop.target)


def _plain_name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _Unreadable
    return target.name


def _is_variable(node: nodes.Node | None, name: str) -> bool:
    node = _unwrap(node)
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _is_attribute(node: nodes.Node | None, name: str, attribute: str) -> bool:
    node = _unwrap(node)
    if isinstance(node, nodes.Getattr):
        return node.attr == attribute and _is_bare(node.node, name)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return bool(node.arg.value == attribute) and _is_bare(node.node, name)
    return False


def _is_bare(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _unwrap(node: nodes.Node | None) -> nodes.Node | None:
    """What is under filters, tests and slices."""
    while True:
        if isinstance(node, nodes.Filter | nodes.Test) or (
            isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        ):
            node = node.node
        else:
            return node

"""Which names of a chat template stand for namespaces, and for nothing else. Pure."""

from jinja2 import nodes

_MAKER = "namespace"


def namespaces_of(tree: nodes.Template, reserved: frozenset[str]) -> frozenset[str] | None:
    """Names that only ``{% set NAME = namespace(...) %}`` binds.

    None if that is not all that the template does with namespaces (then one may have two names, or
    a name stand for one here and for something else there), or if it binds a ``reserved`` name.
    """
    made = [node for node in tree.find_all(nodes.Assign) if _makes_namespace(node)]
    targets = {id(node.target) for node in made}
    makers = {id(node.node.node) for node in made if isinstance(node.node, nodes.Call)}
    found = frozenset(node.target.name for node in made if isinstance(node.target, nodes.Name))
    for name in tree.find_all(nodes.Name):
        if name.name == _MAKER and id(name) not in makers:
            return None
        if name.ctx != "load" and name.name in reserved | found and id(name) not in targets:
            return None
    fields_of = {field.name for field in tree.find_all(nodes.NSRef)}
    bound_before = reserved | {"messages"}
    return None if found & bound_before or fields_of - found else found


def _makes_namespace(node: nodes.Assign) -> bool:
    return (
        isinstance(node.target, nodes.Name)
        and isinstance(node.node, nodes.Call)
        and isinstance(node.node.node, nodes.Name)
        and node.node.node.name == _MAKER
    )

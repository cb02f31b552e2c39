"""Which changes to the code count as mutants: a part of cosmic-ray's, and two kinds of our own.

cosmic-ray replaces each binary operator by each of the eleven others. Of those the ones that a
slip of the hand would make are kept; the rest add numbers of mutants and no kinds.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
# cosmic-ray comes with an extra of its own.

import ast
import functools

import cosmic_ray.plugins
import parso
from cosmic_ray.operators.operator import Example, Operator
from cosmic_ray.work_item import MutationSpec
from parso.python.tree import Name

BINARY = {
    "Add": ("Sub",), "Sub": ("Add",), "Mul": ("Add", "FloorDiv"), "Div": ("Mul",),
    "FloorDiv": ("Mul", "Mod"), "Mod": ("FloorDiv", "Add"), "Pow": ("Mul",), "RShift": ("LShift",),
    "LShift": ("RShift",), "BitOr": ("BitAnd",), "BitAnd": ("BitOr",), "BitXor": ("BitOr",),
}  # fmt: skip
COMPARISON = {
    "Eq": ("NotEq",), "NotEq": ("Eq",), "Is": ("IsNot",), "IsNot": ("Is",), "Lt": ("LtE", "GtE"),
    "LtE": ("Lt", "Gt"), "Gt": ("GtE", "LtE"), "GtE": ("Gt", "Lt"),
}  # fmt: skip
UNARY = {"Delete": ("USub", "Invert", "Not")}
_TABLES = {
    "core/ReplaceBinaryOperator": BINARY,
    "core/ReplaceComparisonOperator": COMPARISON,
    "core/ReplaceUnaryOperator": UNARY,
}
_FAMILIES = tuple(_TABLES)
REPLACEMENTS = {
    f"{family}_{first}_{second}"
    for family, table in _TABLES.items()
    for first, seconds in table.items()
    for second in seconds
}
OPPOSITES = {"maximum": "minimum", "max": "min", "any": "all", "zeros": "ones"}
OPPOSITES |= {second: first for first, second in OPPOSITES.items()}


class DeleteCall(Operator):
    """Puts `pass` in the place of a statement that is nothing but a call, as of a check."""

    def mutation_positions(self, node):
        """The whole statement, where there is one."""
        if node.type == "simple_stmt":
            call = node.children[0]
            if call.type == "atom_expr" and call.children[-1].get_code().startswith("("):
                yield call.start_pos, call.end_pos

    def mutate(self, node, index):
        """The statement with `pass` for its call."""
        call = node.children[0]
        node.children[0] = Name("pass", call.start_pos, call.get_first_leaf().prefix)
        return node

    @classmethod
    def examples(cls):
        """What it does."""
        return (Example("check(x)\n", "pass\n"),)


class SwapFunction(Operator):
    """Calls the opposite of a function: minimum for maximum, all for any, and so on."""

    def mutation_positions(self, node):
        """The function's name, where it is called or handed over."""
        if node.type == "name" and node.value in OPPOSITES:
            before, after = node.get_previous_leaf(), node.get_next_leaf()
            if (before is not None and before.value == ".") or after.value == "(":
                yield node.start_pos, node.end_pos

    def mutate(self, node, index):
        """The other name."""
        node.value = OPPOSITES[node.value]
        return node

    @classmethod
    def examples(cls):
        """What it does."""
        return (Example("jnp.maximum(a, b)", "jnp.minimum(a, b)"),)


class SwapWhere(Operator):
    """Exchanges the second and third arguments of `where`."""

    def mutation_positions(self, node):
        """The call's arguments."""
        if (
            node.type == "arglist"
            and len(node.children) >= 5
            and node.parent.get_previous_sibling() is not None
            and node.parent.get_previous_sibling().get_code().endswith("where")
        ):
            yield node.start_pos, node.end_pos

    def mutate(self, node, index):
        """The arguments in the other order."""
        node.children[2], node.children[4] = node.children[4], node.children[2]
        return node

    @classmethod
    def examples(cls):
        """What it does."""
        return (Example("where(a, b, c)", "where(a, c, b)"),)


OURS = {operator.__name__: operator for operator in (DeleteCall, SwapFunction, SwapWhere)}
cosmic_ray.plugins.OPERATOR_PROVIDERS["ours"] = OURS


# What parso calls an expression with an operator between its parts. A star elsewhere is that of a
# signature or of an unpacked value.
_EXPRESSIONS = {"arith_expr", "term", "shift_expr", "and_expr", "xor_expr", "expr", "power"}


def is_wanted(mutation: MutationSpec, source: str) -> bool:
    """Whether a mutant of the source is of a kept kind, and of code rather than of a type."""
    kind, where = mutation.operator_name, mutation.start_pos
    if kind.startswith(_FAMILIES) and kind not in REPLACEMENTS:
        return False
    if "ReplaceBinary" in kind:
        leaf = _tree(source).get_leaf_for_position(where)
        if leaf is None or leaf.parent.type not in _EXPRESSIONS:
            return False
    return not any(first <= where < last for first, last in _types(source))


_tree = functools.cache(parso.parse)


@functools.cache
def _types(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where annotations and imports for type checkers stand."""
    nodes = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.arg, ast.AnnAssign)):
            nodes.append(node.annotation)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            nodes.append(node.returns)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            nodes.append(node)
    return [
        ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
        for node in nodes
        if node is not None
    ]

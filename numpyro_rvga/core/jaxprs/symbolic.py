"""Which affine functions of theta does a scalar depend on?

A log-likelihood term l(theta, row) is read as a JAX program and split into

    constants(row), predictors(theta, row) in R^C (affine in theta), density(u, constants),

with l = density(predictors): the few numbers through which theta enters. Three facts keep C small. Sums are kept
as "affine part + rest", so ``alpha + a[g] + x @ b`` is one predictor. Indexing is pushed through elementwise
operations, products of matrices, sums and triangular solves, so ``((tau[:, None] * L) @ z).T[g, 0]`` needs the column
``z[:, g]`` and not all of ``z``. And products of exponentials are exponentials of sums, so ``tau * lambda`` is one
predictor on the log scale.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple, overload

import jax
import jax.numpy as jnp

from ..pytrees import PyTree
from .entries import entries_within
from .graph import Graph
from .nodes import AFFINE, CONSTANT, POINTWISE, Node, Value, ancestors, evaluate_nodes
from .primitives import ARITHMETIC
from .pushing import materialize, predictor
from .selection import Selection, everything, select_entries


class Factorization(NamedTuple):
    """``fun(theta, *row) == density(predictors(theta, row), constants(row))``.

    :ivar int num_predictors: C.
    :ivar bool is_affine: whether ``fun`` itself is affine in theta (then C = 1 and ``density`` is the identity).
    :ivar value: theta, row, constants(row) -> ``fun(theta, *row)``. The predictors are joined to no vector, through all
        of which the derivative in one of them would pass.
    """

    num_predictors: int
    is_affine: bool
    predictors: Callable[[jax.Array, tuple], jax.Array]
    constants: Callable[[tuple], tuple]
    density: Callable[[jax.Array, tuple], jax.Array]
    value: Callable[[jax.Array, tuple, tuple], jax.Array]

    def at_most(self, size: int) -> Factorization:
        """The factorization; with theta (P,) itself as predictors, where these would be more numbers. ``size``: P."""
        if self.num_predictors <= size:
            return self

        def density(u, row):
            return self.density(self.predictors(u, row), self.constants(row))

        value = lambda theta, row, values: density(theta, values)  # noqa: E731
        return Factorization(size, False, lambda theta, row: theta, lambda row: row, density, value)


class Reading:
    """A program of theta whose outputs can be split, each by itself.

    :param fun: ``fun(theta, *row) -> dict of scalars``.
    :param theta: shape and dtype of theta, ``(P,)``.
    :param row: abstract or concrete arguments (pytrees), used for their shapes only.
    """

    def __init__(self, fun: Callable, theta: jax.ShapeDtypeStruct, *row: PyTree):
        self._graph, self._theta = Graph(), theta
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), row)
        jaxpr, shapes = jax.make_jaxpr(fun, return_shape=True)(theta, *abstract)
        self._theta_node = Node(AFFINE, theta.shape, theta.dtype, name="theta")
        leaves = jax.tree.leaves_with_path(abstract)
        self._row_nodes = {path: Node(CONSTANT, x.shape, x.dtype, name="row") for path, x in leaves}
        inputs = [Value(theta.shape, theta.dtype, self._theta_node, None)]
        inputs += [Value(x.shape, x.dtype, None, self._row_nodes[path]) for path, x in leaves]
        outputs = self._graph.interpret(jaxpr.jaxpr, jaxpr.consts, inputs)
        self._outputs = jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    @overload
    def split(self, output: str) -> Factorization: ...

    @overload
    def split(self, output: str, through: str | None) -> Factorization | None: ...

    def split(self, output: str, through: str | None = None) -> Factorization | None:
        """An output's affine predictors and a density of them.

        :param through: ``"log"`` or ``"logit"``: split the log (or the logit) of the output instead, if it can be
            read off the program as an affine function of theta; otherwise None is returned.
        """
        out = self._outputs[output]
        if through is not None:
            out = {"log": self._graph.log_of, "logit": self._graph.logit_of}[through](out)
            if out is None or not (out.is_affine or out.is_constant):
                return None
        return self._close(out)

    def _close(self, out: Value) -> Factorization:
        """An output as a function of affine predictors of theta and of what it takes of the row."""
        graph, theta, theta_node, row_nodes = self._graph, self._theta, self._theta_node, self._row_nodes
        derived: dict[int, Node] = {}
        if out.is_affine:
            root = predictor(graph, out.affine)
            leaves = [root]
        else:
            root = materialize(graph, out)
            leaves = [n for n in ancestors([root]) if n.is_predictor]
            leaves, derived = _fewest(graph, leaves)
        live = ancestors([root, *derived.values()], stop=_is_of_rows)
        constants = [n for n in live if _is_of_rows(n)]
        sizes = [leaf.size for leaf in leaves]
        affine_nodes = [leaf.stands_for for leaf in leaves]

        def bind_row(row):
            known = [(row_nodes[path], x) for path, x in jax.tree.leaves_with_path(row) if path in row_nodes]
            return {n.serial: jnp.reshape(x, n.shape) for n, x in known}

        def affine_values(theta_value, row):
            environment = bind_row(row) | {theta_node.serial: jnp.reshape(theta_value, theta_node.shape)}
            return evaluate_nodes(affine_nodes, environment)

        @jax.jit  # many programs that core.compilation compiles trace it: JAX keeps its jaxpr for each shape
        def predictors(theta_value, row):
            flat = [jnp.ravel(v).astype(theta.dtype) for v in affine_values(theta_value, row)]
            return jnp.concatenate(flat) if flat else jnp.zeros((0,), theta.dtype)

        def constant_values(row):
            return tuple(evaluate_nodes(constants, bind_row(row)))

        def at_pieces(pieces, values):
            environment = {n.serial: v for n, v in zip(constants, values)}
            environment |= {n.serial: jnp.reshape(piece, n.shape).astype(n.dtype) for n, piece in zip(leaves, pieces)}
            for serial, node in reversed(derived.items()):  # newer ones may be sums of older ones
                environment[serial] = evaluate_nodes([node], environment)[0]
            return jnp.reshape(evaluate_nodes([root], environment)[0], ())

        @jax.jit
        def density(u, values):
            pieces = jnp.split(u, list(itertools.accumulate(sizes))[:-1]) if sizes else []
            return at_pieces(pieces, values).astype(u.dtype)

        def value(theta_value, row, values):
            return at_pieces(affine_values(theta_value, row), values).astype(theta.dtype)

        return Factorization(sum(sizes), out.is_affine, predictors, constant_values, density, value)


def _is_of_rows(node: Node) -> bool:
    """Whether it is a constant, and more than a number that the program itself states."""
    return node.kind == CONSTANT and any(n.name == "row" or n.size > 1 for n in ancestors([node]))


def factorize(fun: Callable, theta: jax.ShapeDtypeStruct, *row: PyTree) -> Factorization:
    """Split a scalar function of theta into affine predictors and a density of them; see :class:`Reading`.

    :param fun: ``fun(theta, *row) -> scalar``.
    """
    return Reading(lambda *arguments: {"value": fun(*arguments)}, theta, *row).split("value")


def _fewest(graph: Graph, leaves: list[Node]) -> tuple[list[Node], dict[int, Node]]:
    """As :func:`_independent`, with predictors that several are sums of in place of these, where they are fewer.

    A row that integrates over times has a predictor a + b t for each of them: a and b are two.
    """
    kept, derived = _independent(leaves)
    for depth in (1, math.inf):
        added: set[Node] = set()
        for members, together in _tied([_addends(leaf.stands_for, depth) for leaf in kept]):
            sums = {kept[i].stands_for for i in members}
            if sum(node.size for node in together) < sum(node.size for node in sums):
                added |= together - sums
        shared = [predictor(graph, affine) for affine in sorted(added, key=lambda node: node.serial)]
        kept, more = _independent(kept + shared)
        derived |= more
    return kept, derived


def _addends(affine: Node, depth: float) -> set[Node]:
    """The affine nodes whose multiples a node is the sum of, with sums inside sums written out to some depth."""
    while affine.name in ARITHMETIC - {"sum"}:
        affine = next(parent for parent in affine.parents if parent.kind == AFFINE)
    if affine.name != "sum" or not depth:
        return {affine}
    return set().union(*[_addends(parent, depth - 1) for parent in affine.parents])


def _tied(sets: list[set[Node]]) -> list[tuple[list[int], set[Node]]]:
    """Sets that share members, directly or by others: their numbers, and all members."""
    groups: list[tuple[list[int], set[Node]]] = []
    for i, own in enumerate(sets):
        touched = [group for group in groups if group[1] & own]
        groups = [group for group in groups if not group[1] & own]
        groups.append((sum([g[0] for g in touched], [i]), own.union(*[g[1] for g in touched])))
    return groups


def _independent(leaves: list[Node]) -> tuple[list[Node], dict[int, Node]]:
    """Drop predictors that are entries, sums and multiples of other predictors; say how to compute them from those."""
    kept, derived = {n.stands_for.serial: n for n in leaves}, {}

    def expression(affine: Node, top: bool) -> Node | None:
        if not top and affine.serial in kept:
            return kept[affine.serial]
        entries = _entries_of_others(affine, [leaf for leaf in kept.values() if leaf.stands_for is not affine])
        if entries is not None or affine.name not in ARITHMETIC:
            return entries
        parents = [expression(p, False) if p.kind == AFFINE else p for p in affine.parents]
        if any(p is None for p in parents):
            return None
        return Node(POINTWISE, affine.shape, affine.dtype, parents, affine.apply, affine.in_shapes)

    for leaf in sorted(leaves, key=lambda n: -n.stands_for.serial):
        constant = expression(leaf.stands_for, True)
        if constant is not None:
            derived[leaf.serial] = constant
            del kept[leaf.stands_for.serial]
    return [n for n in leaves if n.serial not in derived], derived


def _entries_of_others(affine: Node, leaves: list[Node]) -> Node | None:
    """Selected entries as those of a predictor that has them all."""
    operand, selection = _selected_from(affine)
    for leaf in leaves:
        other, inner = _selected_from(leaf.stands_for)
        if leaf.stands_for is operand:
            other, inner = operand, everything(operand.shape)
        if other is not operand:
            continue
        if inner.source == selection.source:  # in another shape
            shape = selection.shape
            return Node(POINTWISE, shape, affine.dtype, [leaf], lambda entries: entries, [shape], "entries")
        within = entries_within(operand.shape, inner, selection)
        if within is not None:
            places, chosen = within
            select = select_entries(chosen)

            def apply(array, *indices, places=places, select=select):
                return jnp.reshape(jnp.ravel(array)[select(jnp.asarray(places), *indices)], selection.shape)

            parents, in_shapes = [leaf, *chosen.nodes], [leaf.shape, *chosen.node_shapes]
            return Node(POINTWISE, selection.shape, affine.dtype, parents, apply, in_shapes, "entries")
    return None


def _selected_from(affine: Node) -> tuple[Node, Selection]:
    """An array, and the selection from it that an affine node is: if need be, of all entries of its own."""
    if affine.selection is not None:
        return affine.parents[0], affine.selection
    return affine.pushed or (affine, everything(affine.shape))

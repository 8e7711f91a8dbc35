"""Which affine functions of theta does a scalar depend on?

A log-likelihood term l(theta, row) is read as a JAX program and split into

    constants(row), predictors(theta, row) in R^C (affine in theta), density(u, constants),

with l = density(predictors): the few numbers through which theta enters. Three facts keep C small. Sums are kept
as "affine part + rest", so ``alpha + a[g] + x @ b`` is one predictor. Elementwise operations are kept symbolic
and indexing is pushed through them, so ``(tau * z)[g]`` needs ``z[g]`` and not all of ``z``. And products of
exponentials are exponentials of sums, so ``tau * lambda`` is one predictor on the log scale.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from .linalg import cholesky_by_columns, solve_triangular

CONSTANT, AFFINE, POINTWISE, OPAQUE = "constant", "affine", "pointwise", "opaque"

POINTWISE_PRIMITIVES = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp copy copy_p
    convert_element_type cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac integer_pow
    is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or polygamma pow reduce_precision
    regularized_incomplete_beta rem round rsqrt select_n sign sin sinh sqrt square stop_gradient sub tan tanh xor
    zeta""".split()
)
SELECTING_PRIMITIVES = frozenset(
    "reshape squeeze expand_dims broadcast_in_dim transpose rev slice dynamic_slice gather".split()
)
LINEAR_PRIMITIVES = frozenset(
    """reduce_sum cumsum concatenate stack unstack split tile pad dynamic_update_slice scatter scatter-add scatter_add
    real imag""".split()
)
BILINEAR_PRIMITIVES = frozenset(["dot_general", "conv_general_dilated"])
ARITHMETIC = frozenset("sum offset mul div neg copy convert_element_type".split())
INLINED_PRIMITIVES = frozenset("jit pjit closed_call core_call remat checkpoint remat2".split())

UNROLLED_SIZE = 16  # batches of small LAPACK calls are slow, and two at once deadlock jaxlib's pool of two threads

_serial = itertools.count()


class Node:
    """One array-valued step of the symbolic program. Arrays of one element are held as scalars."""

    __slots__ = (
        "kind",
        "shape",
        "dtype",
        "parents",
        "apply",
        "in_shapes",
        "name",
        "operand",
        "serial",
        "leaf_of",
        "unwraps",
    )

    def __init__(self, kind, shape, dtype, parents=(), apply=None, in_shapes=None, name="", operand=None):
        self.kind, self.dtype, self.parents, self.apply, self.name = kind, dtype, tuple(parents), apply, name
        self.shape = () if math.prod(shape) == 1 else tuple(shape)
        self.in_shapes = tuple(p.shape for p in self.parents) if in_shapes is None else tuple(in_shapes)
        self.operand = operand  # for exp, log and logistic: the Value it was applied to
        self.leaf_of: Node | None = None  # for a predictor: the affine node that it stands for
        self.unwraps: Node | None = None  # for a concatenation of predictors: likewise
        self.serial = next(_serial)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Value(NamedTuple):
    """An intermediate result of the program: ``affine + rest``, either of which may be absent."""

    shape: tuple[int, ...]
    dtype: Any
    affine: Node | None
    rest: Node | None

    @property
    def is_constant(self) -> bool:
        return self.affine is None and self.rest.kind == CONSTANT

    @property
    def is_affine(self) -> bool:
        return self.rest is None


class Factorisation(NamedTuple):
    """``fun(theta, *row) == density(predictors(theta, row), constants(row))``.

    :ivar int num_predictors: C.
    :ivar bool is_affine: whether ``fun`` itself is affine in theta (then C = 1 and ``density`` is the identity).
    """

    num_predictors: int
    is_affine: bool
    predictors: Callable[[jax.Array, tuple], jax.Array]
    constants: Callable[[tuple], tuple]
    density: Callable[[jax.Array, tuple], jax.Array]


def factorise(
    fun: Callable, theta: jax.ShapeDtypeStruct, *row: Any, through: str | None = None
) -> Factorisation | None:
    """Split a scalar function of theta into affine predictors and a density of them.

    :param fun: ``fun(theta, *row) -> scalar``.
    :param theta: shape and dtype of theta, ``(P,)``.
    :param row: abstract or concrete arguments (pytrees), used for their shapes only.
    :param through: ``"log"`` or ``"logit"``: factorise the log (or the logit) of ``fun`` instead, if it can be
        read off the program as an affine function of theta; otherwise None is returned.
    :return: the factorisation.
    """
    graph = _Graph()
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), row)
    jaxpr = jax.make_jaxpr(fun)(theta, *abstract)
    leaves, treedef = jax.tree.flatten(abstract)
    theta_node = Node(AFFINE, theta.shape, theta.dtype, name="theta")
    row_nodes = [Node(CONSTANT, x.shape, x.dtype, name="row") for x in leaves]
    inputs = [Value(theta.shape, theta.dtype, theta_node, None)]
    inputs += [Value(x.shape, x.dtype, None, n) for x, n in zip(leaves, row_nodes)]
    (out,) = graph.interpret(jaxpr.jaxpr, jaxpr.consts, inputs)
    if through is not None:
        out = {"log": graph.log_of, "logit": graph.logit_of}[through](out)
        if out is None or not (out.is_affine or out.is_constant):
            return None
    return _close(graph, out, theta_node, row_nodes, theta, treedef)


def _close(graph, out, theta_node, row_nodes, theta, treedef) -> Factorisation:
    derived: dict[int, Node] = {}
    if out.is_affine:
        root = graph.leaf(out.affine)
        leaves = [root]
    else:
        root = graph.materialise(out)
        leaves = [n for n in _ancestors([root]) if n.leaf_of is not None]
        leaves, derived = _independent(graph, leaves)
    live = _ancestors([root, *derived.values()], stop=lambda n: n.kind == CONSTANT)
    constants = [n for n in live if n.kind == CONSTANT]
    sizes = [leaf.size for leaf in leaves]
    affine_nodes = [leaf.leaf_of for leaf in leaves]

    def bind_row(row):
        flat = jax.tree.leaves(row)
        return {n.serial: jnp.reshape(x, n.shape) for n, x in zip(row_nodes, flat)}

    def predictors(theta_value, row):
        known = bind_row(row) | {theta_node.serial: jnp.reshape(theta_value, theta_node.shape)}
        values = _evaluate(affine_nodes, known)
        flat = [jnp.ravel(v).astype(theta.dtype) for v in values]
        return jnp.concatenate(flat) if flat else jnp.zeros((0,), theta.dtype)

    def constant_values(row):
        return tuple(_evaluate(constants, bind_row(row)))

    def density(u, values):
        pieces = jnp.split(u, list(itertools.accumulate(sizes))[:-1]) if sizes else []
        known = {n.serial: v for n, v in zip(constants, values)}
        known |= {n.serial: jnp.reshape(piece, n.shape).astype(n.dtype) for n, piece in zip(leaves, pieces)}
        for serial, node in reversed(derived.items()):  # newer ones may be sums of older ones
            known[serial] = _evaluate([node], known)[0]
        return jnp.reshape(_evaluate([root], known)[0], ()).astype(u.dtype)

    return Factorisation(sum(sizes), out.is_affine, predictors, constant_values, density)


def _independent(graph, leaves: list[Node]) -> tuple[list[Node], dict[int, Node]]:
    """Drop predictors that are sums and multiples of other predictors; say how to compute them from those."""
    kept, derived = {n.leaf_of.serial: n for n in leaves}, {}

    def expression(affine: Node, top: bool) -> Node | None:
        if not top and affine.serial in kept:
            return kept[affine.serial]
        if affine.name not in ARITHMETIC:
            return None
        parents = [expression(p, False) if p.kind == AFFINE else p for p in affine.parents]
        if any(p is None for p in parents):
            return None
        return Node(POINTWISE, affine.shape, affine.dtype, parents, affine.apply, affine.in_shapes)

    for leaf in sorted(leaves, key=lambda n: -n.leaf_of.serial):
        found = expression(leaf.leaf_of, True)
        if found is not None:
            derived[leaf.serial] = found
            del kept[leaf.leaf_of.serial]
    return [n for n in leaves if n.serial not in derived], derived


def _ancestors(roots: Sequence[Node], stop: Callable[[Node], bool] = lambda n: False) -> list[Node]:
    seen, stack = {}, list(roots)
    while stack:
        node = stack.pop()
        if node.serial in seen:
            continue
        seen[node.serial] = node
        if not stop(node):
            stack.extend(node.parents)
    return [seen[k] for k in sorted(seen)]  # parents are always older than children


def _evaluate(roots: Sequence[Node], known: dict[int, jax.Array]) -> list[jax.Array]:
    values = dict(known)
    for node in _ancestors(roots, stop=lambda n: n.serial in known):
        if node.serial not in values:
            arguments = [_spread(values[p.serial], s) for p, s in zip(node.parents, node.in_shapes)]
            result = node.apply(*arguments)
            values[node.serial] = result if isinstance(result, list) else _canonical(result, node.shape)
    return [values[n.serial] for n in roots]


def _canonical(array, shape):
    return jnp.reshape(array, ()) if shape == () else array


def _spread(array, shape):
    if isinstance(array, list) or jnp.shape(array) == tuple(shape):
        return array
    return jnp.broadcast_to(array, shape) if jnp.ndim(array) == 0 else jnp.reshape(array, shape)


class _Graph:
    """Interprets a jaxpr on ``Value``s and remembers what it has built, so that equal steps are one node."""

    def __init__(self):
        self._cache: dict = {}

    # ------------------------------------------------------------------ reading the program
    def interpret(self, jaxpr, consts, inputs: Sequence[Value]) -> list[Value]:
        env = {}

        def read(atom) -> Value:
            if isinstance(atom, jex_core.Literal):
                return self.constant(atom.val)
            return env[atom]

        for var, const in zip(jaxpr.constvars, consts):
            env[var] = self.constant(const)
        env.update(zip(jaxpr.invars, inputs))
        for eqn in jaxpr.eqns:
            env.update(zip(eqn.outvars, self.equation(eqn, [read(a) for a in eqn.invars])))
        return [read(a) for a in jaxpr.outvars]

    def equation(self, eqn, inputs: list[Value]) -> list[Value]:
        name = eqn.primitive.name
        if all(v.is_constant for v in inputs):
            return self.whole(eqn, inputs, CONSTANT)
        if name in INLINED_PRIMITIVES:
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            closed = hasattr(inner, "jaxpr")
            return self.interpret(inner.jaxpr if closed else inner, inner.consts if closed else (), inputs)
        out = eqn.outvars[0].aval
        elementwise = name in POINTWISE_PRIMITIVES or (name == "custom_jvp_call" and _is_pointwise_call(eqn))
        if elementwise:
            inputs = [self.broadcast(v, out.shape) for v in inputs]
        if name in ("add", "add_any", "sub"):
            return [self.add(out, *inputs, sign=-1 if name == "sub" else 1)]
        if name == "neg" or (name in ("copy", "copy_p", "convert_element_type") and _is_float(out.dtype)):
            return [self.scale(eqn, inputs, 0)]
        if name == "mul" and (inputs[0].is_constant or inputs[1].is_constant):
            return [self.scale(eqn, inputs, 1 if inputs[0].is_constant else 0)]
        if name == "div" and inputs[1].is_constant:
            return [self.scale(eqn, inputs, 0)]
        if name in SELECTING_PRIMITIVES and all(v.is_constant for v in inputs[1:]):
            return [self.select(eqn, inputs)]
        if name == "reduce_sum" and math.prod(inputs[0].shape) == math.prod(out.shape):
            reshape = lambda x: jnp.reshape(x, out.shape)  # noqa: E731
            return [self._map_selecting(inputs[0], out.shape, reshape, ("reshape", out.shape))]
        linear = all(v.is_constant or v.is_affine for v in inputs)
        if name in LINEAR_PRIMITIVES and linear:
            return self.whole(eqn, inputs, AFFINE)
        if name in BILINEAR_PRIMITIVES and linear and sum(not v.is_constant for v in inputs) == 1:
            return self.whole(eqn, inputs, AFFINE)
        if name == "select_n" and linear and inputs[0].is_constant:
            return self.whole(eqn, inputs, AFFINE)
        if elementwise:
            return [self.pointwise(eqn, inputs)]
        return self.whole(eqn, inputs, OPAQUE)

    # ------------------------------------------------------------------ building nodes
    def constant(self, array) -> Value:
        array = jnp.asarray(array)
        node = Node(CONSTANT, array.shape, array.dtype, apply=lambda: array)
        node.operand = array if array.size == 1 and not isinstance(array, jax.core.Tracer) else None
        return Value(array.shape, array.dtype, None, node)

    def node(self, key, make: Callable[[], Node]) -> Node:
        try:
            hash(key)
        except TypeError:
            return make()
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def whole(self, eqn, inputs, kind) -> list[Value]:
        """The equation as it stands, on whole arrays."""
        parents = [self.materialise(v) if kind != AFFINE else self._linear_part(v) for v in inputs]
        in_shapes = tuple(v.shape for v in inputs)
        outs = [v.aval for v in eqn.outvars]
        key = (eqn.primitive.name, kind, tuple(p.serial for p in parents), in_shapes, _freeze(eqn.params))

        bind = _binder(eqn)
        if not eqn.primitive.multiple_results:
            out = outs[0]
            made = self.node(
                key, lambda: Node(kind, out.shape, out.dtype, parents, bind, in_shapes, eqn.primitive.name)
            )
            affine = kind == AFFINE
            return [Value(out.shape, out.dtype, made if affine else None, None if affine else made)]
        bundle = self.node(
            key, lambda: Node(kind, (0,), None, parents, lambda *a: list(bind(*a)), in_shapes, eqn.primitive.name)
        )
        values = []
        for i, out in enumerate(outs):
            pick = self.node(
                (bundle.serial, i),
                lambda i=i, out=out: Node(kind, out.shape, out.dtype, [bundle], lambda b, i=i: b[i], [None]),
            )
            values.append(Value(out.shape, out.dtype, *((pick, None) if kind == AFFINE else (None, pick))))
        return values

    def _linear_part(self, value: Value) -> Node:
        return value.rest if value.is_constant else value.affine

    def leaf(self, affine: Node) -> Node:
        def make():
            node = Node(POINTWISE, affine.shape, affine.dtype, name="predictor")
            node.leaf_of = affine
            return node

        return self.node(("leaf", affine.serial), make)

    def unwrap(self, affine: Node) -> Node:
        """An affine node as elementwise arithmetic with constants on a predictor that several terms can share."""
        if affine.name in ("mul", "div", "neg", "copy", "convert_element_type", "offset"):
            parents = [self.unwrap(p) if p.kind == AFFINE else p for p in affine.parents]
            key = ("unwrap", affine.serial)
            return self.node(
                key, lambda: Node(POINTWISE, affine.shape, affine.dtype, parents, affine.apply, affine.in_shapes)
            )
        if affine.name == "concatenate" and any(p.kind == CONSTANT for p in affine.parents):
            return self.node(("unwrap", affine.serial), lambda: self._pieces(affine))
        return self.leaf(affine)

    def _pieces(self, affine: Node) -> Node:
        """A concatenation of affine nodes and constants: the constants (a pinned class) need no predictors."""
        parents = [self.unwrap(p) if p.kind == AFFINE else p for p in affine.parents]
        node = Node(OPAQUE, affine.shape, affine.dtype, parents, affine.apply, affine.in_shapes, "concatenate")
        node.unwraps = affine
        return node

    def materialise(self, value: Value) -> Node:
        if value.affine is None:
            return value.rest
        linear = self.unwrap(value.affine)
        if value.rest is None:
            return linear
        return self._combine(value.shape, value.dtype, linear, value.rest)

    def _combine(self, shape, dtype, a: Node, b: Node) -> Node:
        kind = OPAQUE if OPAQUE in (a.kind, b.kind) else POINTWISE
        inner = shape if max(a.size, b.size) > 1 else ()
        return self.node(
            ("combine", a.serial, b.serial, inner),
            lambda: Node(kind, inner, dtype, [a, b], lambda x, y: x + y, [inner, inner]),
        )

    # ------------------------------------------------------------------ sums and multiples
    def add(self, out: jax.ShapeDtypeStruct, x: Value, y: Value, sign: int) -> Value:
        def plus(a, b, kind, name):
            if a is None and b is None:
                return None
            if b is None:
                return a
            parents = [b] if a is None else [a, b]
            inner = out.shape if max(p.size for p in parents) > 1 else ()
            if a is None:
                apply = (lambda v: v) if sign > 0 else (lambda v: -v)
                name = "copy" if sign > 0 else "neg"
            else:
                apply = (lambda u, v: u + v) if sign > 0 else (lambda u, v: u - v)
            if any(p.kind == OPAQUE for p in parents):
                kind = OPAQUE
            elif kind != AFFINE:
                kind = CONSTANT if all(p.kind == CONSTANT for p in parents) else POINTWISE
            key = ("sum", sign, name, inner, None if a is None else a.serial, b.serial)
            return self.node(key, lambda: Node(kind, inner, out.dtype, parents, apply, [inner] * len(parents), name))

        affine = plus(x.affine, y.affine, AFFINE, "sum")
        rest = plus(x.rest, y.rest, POINTWISE, "sum")
        if affine is not None and rest is not None:
            if rest.kind == CONSTANT:
                return Value(out.shape, out.dtype, plus_offset(self, affine, rest, out), None)
            shared = {n.leaf_of.serial for n in _ancestors([rest]) if n.leaf_of is not None}
            linear = self.unwrap(affine)
            if {n.leaf_of.serial for n in _ancestors([linear]) if n.leaf_of is not None} <= shared:
                return Value(out.shape, out.dtype, None, self._combine(out.shape, out.dtype, linear, rest))
        return Value(out.shape, out.dtype, affine, rest)

    def scale(self, eqn, inputs: list[Value], which: int) -> Value:
        """A multiple (by a constant), negation or float cast of inputs[which]: both parts alike."""
        out, target = eqn.outvars[0].aval, inputs[which]

        def part(node, kind):
            if node is None:
                return None
            parents = [node if i == which else self.materialise(v) for i, v in enumerate(inputs)]
            kind = kind if kind == AFFINE else node.kind
            return self._elementwise(eqn, parents, kind, out)

        return Value(out.shape, out.dtype, part(target.affine, AFFINE), part(target.rest, None))

    def _elementwise(self, eqn, parents, kind, out) -> Node:
        inner = out.shape if max(p.size for p in parents) > 1 else ()
        key = (eqn.primitive.name, kind, inner, tuple(p.serial for p in parents), _freeze(eqn.params))
        apply = _pointwise_apply(eqn)
        return self.node(
            key, lambda: Node(kind, inner, out.dtype, parents, apply, [inner] * len(parents), eqn.primitive.name)
        )

    # ------------------------------------------------------------------ elementwise operations
    def pointwise(self, eqn, inputs: list[Value]) -> Value:
        name, out = eqn.primitive.name, eqn.outvars[0].aval
        if name in ("eq", "ne") and self._says_finite(name, inputs):
            return self.constant(np.ones(out.shape, bool))
        shortcut = self._exponential_algebra(eqn, inputs)
        if shortcut is not None:
            return shortcut
        parents = [self.materialise(v) for v in inputs]
        kind = OPAQUE if any(p.kind == OPAQUE for p in parents) else POINTWISE
        node = self._elementwise(eqn, parents, kind, out)
        if name in ("exp", "logistic") and node.operand is None:
            node.operand = inputs[0]
        return Value(out.shape, out.dtype, None, node)

    @staticmethod
    def _says_finite(name: str, inputs: Sequence[Value]) -> bool:
        """x == x and x != inf, of an affine x: checks of finiteness, which need no predictor of their own."""
        affine, other = inputs if inputs[0].affine is not None else inputs[::-1]
        if not affine.is_affine:
            return False
        if name == "eq":
            return affine.affine is other.affine and other.is_affine
        literal = other.rest.operand if other.is_constant else None
        return literal is not None and bool(np.isinf(literal).all())

    def _exponential_algebra(self, eqn, inputs) -> Value | None:
        name, first = eqn.primitive.name, inputs[0]
        exponent = _exponent(first)
        if exponent is None:
            return None
        if name == "log":
            return exponent
        if name in ("mul", "div"):
            other = _exponent(inputs[1])
            if other is None or not (exponent.is_affine and other.is_affine):
                return None
            total = self.add(eqn.outvars[0].aval, exponent, other, sign=1 if name == "mul" else -1)
        elif name in ("integer_pow", "sqrt", "rsqrt", "square") and exponent.is_affine:
            power = {"integer_pow": eqn.params.get("y"), "sqrt": 0.5, "rsqrt": -0.5, "square": 2}[name]
            factor = self.constant(jnp.asarray(power, exponent.dtype))
            node = self.node(
                ("power", exponent.affine.serial, power),
                lambda: Node(
                    AFFINE,
                    exponent.affine.shape,
                    exponent.dtype,
                    [exponent.affine, factor.rest],
                    lambda a, c: a * c,
                    [exponent.affine.shape, ()],
                    "mul",
                ),
            )
            total = Value(exponent.shape, exponent.dtype, node, None)
        else:
            return None
        parent = self.materialise(total)
        result = self.node(
            ("exp", parent.serial),
            lambda: Node(POINTWISE, parent.shape, total.dtype, [parent], jnp.exp, name="exp", operand=total),
        )
        return Value(total.shape, total.dtype, None, result)

    # ------------------------------------------------------------------ indexing and reshaping
    def select(self, eqn, inputs: list[Value]) -> Value:
        out = eqn.outvars[0].aval
        indices = [v.rest for v in inputs[1:]]
        index_shapes = [v.shape for v in inputs[1:]]
        key = (eqn.primitive.name, tuple(i.serial for i in indices), _freeze(eqn.params), out.shape)
        return self._map_selecting(inputs[0], out.shape, _binder(eqn), key, indices, index_shapes)

    def broadcast(self, value: Value, shape: tuple[int, ...]) -> Value:
        """Elementwise primitives stretch axes of length one themselves; here every operand has the result's shape."""
        if value.shape == shape or math.prod(value.shape) == 1:
            return value
        spread = lambda x: jnp.broadcast_to(x, shape)  # noqa: E731
        return self._map_selecting(value, shape, spread, ("broadcast", shape))

    def _map_selecting(self, value, out_shape, apply, key, indices=(), index_shapes=()) -> Value:
        """Each element of the result is a copy of an element of the operand: push that through elementwise steps."""
        done: dict[int, Node] = {}

        def push(node: Node | None) -> Node | None:
            if node is None or node.shape == ():
                return node
            if node.serial not in done:
                done[node.serial] = self.node((key, node.serial, value.shape), lambda: build(node))
            return done[node.serial]

        def build(node: Node) -> Node:
            if node.leaf_of is not None or node.unwraps is not None:
                return self.unwrap(push(node.leaf_of or node.unwraps))
            inner = () if math.prod(out_shape) == 1 else out_shape
            through = node.kind == POINTWISE or (node.kind == AFFINE and node.name in ARITHMETIC)
            if through and node.parents:
                made = Node(
                    node.kind,
                    inner,
                    node.dtype,
                    [push(p) for p in node.parents],
                    node.apply,
                    [inner if s != () else () for s in node.in_shapes],
                    node.name,
                )
                if node.operand is not None:
                    made.operand = self._map_selecting(node.operand, out_shape, apply, key, indices, index_shapes)
                return made
            return Node(node.kind, out_shape, node.dtype, [node, *indices], apply, [value.shape, *index_shapes], key[0])

        return Value(out_shape, value.dtype, push(value.affine), push(value.rest))

    # ------------------------------------------------------------------ reading off a link
    def log_of(self, value: Value) -> Value | None:
        """log(value) as an affine Value, if the program shows it: products of constants and exponentials."""
        if value.is_constant:
            log = self.node(
                ("log", value.rest.serial),
                lambda: Node(CONSTANT, value.rest.shape, value.dtype, [value.rest], jnp.log),
            )
            return value._replace(rest=log)
        if value.affine is not None:
            return None
        exponent = _exponent(value)
        if exponent is not None:
            return exponent if exponent.is_affine or exponent.is_constant else None
        node = value.rest
        if node.name in ("mul", "div") and len(node.parents) == 2:
            logs = [self.log_of(Value(p.shape, p.dtype, None, p)) for p in node.parents]
            if any(v is None for v in logs):
                return None
            total = self.add(
                jax.ShapeDtypeStruct(value.shape, value.dtype), *logs, sign=1 if node.name == "mul" else -1
            )
            return total if total.is_affine or total.is_constant else None
        if node.name in ("copy", "convert_element_type"):
            return self.log_of(Value(value.shape, value.dtype, None, node.parents[0]))
        return None

    def logit_of(self, value: Value) -> Value | None:
        if value.affine is None and value.rest.name == "logistic" and value.rest.operand is not None:
            return value.rest.operand
        return None


def plus_offset(graph: _Graph, affine: Node, offset: Node, out) -> Node:
    inner = out.shape if max(affine.size, offset.size) > 1 else ()
    return graph.node(
        ("offset", affine.serial, offset.serial, inner),
        lambda: Node(AFFINE, inner, out.dtype, [affine, offset], lambda x, y: x + y, [inner, inner], "offset"),
    )


def _exponent(value: Value) -> Value | None:
    if value.affine is None and value.rest.name == "exp":
        return value.rest.operand
    return None


def _is_float(dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def _is_pointwise_call(eqn) -> bool:
    """Whether a custom_jvp call is elementwise: same shapes in and out, and only elementwise steps inside."""
    shapes = {v.aval.shape for v in eqn.invars if v.aval.shape != ()} | {v.aval.shape for v in eqn.outvars}

    def pointwise(jaxpr):
        for inner in jaxpr.eqns:
            name = inner.primitive.name
            if name in INLINED_PRIMITIVES:
                if not pointwise(inner.params["jaxpr"].jaxpr):
                    return False
            elif name == "broadcast_in_dim":
                if inner.invars[0].aval.shape not in ((), inner.outvars[0].aval.shape):
                    return False
            elif name not in POINTWISE_PRIMITIVES and name != "custom_jvp_call":
                return False
        return True

    return len(eqn.outvars) == 1 and len(shapes) == 1 and pointwise(eqn.params["call_jaxpr"].jaxpr)


def _binder(eqn) -> Callable:
    small = bool(eqn.invars) and max(eqn.invars[0].aval.shape[-1:], default=0) <= UNROLLED_SIZE
    if eqn.primitive.name == "triangular_solve" and small:
        return partial(solve_triangular, **eqn.params)
    if eqn.primitive.name == "cholesky" and small:
        return cholesky_by_columns
    found = eqn.primitive.get_bind_params(eqn.params)
    functions, params = found if isinstance(found, tuple) else ((), found)  # the form depends on the JAX version
    return lambda *arguments: eqn.primitive.bind(*functions, *arguments, **params)


def _pointwise_apply(eqn) -> Callable:
    bind_all = _binder(eqn)

    def bind(*arguments):
        result = bind_all(*arguments)
        return result[0] if eqn.primitive.multiple_results else result

    if eqn.primitive.name != "custom_jvp_call":
        return bind
    shapes = [v.aval.shape for v in eqn.invars]
    dtypes = [v.aval.dtype for v in eqn.invars]

    def one_element(*scalars):
        arguments = [jnp.broadcast_to(s, shape).astype(d) for s, shape, d in zip(scalars, shapes, dtypes)]
        return jnp.ravel(bind(*arguments))[0]

    def apply(*arguments):  # the call is compiled for its own shape; elsewhere it is mapped over elements
        if [jnp.shape(a) for a in arguments] == shapes:
            return bind(*arguments)
        shape = jnp.shape(arguments[0])
        flat = jax.vmap(one_element)(*[jnp.ravel(a) for a in arguments])
        return jnp.reshape(flat, shape)

    return apply


def _freeze(params: dict) -> tuple | object:
    try:
        frozen = tuple(sorted((k, v) for k, v in params.items() if k not in ("sharding", "out_sharding")))
        hash(frozen)
        return frozen
    except TypeError:
        return object()  # unlike anything else: this step is never merged with another


def depends_on(function: Callable[[dict], dict], inputs: dict[str, Any]) -> dict[str, frozenset[str]]:
    """Which of the named inputs each named output depends on, read off the program (not off its values)."""
    names = sorted(inputs)
    jaxpr, shape = jax.make_jaxpr(lambda *arrays: function(dict(zip(names, arrays))), return_shape=True)(
        *[inputs[n] for n in names]
    )
    sources: dict = {}
    for var, name in zip(jaxpr.jaxpr.invars, names):
        sources[var] = frozenset([name])

    def read(atom) -> frozenset[str]:
        return frozenset() if isinstance(atom, jex_core.Literal) else sources.get(atom, frozenset())

    for eqn in jaxpr.jaxpr.eqns:
        touched = frozenset().union(*[read(a) for a in eqn.invars])
        sources.update({v: touched for v in eqn.outvars})
    found = iter([read(a) for a in jaxpr.jaxpr.outvars])
    return {name: frozenset().union(*[next(found) for _ in jax.tree.leaves(shape[name])]) for name in sorted(shape)}

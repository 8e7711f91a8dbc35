"""A JAX program read as a graph: affine part and rest of every intermediate result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from .associating import associated, carried, run_of
from .elementwise import is_pointwise_call, pointwise_apply
from .factoring import FACTORABLE, contraction, image_of, products_of
from .interpret import interpret, is_inlined
from .nodes import AFFINE, CONSTANT, OPAQUE, POINTWISE, Node, NodeCache, Value, ancestors, value_of
from .parallel_loops import constant_outputs, in_parallel
from .placing import ADDING, adds_to_zeros, placed, sums_at_places
from .primitives import (
    BILINEAR_PRIMITIVES,
    LINEAR_PRIMITIVES,
    POINTWISE_PRIMITIVES,
    SELECTING_PRIMITIVES,
    binder,
    freeze,
    is_float,
    special_function,
)
from .pushing import materialize, selected, selected_value, unwrap
from .selection import (
    Index,
    Selection,
    are_inside,
    broadcast_selection,
    constant_index,
    constant_value,
    everything,
    reshaped,
    selection_of,
)


class Graph(NodeCache):
    """Interprets a jaxpr on ``Value``s."""

    # ------------------------------------------------------------------ reading the program
    def interpret(self, jaxpr, consts, inputs: Sequence[Value]) -> list[Value]:
        return interpret(jaxpr, consts, inputs, self.equation, self.constant)

    def equation(self, eqn, inputs: list[Value]) -> list[Value] | None:
        """The outputs of an equation, each an affine part and a rest; None for a call, which is read itself."""
        name = eqn.primitive.name
        inputs = [
            v if v.is_constant or math.prod(v.shape) else self.constant(np.zeros(v.shape, v.dtype)) for v in inputs
        ]
        if all(v.is_constant for v in inputs):
            return self.whole(eqn, inputs, CONSTANT)
        if name == "scan":
            program = in_parallel(eqn, [v.is_constant for v in inputs])
            if program is not None:
                return self.interpret(program.jaxpr, program.consts, inputs)
            outputs = self.whole(eqn, inputs, OPAQUE)
            if constants := constant_outputs(eqn, [v.is_constant for v in inputs]):
                numbers, program = constants
                for i, value in zip(numbers, self.interpret(program.jaxpr, program.consts, inputs)):
                    outputs[i] = value
            return outputs
        special = special_function(eqn) is not None
        if is_inlined(eqn) and not special:
            return None
        out = eqn.outvars[0].aval
        elementwise = special or name in POINTWISE_PRIMITIVES or (name == "custom_jvp_call" and is_pointwise_call(eqn))
        if elementwise:
            inputs = [self.broadcast(v, out.shape) for v in inputs]
        if name in ("add", "add_any", "sub"):
            return [self.add(out, *inputs, sign=-1 if name == "sub" else 1)]
        if name == "neg" or (name in ("copy", "copy_p", "convert_element_type") and is_float(out.dtype)):
            return [self.scale(eqn, inputs, 0)]
        if name == "mul" and (inputs[0].is_constant or inputs[1].is_constant):
            return [self.scale(eqn, inputs, 1 if inputs[0].is_constant else 0)]
        if name == "div" and inputs[1].is_constant:
            return [self.scale(eqn, inputs, 0)]
        if name in SELECTING_PRIMITIVES and all(v.is_constant for v in inputs[1:]):
            selected = self.select(eqn, inputs)
            if selected is not None:
                return [selected]
        if name in ("split", "unstack"):
            return self.parts(eqn, inputs[0])
        if name == "reduce_sum" and math.prod(inputs[0].shape) == math.prod(out.shape):
            return [selected_value(self, inputs[0], reshaped(inputs[0].shape, out.shape))]
        if name in FACTORABLE or adds_to_zeros(eqn, inputs):
            factored = self.factored(eqn, inputs)
            if factored is not None:
                return [factored]
        linear = all(v.is_constant or v.is_affine for v in inputs)
        if name in (LINEAR_PRIMITIVES | SELECTING_PRIMITIVES) and linear:
            return self.whole(eqn, inputs, AFFINE)
        if name in BILINEAR_PRIMITIVES and linear and sum(not v.is_constant for v in inputs) == 1:
            return self.whole(eqn, inputs, AFFINE)
        if name in ("select_n", "triangular_solve") and linear and inputs[0].is_constant:
            return self.whole(eqn, inputs, AFFINE)
        if elementwise:
            return [self.pointwise(eqn, inputs)]
        if name in ADDING and (program := sums_at_places(eqn, inputs)) is not None:
            return self.interpret(program.jaxpr, program.consts, [inputs[0], inputs[2]])
        put_in_place = placed(self, eqn, inputs)
        return self.whole(eqn, inputs, OPAQUE) if put_in_place is None else [put_in_place]

    # ------------------------------------------------------------------ building nodes
    def whole(self, eqn, inputs, kind) -> list[Value]:
        """The equation as it stands, on whole arrays."""
        parents = [v.affine if kind == AFFINE and not v.is_constant else materialize(self, v) for v in inputs]
        in_shapes = tuple(v.shape for v in inputs)
        outs = [v.aval for v in eqn.outvars]
        key = (eqn.primitive.name, kind, tuple(p.serial for p in parents), in_shapes, freeze(eqn.params))

        bind = binder(eqn)
        if len(outs) == 1:
            (out,), name, params = outs, eqn.primitive.name, eqn.params
            apply = (lambda *a: bind(*a)[0]) if eqn.primitive.multiple_results else bind
            node = partial(Node, kind, out.shape, out.dtype, parents, apply, in_shapes, name, params=params)
            made = self.node(key, node)
            return [value_of(made, out.shape, out.dtype)]
        bundle = self.node(
            key, lambda: Node(kind, (0,), None, parents, lambda *a: list(bind(*a)), in_shapes, eqn.primitive.name)
        )
        values = []
        for i, out in enumerate(outs):
            pick = self.node(
                (bundle.serial, i),
                lambda i=i, out=out: Node(kind, out.shape, out.dtype, [bundle], lambda b, i=i: b[i], [None]),
            )
            values.append(value_of(pick, out.shape, out.dtype))
        return values

    # ------------------------------------------------------------------ sums and multiples
    def add(self, out: jax.ShapeDtypeStruct, x: Value, y: Value, sign: int) -> Value:
        """x + y or x - y. A constant goes to the affine part, and what are predictors of the rest to the rest."""

        def plus(a, b, kind):
            if b is None or (a is None and sign > 0):
                return a if b is None else b
            parents, apply, name = [a, b], jnp.add if sign > 0 else jnp.subtract, "sum"
            if a is None:
                parents, apply, name = [b], jnp.negative, "neg"
            if kind != AFFINE:
                kind = CONSTANT if all(p.kind == CONSTANT for p in parents) else POINTWISE
            return self.elementwise(kind, out.shape, out.dtype, parents, apply, name, {"sign": sign}, sign)

        affine = plus(x.affine, y.affine, AFFINE)
        rest = plus(x.rest, y.rest, POINTWISE)
        if affine is not None and rest is not None:
            if rest.kind == CONSTANT:
                moved = self.elementwise(AFFINE, out.shape, out.dtype, [affine, rest], jnp.add, "offset", {})
                return Value(out.shape, out.dtype, moved, None)
            shared = {n.stands_for.serial for n in ancestors([rest]) if n.is_predictor}
            linear = unwrap(self, affine)
            if {n.stands_for.serial for n in ancestors([linear]) if n.is_predictor} <= shared:
                total = self.elementwise(POINTWISE, out.shape, out.dtype, [linear, rest], jnp.add, "combined", {})
                return Value(out.shape, out.dtype, None, total)
        return Value(out.shape, out.dtype, affine, rest)

    def scale(self, eqn, inputs: list[Value], which: int) -> Value:
        """A multiple (by a constant), negation or float cast of inputs[which]: both parts alike."""
        out, target = eqn.outvars[0].aval, inputs[which]

        def part(node, kind):
            if node is None:
                return None
            parents = [node if i == which else materialize(self, v) for i, v in enumerate(inputs)]
            kind = kind if kind == AFFINE or node.kind == CONSTANT else POINTWISE
            return self._elementwise(eqn, parents, kind, out)

        return Value(out.shape, out.dtype, part(target.affine, AFFINE), part(target.rest, None))

    def factored(self, eqn, inputs: list[Value]) -> Value | None:
        """A linear function of products of numbers and arrays, with the numbers taken out; None if it is none."""
        varying = [i for i, value in enumerate(inputs) if not value.is_constant]
        if len(varying) > 1 or inputs[varying[0]].rest is None:
            return None
        (which,), out = varying, eqn.outvars[0].aval
        target = inputs[which]
        run = run_of(eqn, which, len(target.shape))
        products = products_of(self, target.rest, run.axes)
        if not products or not any(product.numbers or contraction(product.array, run.axes) for product in products):
            return None

        def image(array: Node) -> Node:
            if (made := contraction(array, run.axes)) is not None:
                program, values = associated(self, eqn, inputs, which, made, run)
                return materialize(self, self.interpret(program.jaxpr, program.consts, values)[0])
            values = [value_of(array, v.shape, v.dtype) if i == which else v for i, v in enumerate(inputs)]
            (value,) = self.whole(eqn, values, array.kind)
            return value.affine or value.rest

        def of_result(number: Node) -> Node:
            return number if number.shape == () else selected(self, number, carried(target.shape, run, out.shape))

        numbered = [
            product._replace(numbers=tuple((name, of_result(number)) for name, number in product.numbers))
            for product in products
            if product.numbers
        ]
        rest = image_of(self, numbered, image, partial(unwrap, self)) if numbered else None
        total = Value(out.shape, out.dtype, None if target.affine is None else image(target.affine), rest)
        for product in products:
            if not product.numbers:
                addend = value_of(image(product.array), out.shape, out.dtype)
                total = addend if total.affine is total.rest is None else self.add(out, addend, total, sign=1)
        return total

    def _elementwise(self, eqn, parents, kind, out) -> Node:
        name, apply, key = eqn.primitive.name, pointwise_apply(eqn), freeze(eqn.params)
        return self.elementwise(kind, out.shape, out.dtype, parents, apply, name, eqn.params, key)

    # ------------------------------------------------------------------ elementwise operations
    def pointwise(self, eqn, inputs: list[Value]) -> Value:
        """A function of each entry, which is of the affine parts as predictors."""
        name, out = eqn.primitive.name, eqn.outvars[0].aval
        if name in ("eq", "ne") and self._says_finite(name, inputs):
            return self.constant(np.ones(out.shape, bool))
        shortcut = self._exponential_algebra(eqn, inputs)
        if shortcut is not None:
            return shortcut
        parents = [materialize(self, v) for v in inputs]
        node = self._elementwise(eqn, parents, POINTWISE, out)
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
        """log exp(x) = x, exp(x) exp(y) = exp(x + y) and exp(x)^p = exp(p x), of affine x and y."""
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
            parents = [exponent.affine, self.constant(jnp.asarray(power, exponent.dtype)).rest]
            shape, dtype = exponent.shape, exponent.dtype
            node = self.elementwise(AFFINE, shape, dtype, parents, jnp.multiply, "mul", {}, "power")
            total = Value(shape, dtype, node, None)
        else:
            return None
        parents = [materialize(self, total)]
        result = self.elementwise(
            POINTWISE, total.shape, total.dtype, parents, jnp.exp, "exp", {}, "of a sum", operand=total
        )
        return Value(total.shape, total.dtype, None, result)

    # ------------------------------------------------------------------ indexing and reshaping
    def select(self, eqn, inputs: list[Value]) -> Value | None:
        """None: this selects in another way than entry by entry. Where entries out of bounds are NaN, that is added."""
        name, indices, beside = eqn.primitive.name, None, None
        if name == "gather":
            indices = _columns_of(inputs[1])
            if eqn.params["mode"] == GatherScatterMode.FILL_OR_DROP and not are_inside(eqn, indices):
                fill = eqn.params["fill_value"]
                if not is_float(inputs[0].dtype) or not (fill is None or np.isnan(fill)):
                    return None
                zeros = self.constant(np.zeros(inputs[0].shape, inputs[0].dtype))
                (beside,) = self.whole(eqn, [zeros, *inputs[1:]], CONSTANT)
        elif name == "dynamic_slice":
            indices = [_index_of(v.rest, ()) for v in inputs[1:]]
        selection = selection_of(eqn, indices)
        if selection is None:
            return None
        entries = selected_value(self, inputs[0], selection)
        return entries if beside is None else self.add(eqn.outvars[0].aval, entries, beside, sign=1)

    def parts(self, eqn, value: Value) -> list[Value]:
        """An array cut into pieces."""
        axis, start, parts = eqn.params["axis"], 0, []
        for out in eqn.outvars:
            shape = out.aval.shape
            if eqn.primitive.name == "unstack":
                shape = (*shape[:axis], 1, *shape[axis:])
            piece = everything(shape)
            moved = constant_index(start + piece.indices[axis].value)
            indices = tuple(moved if a == axis else index for a, index in enumerate(piece.indices))
            parts.append(selected_value(self, value, Selection(shape, indices)))
            if len(shape) != len(out.aval.shape):
                parts[-1] = selected_value(self, parts[-1], reshaped(shape, out.aval.shape))
            start += shape[axis]
        return parts

    def broadcast(self, value: Value, shape: tuple[int, ...]) -> Value:
        """Elementwise primitives stretch axes of length one themselves; here every operand has the result's shape."""
        if value.shape == shape or math.prod(value.shape) == 1:
            return value
        return selected_value(self, value, broadcast_selection(value.shape, shape))

    # ------------------------------------------------------------------ reading off a link
    def log_of(self, value: Value) -> Value | None:
        """log(value) as an affine Value, if the program shows it: products of constants and exponentials."""
        if value.is_constant:
            rest = value.rest
            log = self.node(("log", rest.serial), lambda: Node(CONSTANT, rest.shape, value.dtype, [rest], jnp.log))
            return value._replace(rest=log)
        if value.affine is not None:
            return None
        exponent = _exponent(value)
        if exponent is not None:
            return exponent if exponent.is_affine or exponent.is_constant else None
        node = value.rest
        if node.name in ("mul", "div") and len(node.parents) == 2:
            first, second = (self.log_of(Value(p.shape, p.dtype, None, p)) for p in node.parents)
            if first is None or second is None:
                return None
            out = jax.ShapeDtypeStruct(value.shape, value.dtype)
            total = self.add(out, first, second, sign=1 if node.name == "mul" else -1)
            return total if total.is_affine or total.is_constant else None
        if node.name in ("copy", "convert_element_type"):
            return self.log_of(Value(value.shape, value.dtype, None, node.parents[0]))
        return None

    def logit_of(self, value: Value) -> Value | None:
        is_logistic = value.affine is None and value.rest.name == "logistic"
        return value.rest.operand if is_logistic else None


def _exponent(value: Value) -> Value | None:
    return value.rest.operand if value.affine is None and value.rest.name == "exp" else None


def _columns_of(indices: Value) -> list[Index]:
    """The columns of a gather's indices, as far as each by itself is constant."""
    node, shape, count = indices.rest, indices.shape, indices.shape[-1]
    if node.name == "concatenate" and len(node.parents) == count and node.params["dimension"] == len(shape) - 1:
        return [_index_of(parent, shape[:-1]) for parent in node.parents]
    if count == 1:
        return [_index_of(node, shape[:-1])]
    whole = constant_value(node)
    if whole is not None:
        return [constant_index(whole.reshape(shape)[..., i]) for i in range(count)]

    def column(i: int) -> Node:
        return Node(CONSTANT, shape[:-1], node.dtype, [node], lambda array: array[..., i], [shape], f"column {i}")

    return [Index(shape[:-1], column(i), ("column", node.serial, i)) for i in range(count)]


def _index_of(node: Node, shape: tuple[int, ...]) -> Index:
    """A constant, of so many places, as an index."""
    value = constant_value(node)
    if value is not None:
        return constant_index(np.broadcast_to(value, shape) if value.ndim == 0 else value.reshape(shape))
    return Index(tuple(shape), node)

"""Methods that tests share: most of a fit's time is compilation, and one object compiles a model once."""

import functools


def shared(method, model, **options):
    """``method(model, **options)``: one object for all tests of a process that ask for it.

    Not for tests that replace parts of the package, which an object may have compiled before.
    """
    try:
        return _made(method, model, tuple((name, type(value), value) for name, value in sorted(options.items())))
    except TypeError:  # options that have no hash
        return method(model, **options)


@functools.cache
def _made(method, model, options):
    return method(model, **{name: value for name, _, value in options})

"""Can a model go to other processes?"""

from __future__ import annotations

import pickle


def check_picklable(what: str, value: object) -> None:
    """:raises PicklingError: saying what to do with a posterior that holds what cannot be pickled."""
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # what pickle raises differs among versions
        raise pickle.PicklingError(
            f"{what} cannot be pickled ({error}). Write the posterior to a file, posterior.save(path), and read it "
            "where the model is known, Posterior.load(path, model); or define the model at the top level of a module."
        ) from error

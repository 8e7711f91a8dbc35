"""Methods of the literature, as options of :class:`BONG`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Preset(NamedTuple):
    """A method of the literature.

    :ivar options: the options of :class:`BONG` that it fixes. :ivar defaults: those that it sets and leaves open.
    """

    options: dict[str, Any]
    defaults: Mapping[str, Any] = {}


PRESETS = {
    # Conditional-moments extended Kalman filter, online natural gradient: Tronarp et al. (2018); Ollivier (2018).
    "cm-ekf": Preset({"rule": "bong", "hessian": "lin-hess", "family": "full"}),
    # Variational diagonal extended Kalman filter: Chang, Murphy, Jones (2022).
    "vd-ekf": Preset({"rule": "bong", "hessian": "lin-hess", "family": "diagonal", "projection": "exclusive"}),
    # Fully decoupled extended Kalman filter: Puskorius, Feldkamp (2003).
    "fd-ekf": Preset({"rule": "bong", "hessian": "lin-hess", "family": "diagonal", "projection": "inclusive"}),
    # Low-rank extended Kalman filter: Chang et al. (2023).
    "lo-fi": Preset({"rule": "bong", "hessian": "lin-hess", "family": "low-rank"}),
    # Recursive variational Gaussian approximation, explicit: Lambert, Bonnabel, Bach (2021).
    "explicit-rvga": Preset({"rule": "bong", "hessian": "auto", "family": "full"}),
    # Variational online Newton: Khan et al. (2018).
    "von": Preset({"rule": "blr", "hessian": "mc-hess", "family": "diagonal"}),
    # Variational online Gauss-Newton: Khan et al. (2018).
    "vogn": Preset({"rule": "blr", "hessian": "mc-ef", "family": "diagonal"}),
    # Structured covariance by low-rank natural gradients: Mishkin et al. (2018).
    "slang": Preset(
        {"rule": "blr", "hessian": "mc-ef", "family": "low-rank", "projection": "first"}, {"num_samples": 1}
    ),
    # Weight uncertainty by gradients of the bound, in the mean and rho, for a deviation of log(1 + exp(rho)): Blundell
    # et al. (2015).
    "bayes-by-backprop": Preset(
        {"rule": "bbb", "hessian": "mc-hess", "family": "diagonal", "parameterization": "softplus"},
        {"learning_rate": 0.01, "num_samples": 1},
    ),
    # Newton's method with a running Hessian, by the delta method: Khan, Rue (2023).
    "online-newton": Preset({"rule": "blr", "hessian": "delta-hess", "family": "full"}),
}

"""How long a step takes: a linear model of what the kernels do, fitted online.

Terms (sources: facts measured on the paged-attention kernels, see docs/decisions/0001):

| term | unit | why it is there |
|---|---|---|
| fixed | step | launch, embeddings, weights read once |
| tokens | token | every matrix product; compute-bound above a few rows |
| kv_read | token of KV | one-token rows read their whole context: memory bandwidth |
| kv_repacked | token of KV | a slice of several tokens repacks its past before it computes |
| query_kv | query x KV token | attention of several-token slices, quadratic in the chunk |
| rows | row | the language-model head and the draw |
| changed | step | a token count that differs from the step before re-plans the kernels: 3 to 4 ms |
"""

from typing import NamedTuple

import numpy as np


class StepFeatures(NamedTuple):
    """What a step is made of; sums over its slices."""

    tokens: int = 0
    kv_read: int = 0
    """Context lengths of the one-token slices, added up."""
    kv_repacked: int = 0
    """Past lengths of the slices of several tokens, added up."""
    query_kv: int = 0
    """Pairs of a query token and a KV token, over the slices of several tokens."""
    rows: int = 0
    """Slices that draw a token."""
    changed: bool = False
    """The token count differs from that of the step before."""


class StepCoefficients(NamedTuple):
    """Nanoseconds per unit of each term."""

    fixed: float
    token: float
    kv_read: float
    kv_repacked: float
    query_kv: float
    row: float
    changed: float


PRIOR = StepCoefficients(6.0e6, 0.25e6, 1.7e3, 1.3e3, 150.0, 0.1e6, 4.0e6)
"""SmolLM2-135M, int8 weights, two Zen 5 cores: 7.3 ms at one row, 3,547 tokens/s of prefill, 133 ms at 64 distinct
contexts of 1,024, a chunk of 64 tokens 34 ms at past 0 and 122 ms at past 6,144. Only a start: the fit replaces it."""

_NUM_TERMS = len(PRIOR)
_FORGETTING = 0.995
"""Weight of an observation halves in about 140 steps: fast enough for a neighbour that takes the cores away."""
_PRIOR_WEIGHT = 4.0
"""Variance of each prior coefficient, relative to its own square: wrong by a factor of three is expected."""
_OUTLIER_RATIO = 1.0
"""A residual counts up to this share of the prediction, so one stall (page fault, stolen core) moves little."""
_NUM_SCALING_STEPS = 8
"""The first steps scale the prior as a whole (their mean ratio): machines differ more in speed than in shape, and what
the first steps do not exercise must not stay at another machine's speed."""
_NOISE_RATIO = 0.03
"""A fit that is off by less has nothing to learn from the step: most decode steps end here, a tenth of a millisecond
earlier."""
_PACE_GAIN = 0.1
"""Share of a step's ratio that enters the pace: a change of the whole machine's speed is followed in tens of steps."""


class StepTimeModel:
    """Recursive least squares with forgetting on relative errors, coefficients kept non-negative, times a pace.

    Relative errors, because a step of 8 ms and one of 300 ms must both be predicted well. Forgetting stops while the
    covariance is as wide as the prior: otherwise hours of equal decode steps would blow up what they never excite. The
    pace is a running ratio of measured to fitted: it follows a machine that became slower or faster as a whole, for
    which the fit would need hundreds of steps.
    """

    def __init__(self, prior: StepCoefficients = PRIOR) -> None:
        self._scale = np.array([max(value, 1.0) for value in prior])
        self._theta = np.array([value / scale for value, scale in zip(prior, self._scale, strict=True)])
        self._covariance = np.eye(_NUM_TERMS) * _PRIOR_WEIGHT
        self.coefficients = prior
        """Fitted nanoseconds per unit, before the pace."""
        self.pace = 1.0
        self._num_observed = 0

    def predict_ns(self, features: StepFeatures) -> int:
        """Never negative. Pure Python: about a microsecond."""
        return int(self.pace * self._fitted_ns(features))

    def _fitted_ns(self, features: StepFeatures) -> float:
        tokens, kv_read, kv_repacked, query_kv, rows, changed = features
        of = self.coefficients
        return (
            of.fixed
            + of.token * tokens
            + of.kv_read * kv_read
            + of.kv_repacked * kv_repacked
            + of.query_kv * query_kv
            + of.row * rows
            + (of.changed if changed else 0.0)
        )

    def observe(self, features: StepFeatures, duration_ns: int) -> None:
        """Learns from one step that ran to its end. Costs tens of microseconds."""
        fitted = max(self._fitted_ns(features), 1000.0)
        self._num_observed += 1
        if self._num_observed <= _NUM_SCALING_STEPS:
            factor = max(duration_ns / fitted, 1e-3) ** (1.0 / self._num_observed)
            self._theta *= factor
            fitted *= factor
        residual = duration_ns / fitted - 1.0
        ratio = min(max(duration_ns / fitted, self.pace / 2), self.pace * 2)
        self.pace += _PACE_GAIN * (ratio - self.pace)
        if abs(residual) < _NOISE_RATIO and self._num_observed > _NUM_SCALING_STEPS:
            return
        terms = np.array((1.0, *features)) * self._scale / fitted
        spread = self._covariance @ terms
        gain = spread / (_FORGETTING + float(terms @ spread))
        self._theta = np.maximum(self._theta + gain * min(max(residual, -_OUTLIER_RATIO), _OUTLIER_RATIO), 0.0)
        self._publish()
        if abs(residual) > _OUTLIER_RATIO:
            return  # not believed in full, so it does not make the fit more certain
        covariance = self._covariance - np.outer(gain, spread)
        if float(covariance.trace()) < _PRIOR_WEIGHT * _NUM_TERMS * _FORGETTING:
            covariance /= _FORGETTING
        self._covariance = (covariance + covariance.T) * 0.5

    def _publish(self) -> None:
        self.coefficients = StepCoefficients(*(self._theta * self._scale).tolist())

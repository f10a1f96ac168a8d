"""Forecasts from the prompt itself, before its first completion: from its text, and from columns of the data that the user names."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import xxhash

from ..batch import section
from .posterior import dead_probability
from .regression import SCORE_MEMORY, OnlineRegression, log_odds


Reader = Callable[[np.ndarray], list[tuple[str, list[tuple[str, Any]]]]]
"""Gives the texts of prompts by their ids, and for each the names and values of its columns."""

_COLUMN_NUMBERS = _TEXT_NUMBERS = 32
_GRAMS = (1, 2, 3)  # bytes of the pieces that a text is cut into
_READ = 2048  # bytes that are read of either end of a text
_SCALE = 0.25  # of the numbers of a text: together their prior is about as wide as that of one column
_MEMORY = 0.9  # weight of earlier batches in the recent pass rate and share of live groups
_KEPT = 16_384  # prompts whose numbers are kept for the next call
_MOST = 3.0  # standard deviations at which the numbers of a text are cut
_CLEARLY = 2.5  # standard deviations by which forecasts have to rank prompts better than chance


def text_numbers(text: str) -> np.ndarray:
    """Return a random projection of a text's pieces, by the signs of their hashes, and its log length: float64, `(33,)`."""
    data = np.frombuffer(text.encode(errors="replace"), dtype=np.uint8).astype(np.uint64)
    ends = data if len(data) <= 2 * _READ else np.concatenate([data[:_READ], data[-_READ:]])
    codes = [
        sum((ends[i : len(ends) - n + 1 + i] << np.uint64(8 * i) for i in range(n)), np.uint64(n << 24))
        for n in _GRAMS
        if len(ends) >= n
    ]
    hashes = _mixed(np.concatenate([np.zeros(1, dtype=np.uint64), *codes]))
    signs = np.unpackbits(hashes.astype("<u8").view(np.uint8).reshape(-1, 8), axis=1)[:, :_TEXT_NUMBERS]
    return np.append(2.0 * signs.mean(axis=0) - 1.0, np.log1p(len(data)))


def column_numbers(values: Sequence[tuple[str, Any]]) -> np.ndarray:
    """Count the columns and their values in hash buckets: float64, `(32,)`."""
    buckets = [
        xxhash.xxh64_intdigest(f"{name}={value}".encode(errors="replace")) % _COLUMN_NUMBERS for name, value in values
    ]
    return np.bincount(buckets, minlength=_COLUMN_NUMBERS).astype(np.float64)


def _mixed(codes: np.ndarray) -> np.ndarray:
    """Hash numbers, uint64, by the finalizer of MurmurHash3."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        codes = (codes ^ (codes >> np.uint64(33))) * np.uint64(factor)
    return codes ^ (codes >> np.uint64(33))


class Unseen:
    """
    Forecasts prompts that were never visited. A logistic regression on numbers of a prompt's text, and with `columns` of its columns,
    forecasts the pass rate, see [`OnlineRegression`]; it learns from whole groups, or where a gate completes some of them, from first
    completions alone. How likely a group is to be alive follows from a Beta distribution of this mean with a + b = 1; a second
    regression, on a constant, corrects it. Forecasts are used as long as they have ranked the prompts of the latest batches clearly better
    than chance. Nothing is stored for a prompt.
    """

    def __init__(self, columns: bool = True):
        self.columns = columns
        self._read: Reader = lambda prompt_ids: []
        size = len(self._numbers("", []))
        self.rates, self.calibration = OnlineRegression(1 + size), OnlineRegression(1)
        self._moments = np.zeros((3, size))  # number, sum and sum of squares of what was seen
        self._recent = np.array([0.5, 0.5, 1.0])  # decayed: outcomes, live groups, prompts; one prompt is made up
        # Decayed: covariances of a batch's ranks with which groups were alive, and their variances by chance
        self._ranking = np.zeros(2)
        self._known: dict[int, np.ndarray] = {}
        self._metrics: dict[str, float] = {}

    def read_by(self, read: Reader):
        """Say how prompts of the training set are read."""
        self._read, self._known = read, {}

    def _numbers(self, text: str, columns: list[tuple[str, Any]]) -> np.ndarray:
        return np.append(column_numbers(columns), text_numbers(text)) if self.columns else text_numbers(text)

    def _inputs(self, ids: np.ndarray) -> np.ndarray:
        """Return the numbers of prompts, `(P, F)`."""
        missing = [i for i in ids.tolist() if i not in self._known]
        if len(self._known) + len(missing) > _KEPT:
            self._known, missing = {}, ids.tolist()
        if missing:
            read = self._read(np.array(missing, dtype=np.int64))
            self._known |= {i: self._numbers(*one) for i, one in zip(missing, read, strict=True)}
        return np.stack([self._known[i] for i in ids.tolist()])

    def _examples(self, raw: np.ndarray) -> np.ndarray:
        """Return features of prompts, `(P, 1 + F)`: a constant, and their numbers, those of the text standardised."""
        x, of_text = raw.copy(), slice(-_TEXT_NUMBERS - 1, None)
        count, total, squares = self._moments[:, of_text]
        mean = total / np.maximum(count, 1.0)
        deviation = np.sqrt(np.maximum(squares / np.maximum(count, 1.0) - mean**2, 1e-12))
        x[:, of_text] = _SCALE * np.clip((x[:, of_text] - mean) / deviation, -_MOST, _MOST)
        return np.concatenate([np.ones((len(x), 1)), x], axis=1)

    def _offset(self, count: int) -> np.ndarray:
        return np.full(count, log_odds(self._recent[0] / self._recent[2]))

    def _log_odds_alive(self, pass_rates: np.ndarray, size: int) -> np.ndarray:
        rates = np.clip(pass_rates, 1e-4, 1.0 - 1e-4)
        return log_odds(1.0 - dead_probability(rates, 1.0 - rates, size))

    def forecasts(
        self, ids: np.ndarray, size: int, rng: np.random.Generator | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Forecast the probability that groups of `size` completions of new prompts are alive, and with `rng` draw it, `(P,)` each."""
        x, constant, offset = self._examples(self._inputs(ids)), np.ones((len(ids), 1)), self._offset(len(ids))
        rates = [self.rates.forecasts(offset, x)[0]]
        if rng is not None:
            rates.append(self.rates.drawn(offset, x, rng))
        chances = [self.calibration.forecasts(self._log_odds_alive(rate, size), constant)[0] for rate in rates]
        return chances[0], chances[-1]

    def alive(
        self, ids: np.ndarray, base: np.ndarray, size: int, rng: np.random.Generator | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the [`forecasts`], or `base` twice while they are not used."""
        return self.forecasts(ids, size, rng) if self.used else (base, base)

    @property
    def used(self) -> bool:
        """Whether forecasts have ranked live groups above others, more clearly than chance does (a permutation test, with forgetting)."""
        covariance, variance = self._ranking
        return bool(covariance > _CLEARLY * variance**0.5)

    def fit(
        self,
        ids: np.ndarray,
        outcomes: np.ndarray,
        alive: np.ndarray,
        counts: np.ndarray,
        size: int,
        seen: np.ndarray | None = None,
    ):
        """
        Score the forecasts of the new prompts of a batch, then learn from it, `(P,)` each: from mean `outcomes` of whole groups, or outcomes
        of first completions, and from how likely it is by now that groups of `size` are `alive`, 0 or 1 for a whole group. Each scores as
        `counts` prompts. `seen` is `alive` as it would be without these forecasts, by which it is tested whether to use them; defaults to `alive`.
        """
        self._metrics = {}
        if not len(ids):
            return
        raw, constant, offset = self._inputs(ids), np.ones((len(ids), 1)), self._offset(len(ids))
        by_rate = self._log_odds_alive(self.rates.forecasts(offset, self._examples(raw))[0], size)
        forecasts, _ = self.calibration.forecasts(by_rate, constant)
        live_share = np.full(len(ids), self._recent[1] / self._recent[2])
        quality = self.calibration.score(forecasts, live_share, alive, counts)
        self._ranking = SCORE_MEMORY * self._ranking + _rank_covariance(forecasts, alive if seen is None else seen)
        quality["used"] = float(self.used)
        if (counts * alive).any() and (counts * (1.0 - alive)).any():
            quality["auc"] = auc(forecasts, alive, counts)
        self._metrics = {f"unseen_{name}": value for name, value in quality.items()}
        self._moments = self._moments + np.stack([np.ones_like(raw), raw, raw**2]).sum(axis=1)
        self.rates.learn(offset, self._examples(raw), outcomes, constant[:, 0])
        self.calibration.learn(by_rate, constant, alive, constant[:, 0])
        self._recent = _MEMORY * self._recent + np.array([outcomes.sum(), alive.sum(), len(ids)])

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last generation batch, over prompts that were never visited before."""
        return self._metrics

    def state_dict(self) -> dict[str, np.ndarray]:
        rates = {f"rates.{name}": array for name, array in self.rates.state_dict().items()}
        own = {"moments": self._moments, "recent": self._recent, "ranking": self._ranking}
        return self.calibration.state_dict() | rates | own

    def load_state_dict(self, state: dict[str, np.ndarray]):
        """Continue from a checkpoint; one with or without `columns`, or from before ranks were tested, has nothing to give."""
        if state["moments"].shape == self._moments.shape and "ranking" in state:
            self.calibration.load_state_dict(state)
            self.rates.load_state_dict(section(state, "rates"))
            names = ("moments", "recent", "ranking")
            self._moments, self._recent, self._ranking = (state[name].copy() for name in names)


def _rank_covariance(forecasts: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Return n times the covariance of the forecasts' ranks with what is `true`, or in part, and its variance if ranks were permuted, `(2,)`."""
    ranks, truth = pd.Series(forecasts).rank().to_numpy(), true - true.mean()
    ranks = ranks - ranks.mean()
    return np.array([ranks @ truth, (ranks @ ranks) * (truth @ truth) / max(len(ranks) - 1, 1)])


def auc(forecasts: np.ndarray, true: np.ndarray, counts: np.ndarray) -> float:
    """Return the probability that an example that is `true`, or in part, has a higher forecast than another one, ties counting half."""
    values, place = np.unique(forecasts, return_inverse=True)
    positives, negatives = (np.bincount(place, counts * share, len(values)) for share in (true, 1.0 - true))
    below = np.cumsum(negatives) - negatives / 2.0
    return float(positives @ below / (positives.sum() * negatives.sum()))

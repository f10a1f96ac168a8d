"""The savings ledger: work done against the work that training on all data would have taken."""

from dataclasses import dataclass


KINDS = ("rollout", "update", "logprob")
UNITS = ("tokens", "flops", "seconds")


@dataclass(frozen=True)
class Saving:
    """
    One kind of work in one unit.

    Attributes:
        kind (`str`): One of [`KINDS`].
        unit (`str`): One of [`UNITS`].
        used (`float`): Work done.
        full (`float`): Work that all data would have taken.
        estimated (`bool`): Whether `full` is inferred from the FLOPs, because it was not measured.
    """

    kind: str
    unit: str
    used: float
    full: float
    estimated: bool

    @property
    def saved(self) -> float:
        """Share that was saved, 0.4 for 40 %; negative where more was done than all data would have taken."""
        return 1.0 - self.used / self.full if self.full else 0.0


def savings_of_ledger(ledger: dict[str, float]) -> list[Saving]:
    """
    Savings of every kind of work that a ledger knows of.

    Args:
        ledger (`dict[str, float]`): Cumulative sums such as `update_flops` and `full_update_flops`.

    Returns:
        `list[Saving]`: In the order of [`UNITS`] and [`KINDS`]. Kinds for which no full amount can be told are left
        out.
    """
    savings = []
    for unit in UNITS:
        for kind in KINDS:
            used, full = ledger.get(f"{kind}_{unit}"), ledger.get(f"full_{kind}_{unit}")
            estimated = full is None
            if used is None:
                continue
            if full is None:
                flops, full_flops = ledger.get(f"{kind}_flops"), ledger.get(f"full_{kind}_flops")
                if not flops or full_flops is None:
                    continue
                full = used * full_flops / flops
            if used or full:
                savings.append(Saving(kind, unit, used, full, estimated))
    return savings


def total(ledger: dict[str, float], unit: str) -> float:
    """Work done of all kinds in one unit."""
    return sum(ledger.get(f"{kind}_{unit}", 0.0) for kind in KINDS)

"""Targets for the peak of a chain, from that of no recompute to the lowest there is, each with its best plan."""

from __future__ import annotations

from collections.abc import Sequence

from rewrite.plan.chain import Chain, Simulation

RUNGS = 96
"""Targets of the ladder: one takes about a hundredth of what there is to save."""
TRUST = 0.004
"""How far above the budget a simulated peak may be, of the budget, for the plan to be run all the same."""


class Ladder:
    """The plans of one chain, evenly spaced by simulated peak; they do not depend on a budget."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self._targets: list[int] = []
        self._plans: dict[int, Simulation] = {}

    def targets(self) -> Sequence[int]:
        """The simulated peaks of the ladder, from the highest to the lowest."""
        if not self._targets:
            untouched = self.chain.simulate([0] * len(self.chain.links))
            lowest = self.chain.lowest()
            span = untouched.peak_bytes - lowest.peak_bytes
            self._targets = [untouched.peak_bytes - span * rung // RUNGS for rung in range(RUNGS + 1)]
            self._plans = {0: untouched, RUNGS: lowest}
        return self._targets

    def first(self, budget_bytes: int, off_bytes: int, start: int = 1, trust: float = TRUST) -> int:
        """The first rung worth running, if simulated peaks are `off_bytes` too low; the last if there is none."""
        targets = self.targets()
        bound = budget_bytes * (1 + trust)
        return next((rung for rung in range(start, RUNGS + 1) if targets[rung] + off_bytes <= bound), RUNGS)

    def simulated(self, rung: int) -> Simulation:
        """The plan of a rung, with its simulated peak."""
        targets = self.targets()
        if rung not in self._plans:
            # Bounds that leave a choice out which would do: a plan that does is then taken from above, or from below.
            above = self.simulated(rung - 1) if self.chain.is_loose else None
            if above is not None and above.peak_bytes <= targets[rung]:
                self._plans[rung] = above
            else:
                self._plans[rung] = self.chain.best(targets[rung]) or self._plans[RUNGS]
        return self._plans[rung]

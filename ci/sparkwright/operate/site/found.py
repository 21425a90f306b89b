"""Everything that the site tells of, read and held against each other."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from sparkwright.operate.site.debt import Debt
from sparkwright.operate.site.drifts import Carried, Drifted
from sparkwright.operate.site.history import History
from sparkwright.operate.site.nights import Read
from sparkwright.operate.site.policy import SitePolicy
from sparkwright.operate.site.problems import Problem
from sparkwright.operate.site.releases import Books, Shown


class Found(msgspec.Struct, frozen=True):
    """
    What was read.

    Attributes:
        day: Of which the site tells. *policy*: what it judges by. *link*: where readers find the index, with a final slash.
        books: The index; None where none was given.
        status: What the stacks carry today; None where nobody asked.
        known: Stacks of the checkout.
    """

    day: str
    policy: SitePolicy
    link: str
    books: Books | None
    nights: Read
    drifted: Drifted
    debt: Debt
    status: Carried | None
    histories: tuple[History, ...]
    known: tuple[str, ...] = ()
    further: tuple[Problem, ...] = ()

    @property
    def releases(self) -> tuple[Shown, ...]:
        return self.books.releases if self.books else ()

    @property
    def stacks(self) -> list[str]:
        """Every stack that anything is known of, the newest first."""
        named = {one.entry.stack for one in self.releases} | {one.stack for one in self.nights.nights} | {*self.known}
        return sorted(named, reverse=True)

    @property
    def problems(self) -> list[Problem]:
        """Everything that is damaged, missing or not to be believed."""
        return list(self._problems())

    def _problems(self) -> Iterator[Problem]:
        if self.books:
            yield from (one.problem for one in self.books.releases if one.problem)
            yield from self.books.problems
        # What a commit of long ago holds, nobody can mend; the page of debt names it.
        yield from (*self.nights.problems, *self.drifted.problems, *self.further)

"""Typed errors: a user's mistake in one line, with the place and the mend.

The library raises them; only the command line turns them into exit codes (see `docs/errors.md`).
"""

from __future__ import annotations

from pathlib import Path


class PreplayError(Exception):
    """A mistake that the user can mend.

    Prints as one line: ``FILE:PLACE: what is wrong; how to mend it``. `place` is a line number, a key path such as
    ``baseline.fleet.gpu``, or anything else that lets the reader find the spot.
    """

    def __init__(
        self,
        problem: str,
        *,
        file: str | Path | None = None,
        place: str | int | None = None,
        mend: str | None = None,
    ) -> None:
        self.problem = problem
        self.file = None if file is None else str(file)
        self.place = None if place is None else str(place)
        self.mend = mend
        super().__init__(self.line())

    def line(self) -> str:
        """The whole error as one line, control characters made visible."""
        where = ":".join(part for part in (self.file, self.place) if part is not None)
        text = f"{where}: {self.problem}" if where else self.problem
        if self.mend:
            text = f"{text}; {self.mend}"
        return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


class InputError(PreplayError):
    """A log or a trace that can't be read as what it claims to be."""


class TooManyRejected(InputError):
    """Ingest rejected a larger share of rows than the user allows."""


class StudyError(PreplayError):
    """A study file that doesn't say what to run: unknown key, wrong type, impossible combination."""


class CatalogError(PreplayError):
    """A GPU, model or acceptance source that the catalogue doesn't know, or an entry that doesn't hold together."""


class CapacityError(PreplayError):
    """A model that doesn't fit the memory of the GPUs it is put on."""


class RunError(PreplayError):
    """A run folder that is missing, incomplete or already there."""


class QueryError(PreplayError):
    """SQL that the warehouse refuses."""

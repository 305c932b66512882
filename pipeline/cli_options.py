"""Options that many commands have."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.console import Format

OutputFormat = Annotated[Format, typer.Option("--format", "-f", help="How to print the result on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No talk on stderr; errors still show.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the output folder if it is there.")]

"""Speed, as commands that print a table. Nothing here is asserted; quote medians, and on which machine."""

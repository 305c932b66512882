"""The report: named queries (sql/), charts, sections, page. Reads the warehouse only."""

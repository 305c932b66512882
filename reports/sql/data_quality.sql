-- Grain: one row. The account of the ingest: rows_read = rows_kept + rows_rejected; tokens of the kept rows.
SELECT * FROM ingest;

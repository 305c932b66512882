-- Grain: one row per reason for rejecting rows of the log, the most frequent first.
SELECT reason, rows, first_file, first_line FROM rejected_reasons ORDER BY rows DESC, reason;

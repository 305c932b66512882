-- Grain: one row per entry of the manifest that someone needs to repeat the run (times are in manifest.json only).
SELECT key, value FROM manifest
WHERE key IN ('run_id', 'preplay_version', 'packages', 'study_sha256', 'trace', 'trace_sha256')
ORDER BY key;

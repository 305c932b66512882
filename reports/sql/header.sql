-- Grain: one row. What the page's header says: trace, window, fleet, versions. span_s: from the first arrival to the last.
SELECT
    (SELECT value FROM manifest WHERE key = 'title') AS title,
    (SELECT value FROM manifest WHERE key = 'name') AS name,
    (SELECT value FROM manifest WHERE key = 'run_id') AS run_id,
    (SELECT value FROM manifest WHERE key = 'preplay_version') AS preplay_version,
    (SELECT value FROM manifest WHERE key = 'cost_model') AS cost_model,
    (SELECT value FROM manifest WHERE key = 'cost_model_notes') AS cost_model_notes,
    (SELECT value FROM manifest WHERE key = 'trace') AS trace,
    (SELECT value FROM manifest WHERE key = 'trace_meta')::JSON ->> 'start_utc' AS start_utc,
    (SELECT value FROM manifest WHERE key = 'trace_meta')::JSON ->> 'prefix_identity' AS prefix_identity,
    (SELECT value FROM manifest WHERE key = 'trace_meta')::JSON ->> 'source_format' AS source_format,
    (SELECT (value::JSON ->> 'notes') FROM manifest WHERE key = 'study') AS notes,
    (SELECT json_array_length(value::JSON -> 'seeds') FROM manifest WHERE key = 'study') AS seeds,
    scenarios.model_title,
    scenarios.gpu_title,
    scenarios.replicas,
    scenarios.tensor_parallel,
    scenarios.gpus,
    (SELECT count(DISTINCT request) FROM outcomes) AS requests,
    (SELECT span_s FROM ingest) AS span_s
FROM scenarios
WHERE is_baseline;

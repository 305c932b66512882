-- Grain: one row per scenario and part of the latency. mean_ms: mean over completed requests of all seeds, ms; the parts of a
-- scenario add up to its mean E2E. 'part_order' is the order in which the parts happen.
WITH means AS (
    SELECT
        scenario,
        avg(queue_ms) AS queue,
        avg(prefill_ms) AS prefill,
        avg(first_output_ms) AS first_output,
        avg(decode_target_ms) AS decode_target,
        avg(decode_draft_ms) AS decode_draft,
        avg(decode_rest_ms) AS decode_rest
    FROM outcomes
    WHERE status = 'completed'
    GROUP BY scenario
),
parts AS (
    UNPIVOT means ON queue, prefill, first_output, decode_target, decode_draft, decode_rest INTO NAME part VALUE mean_ms
)
SELECT
    scenarios.position,
    scenario,
    part,
    list_position(
        ['queue', 'prefill', 'first_output', 'decode_target', 'decode_draft', 'decode_rest'], part
    ) AS part_order,
    mean_ms
FROM parts
JOIN scenarios USING (scenario)
ORDER BY scenarios.position, part_order;

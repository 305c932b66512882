-- Grain: one row per rung, from what the trace allows to what a scenario got. reuse_ratio in tokens. The first rungs are the
-- zero-time LRU of one shared cache, prompts only; inferred_ratio: of the replayed one, hits on inferred replies; 'replayed' is the timed replay with its replicas, routing and block size (mean of seeds).
SELECT 'ceiling: unbounded cache, one for all' AS rung, 1 AS rung_order, NULL AS scenario, max(hit_tokens / all_tokens) AS reuse_ratio,
    NULL AS inferred_ratio
FROM reuse_curve
HAVING count(*) > 0
UNION ALL
SELECT
    'capacity: the fleet''s KV memory as one cache', 2, NULL,
    (SELECT max(hit_tokens / all_tokens) FROM reuse_curve
     WHERE capacity_tokens <= (SELECT pool_tokens * replicas FROM scenarios WHERE is_baseline)),
    NULL
WHERE EXISTS (SELECT 1 FROM reuse_curve)
UNION ALL
SELECT
    'replayed: ' || scenario, 3 + scenarios.position, scenario,
    CASE WHEN bool_and(hit_tokens IS NOT NULL) THEN sum(hit_tokens) / sum(input_tokens) END,
    sum(hit_tokens_inferred) / sum(input_tokens)
FROM outcomes
JOIN scenarios USING (scenario)
WHERE prefix_caching AND status = 'completed'
GROUP BY scenario, scenarios.position
ORDER BY rung_order;

-- Grain: one row per scenario. Per seed on average: cached blocks evicted (the only cause in this model: room for another
-- request's blocks), preemptions, tokens that prefilling rows computed, and of those the ones computed again after a preemption
-- (generated tokens among them).
WITH again AS (
    SELECT scenario, sum(recomputed_tokens) / count(DISTINCT seed) AS recomputed_tokens
    FROM outcomes
    GROUP BY scenario
)
SELECT
    scenarios.position,
    scenario,
    sum(evicted_blocks) / count(DISTINCT seed) AS evicted_blocks,
    sum(evicted_blocks) / count(DISTINCT seed) * any_value(block_tokens) AS evicted_tokens,
    sum(preemptions) / count(DISTINCT seed) AS preemptions,
    sum(prefill_tokens) / count(DISTINCT seed) AS prefill_tokens,
    any_value(recomputed_tokens) AS recomputed_tokens
FROM timeline
JOIN scenarios USING (scenario)
JOIN again USING (scenario)
GROUP BY scenario, scenarios.position
ORDER BY scenarios.position;

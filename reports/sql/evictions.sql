-- Grain: one row per scenario. Per seed on average: cached blocks evicted (the only cause in this model: room for another
-- request's blocks), preemptions, prompt tokens computed, tokens computed again after preemptions.
SELECT
    scenarios.position,
    scenario,
    sum(evicted_blocks) / count(DISTINCT seed) AS evicted_blocks,
    sum(evicted_blocks) / count(DISTINCT seed) * any_value(block_tokens) AS evicted_tokens,
    sum(preemptions) / count(DISTINCT seed) AS preemptions,
    sum(prefill_tokens) / count(DISTINCT seed) AS prefill_tokens
FROM timeline
JOIN scenarios USING (scenario)
GROUP BY scenario, scenarios.position
ORDER BY scenarios.position;

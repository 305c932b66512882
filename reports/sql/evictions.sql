-- Grain: one row per scenario. Per seed on average, the warm-up included: cached blocks lost, by cause (room for a prompt, room
-- for a decoding request, end of their time to live), preemptions, tokens that prefilling rows computed, and of those the ones
-- computed again after a preemption (generated tokens among them).
WITH again AS (
    SELECT scenario, sum(recomputed_tokens) / count(DISTINCT seed) AS recomputed_tokens
    FROM all_outcomes
    GROUP BY scenario
)
SELECT
    scenarios.position,
    scenario,
    sum(evicted_blocks) / count(DISTINCT seed) AS evicted_blocks,
    sum(evicted_blocks - evicted_decode_blocks) / count(DISTINCT seed) AS evicted_prefill_blocks,
    sum(evicted_decode_blocks) / count(DISTINCT seed) AS evicted_decode_blocks,
    sum(expired_blocks) / count(DISTINCT seed) AS expired_blocks,
    sum(evicted_blocks + expired_blocks) / count(DISTINCT seed) * any_value(block_tokens) AS evicted_tokens,
    sum(preemptions) / count(DISTINCT seed) AS preemptions,
    sum(prefill_tokens) / count(DISTINCT seed) AS prefill_tokens,
    any_value(recomputed_tokens) AS recomputed_tokens
FROM timeline
JOIN scenarios USING (scenario)
JOIN again USING (scenario)
GROUP BY scenario, scenarios.position
ORDER BY scenarios.position;

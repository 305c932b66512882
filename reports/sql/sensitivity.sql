-- Grain: one row per scenario and latency percentile. Change of it in % when constants of a kind grow by 1 %, on the fixed schedule
-- of one seed: negative for rates. amplification: the change in % when everything takes 1 % longer; over 1 = waiting behind others.
SELECT
    scenario,
    metric,
    value_ms,
    elasticity_memory_bandwidth AS memory_bandwidth,
    elasticity_flops AS flops,
    elasticity_link_bandwidth AS link_bandwidth,
    elasticity_link_latency AS link_latency,
    elasticity_thread_blocks AS thread_blocks,
    elasticity_launches AS launches,
    elasticity_host AS host,
    elasticity_all AS amplification
FROM elasticities
JOIN scenarios USING (scenario)
WHERE value_ms IS NOT NULL
ORDER BY scenarios.position, list_position(['ttft_p50', 'ttft_p95', 'tpot_p50', 'tpot_p95', 'e2e_p50', 'e2e_p95'], metric);
